"""Watches every module of DDP and FSDP2 of a process without a line in its script (`ddpwatch run`)."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpwatch.probe.calls import GROUP_MAKER, SeenCalls, innermost
from ddpwatch.probe.issue_counts import see_own_counts

_log = logging.getLogger("ddpwatch")
_first_forwards: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDP2's states that have had theirs
_told = False  # whether something was to be watched: a module in DDP or FSDP2, or the loop
tell: Callable[[str, str], None] = lambda word, text: None  # noqa: E731 - sitecustomize's, for the start-up file


def install(distributed: ModuleType) -> None:
    """Makes DDP modules watch themselves as soon as they are built.

    A comm hook can only be registered on a finished module, so ddpwatch always comes first and sees the user's.

    Args:
        distributed: The module ``torch.nn.parallel.distributed``, just imported.
    """
    SeenCalls([(distributed.DistributedDataParallel, "__init__")], end=_watch, names=["self"], on_error=_blind)


def install_sharded(states: ModuleType) -> None:
    """Makes FSDP2's modules watch themselves in their first forward: only then is it known which of them is the root.

    Args:
        states: The module ``torch.distributed.fsdp._fully_shard._fsdp_state``, just imported.
    """
    SeenCalls([(states.FSDPState, "_lazy_init")], end=_watch_root, names=["self"], on_error=_blind)


def install_ray(workers: ModuleType) -> None:
    """Says goodbye when Ray Train has ended the training: it then kills its workers, which run no exit handler.

    Args:
        workers: The module ``ray.train.v2._internal.execution.worker_group.worker``, just imported.
    """
    SeenCalls([(workers.RayTrainWorker, "shutdown")], begin=lambda: _end(workers), on_error=_blind)


def _watch_root(state: Any, result: None) -> None:
    """Watches the root of a model of FSDP2, once: each of its forwards comes here, and the script may have let go."""
    if state not in _first_forwards:
        _first_forwards.add(state)
        for module in state._modules[:1] if state._is_root else ():
            _watch(module)


def _blind(error: Exception) -> None:
    _log.warning("ddpwatch does not watch, training goes on: %s", _reason_of(error))


def _reason_of(error: Exception) -> str:
    guard = sys.modules.get("ddpwatch.probe.guard")
    if guard is not None and guard.is_the_jobs(error):  # raised by a signal handler meanwhile
        raise error
    return type(error).__name__ if guard is None else str(guard.reason_of(error))


def install_groups(c10d: Any) -> None:
    """Says that this process has joined a process group, and notes who makes others: their names say what they are for.

    What one rank alone counts in a group is seen from here on: later, the ranks' counts would differ already.

    Args:
        c10d: The module ``torch.distributed.distributed_c10d``, just imported.
    """

    def end(group: Any, result: None) -> None:
        with contextlib.suppress(AttributeError):  # None, or a placeholder in processes outside the group
            tell("group", f"{group.rank()} {group.size()}")

    def made(group: Any) -> None:
        from ddpwatch.probe.group_roles import note_maker

        note_maker(group)

    from ddpwatch.probe.role_makers import unnamed

    see_own_counts(c10d, unnamed)
    SeenCalls([(c10d, "_update_default_pg")], end=end, names=["pg"], on_error=_blind)
    maker = innermost(getattr(c10d, GROUP_MAKER, None))
    SeenCalls([], end=made, on_error=unnamed, code=getattr(maker, "__code__", None))


def install_roles(module: Any) -> None:
    """Notes what a mesh calls its dimensions, and in which group the stages of a pipeline talk.

    Args:
        module: One of `ddpwatch.probe.role_makers.ROLE_MAKERS`, just imported.
    """
    from ddpwatch.probe.role_makers import see_roles

    see_roles(module)


def install_loops(optimizers: ModuleType) -> None:
    """Makes a loop watch itself at its first optimizer step, if nothing else is watched by then.

    Args:
        optimizers: The module ``torch.optim.optimizer``, just imported.
    """
    from ddpwatch.probe.optimizer_steps import see_optimizer_steps

    def end(optimizer: Any) -> None:
        if not waits_for_group():
            leave()
            if not _told:
                _watch(None)

    def begin(optimizer: Any) -> None:  # if a closure computes the gradients, it may meet a module of FSDP2 first
        if waits_for_group():
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group.get("params", ()))
        if any(parameter.is_leaf and parameter.grad is not None for parameter in parameters):
            end(optimizer)

    def failed(error: Exception) -> None:
        leave()
        _blind(error)

    leave = see_optimizer_steps(begin, end, failed)


def waits_for_group() -> bool:
    """Returns whether this is one of several ranks, or another's child, and has no process group yet.

    A job may have any number of such children, which would be a run each.
    """
    import torch.distributed as dist

    is_one = os.environ.get("WORLD_SIZE", "1") != "1" or multiprocessing.parent_process() is not None
    return is_one and not (dist.is_available() and dist.is_initialized())


def _end(workers: ModuleType) -> None:
    """Closes this process's session, unless its training still runs: then Ray aborts it."""
    try:
        session = getattr(sys.modules.get("ddpwatch.probe.session"), "current", None)
        training = workers.get_train_context().execution_context.training_thread_runner
        if session is not None and not training.is_running():
            error = training.get_error()
            session.end(getattr(error, "_base_exc", error))
    except Exception as error:
        _log.warning("ddpwatch does not know how the training ended: %s", error)


def _watch(model: Any, result: None = None) -> None:
    """Watches a module. No error may reach the script, which does not know that ddpwatch is here."""
    global _told
    _told = True
    tell("model", "loop" if model is None else "wrapped")
    try:
        from ddpwatch.probe.watch import watch

        handle = watch(model, record=os.environ.get("DDPWATCH_RECORD"))
        if handle.refused:
            tell("refused", handle.refused)
    except Exception as error:
        tell("refused", " ".join(str(error).split()))
        _blind(error)
