"""Faults to learn from: ranks that are slow, stop, or die, on request."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from trainer import spec
from trainer.distributed import World
from trainer.errors import TrainerError
from trainer.layers import matching_layers, owns_parameters

Place = Literal["input", "forward", "backward", "comm"]
GARBAGE_CYCLES = 300_000


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong at a place, on a rank, in some steps; None means every rank, or every step.

    It strikes from the step ``since`` up to and without the step ``until``, in those that ``every`` divides.
    """

    name: str
    place: Place
    strike: Callable[[], None]
    ms: float = 0.0
    rank: int | None = None
    step: int | None = None
    every: int | None = None
    since: int | None = None
    until: int | None = None
    layer: str | None = None

    def due(self, step: int) -> bool:
        """Whether it strikes in this step."""
        if self.step not in (None, step) or (self.every is not None and step % self.every):
            return False
        return (self.since or 0) <= step and (self.until is None or step < self.until)


def parse_faults(specs: Iterable[str]) -> list[Fault]:
    """Parse the values of ``--inject``.

    Raises:
        TrainerError: Unknown name or option.
    """
    return [spec.build("fault", text, FAULTS) for text in specs]


class FaultPlan:
    """This rank's faults. One that ends a process does so in the first attempt only, or no restart would help."""

    def __init__(self, faults: Iterable[Fault], world: World, model: nn.Module) -> None:
        """Hook the faults of this rank into the model."""
        mine = [fault for fault in faults if fault.rank in (None, world.rank)]
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        self.faults = [fault for fault in mine if not (restarted and fault.name in FATAL)]
        self.step = 0
        for fault in self.faults:
            self._hook(fault, model)

    @property
    def comm_delay_s(self) -> float:
        """How much later than it could, this rank sends every bucket."""
        return sum(fault.ms for fault in self.faults if fault.place == "comm") / 1e3

    def begin_step(self, step: int) -> None:
        """Note the number of the step that starts."""
        self.step = step

    def at_input(self) -> None:
        """Strike while a batch is being fetched."""
        for fault in self.faults:
            if fault.place == "input":
                self._strike(fault)

    def _hook(self, fault: Fault, model: nn.Module) -> None:
        layer = target_layer(fault, model)
        if fault.place == "forward":
            layer.register_forward_pre_hook(lambda module, inputs: self._strike(fault))
        elif fault.place == "backward":
            layer.register_full_backward_pre_hook(lambda module, gradients: self._strike(fault))

    def _strike(self, fault: Fault) -> None:
        if fault.due(self.step):
            fault.strike()


def target_layer(fault: Fault, model: nn.Module) -> nn.Module:
    """Return the layer that a fault strikes at.

    That is the first match of its pattern. Without one it is the middle layer, where buckets are in flight.

    Raises:
        TrainerError: Nothing matches its pattern.
    """
    if fault.layer is not None:
        return matching_layers(model, fault.layer)[0][1]
    layers = [module for module in model.modules() if owns_parameters(module)]
    return layers[len(layers) // 2]


def _sleep(ms: float) -> Callable[[], None]:
    def strike() -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # a host that is ahead of its GPU delays nothing
        time.sleep(ms / 1e3)

    return strike


def slow_backward(
    *, ms: float = 200.0, rank: int | None = None, step: int | None = None, every: int | None = None,
    since: int | None = None, until: int | None = None, layer: str | None = None,
) -> Fault:  # fmt: skip
    """Sleep in the backward of a layer."""
    strike = _sleep(ms)
    return Fault(
        name="slow-backward", place="backward", strike=strike, rank=rank, step=step, every=every, since=since,
        until=until, layer=layer,
    )  # fmt: skip


def slow_forward(
    *, ms: float = 200.0, rank: int | None = None, step: int | None = None, every: int | None = None,
    since: int | None = None, until: int | None = None, layer: str | None = None,
) -> Fault:  # fmt: skip
    """Sleep in the forward of a layer."""
    strike = _sleep(ms)
    return Fault(
        name="slow-forward", place="forward", strike=strike, rank=rank, step=step, every=every, since=since,
        until=until, layer=layer,
    )  # fmt: skip


def slow_input(
    *, ms: float = 200.0, rank: int | None = None, step: int | None = None, every: int | None = None,
    since: int | None = None, until: int | None = None,
) -> Fault:  # fmt: skip
    """Sleep while a batch is being fetched."""
    return Fault(
        name="slow-input", place="input", strike=_sleep(ms), rank=rank, step=step, every=every, since=since,
        until=until,
    )  # fmt: skip


def slow_comm(*, ms: float = 50.0, rank: int | None = None) -> Fault:
    """Send every bucket late, one after the other, while the rank goes on computing."""
    return Fault(name="slow-comm", place="comm", strike=_sleep(ms), ms=ms, rank=rank)


def gc_pause(*, rank: int | None = None, step: int | None = None, every: int | None = None) -> Fault:
    """Make cyclic garbage, and collect it in the middle of forward."""
    return Fault(name="gc", place="forward", strike=_collect, rank=rank, step=step, every=every)


def _collect() -> None:
    for _ in range(GARBAGE_CYCLES):
        cycle: list[object] = []
        cycle.append(cycle)
    gc.collect()


def _ending(name: str, strike: Callable[[], None]) -> Callable[..., Fault]:
    def build(*, rank: int | None = None, step: int = 10, layer: str | None = None) -> Fault:
        return Fault(name=name, place="backward", strike=strike, rank=rank, step=step, layer=layer)

    return build


def _hang() -> None:
    threading.Event().wait()


def _raise() -> None:
    raise RuntimeError("injected: --inject raise")


FATAL: dict[str, Callable[[], None]] = {
    "hang": _hang,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
FAULTS: dict[str, Callable[..., Fault]] = {
    "slow-backward": slow_backward,
    "slow-forward": slow_forward,
    "slow-input": slow_input,
    "slow-comm": slow_comm,
    "gc": gc_pause,
    **{name: _ending(name, strike) for name, strike in FATAL.items()},
}


def check_faults(faults: Iterable[Fault], world: World, model: nn.Module) -> None:
    """Refuse faults that could never strike.

    Raises:
        TrainerError: A rank or layer that does not exist, a period below 1, or an end before the start.
    """
    for fault in faults:
        if fault.rank is not None and not 0 <= fault.rank < world.size:
            raise TrainerError(f"fault {fault.name}: there is no rank {fault.rank} among {world.size}")
        if fault.every is not None and fault.every < 1:
            raise TrainerError(f"fault {fault.name}: every={fault.every} is not a period")
        if fault.until is not None and fault.until <= (fault.since or 0):
            raise TrainerError(
                f"fault {fault.name}: no step lies between since={fault.since or 0} and until={fault.until}"
            )
        target_layer(fault, model)
