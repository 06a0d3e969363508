"""From a hook's name to its function and state."""
# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Optional

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # as torch.distributed has it, but known to type checkers
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from trainer.comm_hooks import aggregate, cast, powersgd
from trainer.comm_hooks.cast import Hook
from trainer.distributed import World
from trainer.errors import TrainerError
from trainer.in_order import InOrder

COMM_HOOKS = (
    "allreduce", "fp16", "bf16", "powersgd", "batched-powersgd", "noop", "weighted", "gathered", "reduce-scatter",
)  # fmt: skip
WRAPPERS = {"fp16": cast.in_fp16, "bf16": cast.in_bf16}
CHAINS = ("powersgd", "batched-powersgd", "reduce-scatter")


@dataclass(frozen=True, kw_only=True)
class HookOptions:
    """Options of the comm hooks."""

    powersgd_rank: int = 2
    """Rank of the approximation: more is closer, and costs more bytes."""

    powersgd_start: int = 10
    """Steps of plain all-reduce before compression; at least 2 with error feedback or warm start."""

    powersgd_error_feedback: bool = True
    """Add what compression has lost to the next step's gradient."""

    powersgd_warm_start: bool = True
    """Start from the previous step's factors."""

    weights: Optional[tuple[float, ...]] = None
    """One per rank for ``weighted``; None weighs by local sample count."""

    aggregate: Literal["mean", "median", "trimmed-mean"] = "mean"
    """What ``gathered`` computes."""

    trim: int = 1
    """How many of the largest and of the smallest values ``trimmed-mean`` drops."""


@dataclass(frozen=True)
class CommHook:
    """A hook that is ready to be registered."""

    name: str
    state: Any
    function: Hook

    def begin_step(self, samples: int) -> None:
        """Pass the step's local samples to a hook that weighs by them."""
        if isinstance(self.state, aggregate.Weights):
            self.state.begin_step(samples)

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart."""
        return self.state.state_dict() if isinstance(self.state, powersgd.PowerSGD) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what survived a restart."""
        if isinstance(self.state, powersgd.PowerSGD):
            self.state.load_state_dict(state)

    def wire_ratio(self) -> float:
        """Bytes on the wire over those of a plain all-reduce of the same gradients."""
        wrapper, _, inner = self.name.rpartition("+")
        ratio = 0.5 if wrapper or inner in WRAPPERS else 1.0
        if isinstance(self.state, powersgd.PowerSGD):
            return ratio / self.state.compression()
        if isinstance(self.state, aggregate.Gathered):
            return ratio * dist.get_world_size() / 2
        return 0.0 if inner == "noop" else ratio


def check_comm_hook(name: str, options: HookOptions, world: World) -> None:
    """Refuse a hook that cannot work, before any process group starts.

    Raises:
        TrainerError: Unknown name, or options that do not fit the hook or the number of ranks.
    """
    wrappers, inner = _split(name)
    if inner not in COMM_HOOKS or not all(wrapper in WRAPPERS for wrapper in wrappers):
        raise TrainerError(f"no comm hook is called {name!r}; known: {', '.join(COMM_HOOKS)}, fp16+NAME, bf16+NAME")
    if len(wrappers) > 1 or (wrappers and inner in WRAPPERS):
        raise TrainerError(f"comm hook {name!r} casts twice; one of fp16+NAME or bf16+NAME is enough")
    if "powersgd" in inner:
        _check_powersgd(inner, options, world)
    if inner == "weighted":
        _check_weights(options.weights, world)
    if inner == "gathered" and 2 * _trim(options, world) >= world.size:
        raise TrainerError(f"gathered: dropping 2 x {options.trim} of {world.size} ranks leaves none to average")


def build_comm_hook(name: str, options: HookOptions, world: World) -> CommHook:
    """Build the hook; collective, since some hooks get a process group of their own."""
    wrappers, inner = _split(name)
    state, function = _basic(inner, options, world)
    if inner in CHAINS and world.backend == "gloo":
        function = in_order(function, InOrder(device=world.device))
    for wrapper in wrappers:
        function = WRAPPERS[wrapper](function)
    return CommHook(name, state, function)


def in_order(hook: Hook, thread: InOrder) -> Hook:
    """Run ``hook``, with all that it waits for, on ``thread``."""

    def in_order_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        return thread.submit(partial(hook, state, bucket))

    return in_order_hook


def _basic(name: str, options: HookOptions, world: World) -> tuple[Any, Hook]:
    simple: dict[str, Hook] = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": cast.fp16_hook,
        "bf16": cast.bf16_hook,
        "noop": aggregate.noop_hook,
    }
    if name in simple:
        return None, simple[name]
    if name == "weighted":
        return aggregate.Weights(options.weights, world.device), aggregate.weighted_hook
    if name == "gathered":
        return aggregate.Gathered(_trim(options, world)), aggregate.gathered_hook
    group = dist.new_group()  # for the links of chains only, see `in_order`
    if name == "reduce-scatter":
        return group, aggregate.reduce_scatter_hook
    return _powersgd(name, options, group), powersgd.powersgd_hook


def _powersgd(name: str, options: HookOptions, group: dist.ProcessGroup) -> powersgd.PowerSGD:
    return powersgd.powersgd_state(
        name.startswith("batched"), options.powersgd_rank, options.powersgd_start,
        options.powersgd_error_feedback, options.powersgd_warm_start, group,
    )  # fmt: skip


def _split(name: str) -> tuple[list[str], str]:
    *wrappers, inner = name.split("+")
    return wrappers, inner


def _trim(options: HookOptions, world: World) -> int:
    return {"mean": 0, "median": (world.size - 1) // 2, "trimmed-mean": options.trim}[options.aggregate]


def _check_powersgd(name: str, options: HookOptions, world: World) -> None:
    if world.size == 1:
        raise TrainerError(f"{name} compresses what ranks send each other, and there is only one rank")
    if options.powersgd_rank < 1:
        raise TrainerError(f"{name}: the rank of the approximation is {options.powersgd_rank}, at least 1 is needed")
    if options.powersgd_start < 2 and (options.powersgd_error_feedback or options.powersgd_warm_start):
        raise TrainerError(f"{name} with error feedback or warm start cannot begin before step 2, DDP rebuilds then")


def _check_weights(weights: Optional[tuple[float, ...]], world: World) -> None:
    if weights is None:
        return
    if len(weights) != world.size:
        raise TrainerError(f"weighted: {len(weights)} weights for {world.size} ranks")
    if min(weights) < 0 or sum(weights) <= 0:
        raise TrainerError("weighted: weights must not be negative, and not all of them 0")
