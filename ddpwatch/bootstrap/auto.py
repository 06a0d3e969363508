"""Watches every module of DDP and FSDP2 of a process without a line in its script (`ddpwatch run`)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpwatch.startup import UNWATCHED_MODELS

_log = logging.getLogger("ddpwatch")
tell: Callable[[str, str], None] = lambda word, text: None  # noqa: E731 - sitecustomize's, for the start-up file


def install(distributed: ModuleType) -> None:
    """Makes DDP modules watch themselves as soon as they are built.

    A comm hook can only be registered on a finished module, so ddpwatch always comes first and wraps the user's.

    Args:
        distributed: The module ``torch.nn.parallel.distributed``, just imported.
    """
    ddp_class = distributed.DistributedDataParallel
    original = ddp_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        _watch(self)

    ddp_class.__init__ = __init__


def install_sharded(states: ModuleType) -> None:
    """Makes FSDP2's modules watch themselves in their first forward: only then is it known which of them is the root.

    Args:
        states: The module ``torch.distributed.fsdp._fully_shard._fsdp_state``, just imported.
    """
    original = states.FSDPState._lazy_init

    @functools.wraps(original)
    def _lazy_init(self: Any) -> None:
        is_first = getattr(self, "_is_root", True) is None
        original(self)
        for module in getattr(self, "_modules", ())[:1] if is_first else ():
            _watch(module)

    states.FSDPState._lazy_init = _lazy_init


def install_ray(workers: ModuleType) -> None:
    """Says goodbye when Ray Train has ended the training: it then kills its workers, which run no exit handler.

    Args:
        workers: The module ``ray.train.v2._internal.execution.worker_group.worker``, just imported.
    """
    original = workers.RayTrainWorker.shutdown

    @functools.wraps(original)
    def shutdown(self: Any) -> Any:
        _end(workers)
        return original(self)

    workers.RayTrainWorker.shutdown = shutdown


def install_groups(c10d: Any) -> None:
    """Says that this process has joined a process group.

    What is replaced runs once ``init_process_group`` has succeeded, and raises nothing: no frame of ours shows.

    Args:
        c10d: The module ``torch.distributed.distributed_c10d``, just imported.
    """
    original = c10d._update_default_pg

    @functools.wraps(original)
    def _update_default_pg(group: Any) -> None:
        original(group)
        with contextlib.suppress(Exception):  # None, or what stands for a group without this process
            tell("group", f"{group.rank()} {group.size()}")

    c10d._update_default_pg = _update_default_pg


def install_unwatched(wrappers: ModuleType) -> None:
    """Says it when a model is built that is not watched. ``__new__`` has returned before the constructor starts.

    Args:
        wrappers: A module of `UNWATCHED_MODELS`, just imported.
    """
    name, class_name = next((n, c) for n, (m, c) in UNWATCHED_MODELS.items() if m == wrappers.__name__)
    model_class = getattr(wrappers, class_name)
    original = model_class.__new__

    def __new__(cls: type, *arguments: Any, **options: Any) -> Any:
        tell("model", name)
        return object.__new__(cls) if original is object.__new__ else original(cls, *arguments, **options)

    __new__.__wrapped__ = model_class.__init__  # type: ignore[attr-defined] # what inspect.signature shows
    model_class.__new__ = staticmethod(__new__)


def _end(workers: ModuleType) -> None:
    """Closes this process's session, unless its training still runs: then Ray aborts it."""
    try:
        session = getattr(sys.modules.get("ddpwatch.probe.session"), "_session", None)
        training = workers.get_train_context().execution_context.training_thread_runner
        if session is not None and not training.is_running():
            error = training.get_error()
            session.end(getattr(error, "_base_exc", error))
    except Exception as error:
        _log.warning("ddpwatch does not know how the training ended: %s", error)


def _watch(model: Any) -> None:
    """Watches a module. No error may reach the script, which does not know that ddpwatch is here."""
    tell("model", "wrapped")
    try:
        from ddpwatch.probe.session import watch

        watch(model, record=os.environ.get("DDPWATCH_RECORD"))
    except Exception as error:
        _log.warning("ddpwatch does not watch, training goes on: %s", error)
