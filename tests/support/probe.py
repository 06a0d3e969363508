"""A DDP module with a probe on it, in a job of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.probe.completion import Completions
from ddpwatch.probe.ddp import DdpProbe
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import GpuClock, StepRecorder
from ddpwatch.sampling.schedule import SamplingSchedule
from ddpwatch.wire.messages import Group, Layout, Step
from tests.support.guards import noting

LAYERS = 4
NAP_S = 0.02


@pytest.fixture(scope="module", autouse=True)
def gloo_group() -> Iterator[None]:
    """A process group of one rank, for every test of the module that imports this."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


naps: list[tuple[int, int]] = []  # start and end of each, absolute ns


class Nap(torch.autograd.Function):
    """Sleeps in the backward, and notes when."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        start = time.monotonic_ns()
        time.sleep(NAP_S)
        naps.append((start, time.monotonic_ns()))
        return gradient


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        napped: torch.Tensor = Nap.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return napped


def never(step: int) -> bool:
    return False


class FixedSchedule(SamplingSchedule):
    """Which steps are light and which are bare is given."""

    def __init__(self, light: Callable[[int], bool] = never, bare: Callable[[int], bool] = never) -> None:
        super().__init__()
        self.is_light = light  # type: ignore[method-assign]
        self.is_bare = bare  # type: ignore[method-assign]


def light_steps() -> FixedSchedule:
    """Every second step from the fourth on is light."""
    return FixedSchedule(light=lambda step: step >= 4 and step % 2 == 1)


@dataclass
class Backward:
    """One backward as the test itself has seen it.

    Attributes:
        forward_ns: How long the forward before it took. DDP's clock starts in there, and the probe's stamp of the
            forward's end lies in there.
        windows: Per layer, from the end of its nap to the start of the next one (or the end of the backward), absolute
            ns. The layer's bucket is ready, and is launched, in this window.
    """

    forward_ns: int
    windows: list[tuple[int, int]]


class Watched:
    """A DDP module with a probe on it."""

    def __init__(
        self,
        sampling: SamplingSchedule | None = None,
        prepare: Callable[[DistributedDataParallel], None] = lambda ddp: None,
        on_wait: Callable[[], None] = lambda: None,
        on_validation: Callable[[int, int], None] = lambda start, end: None,
        gpu: GpuClock | None = None,
        last: nn.Module | None = None,
        module: nn.Module | None = None,
        **options: Any,
    ) -> None:
        stack = nn.Sequential(*[Layer(8, 8) for _ in range(LAYERS)], *([] if last is None else [last]))
        self.ddp = DistributedDataParallel(module or stack, **{"bucket_cap_mb": 0.0002, **options})
        prepare(self.ddp)
        self.records: list[StepRecord] = []
        self.layouts: list[Layout] = []
        self.groups: list[Group] = []
        self.errors: list[Exception] = []
        self.backwards: list[Backward] = []
        self.recorder = StepRecorder(self.records.append, on_validation=on_validation)
        self.recorder.use(gpu, sampling)
        self.guard = noting(self.errors)
        self.completions = Completions()
        self.probe = DdpProbe(self.ddp, self.context(on_wait=on_wait))

    def context(self, module: int = 0, param_base: int = 100, **options: Any) -> ProbeContext:
        """What a probe on one more module gets."""
        options.update(module=module, param_base=param_base, completions=self.completions)
        return ProbeContext(self.recorder, self.guard, self.publish, **options)

    def publish(self, message: Group | Layout) -> None:
        """Takes what the probe publishes."""
        if isinstance(message, Group):
            self.groups.append(message)
        else:
            self.layouts.append(message)

    @property
    def longest_forward_ns(self) -> int:
        """In here lies the difference between DDP's clock and the probe's, in any step."""
        return max(backward.forward_ns for backward in self.backwards)

    @property
    def longest_lag_ns(self) -> int:
        """No bucket took longer from its last gradient to its launch, in any step."""
        return max(last - first for backward in self.backwards for first, last in backward.windows)

    def train(self, steps: int) -> list[Step]:
        optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        for _ in range(steps):
            self._forward_and_backward()
            self.recorder.optimizer_begin()
            optimizer.step()
            self.recorder.optimizer_end()
            optimizer.zero_grad()
        self.recorder.finish()
        self.completions.stop()
        assert self.errors == []
        return [record.message(0, 0) for record in self.records]

    def _forward_and_backward(self) -> None:
        naps.clear()
        start = time.monotonic_ns()
        output = self.ddp(torch.ones(2, 8))
        forward_ns = time.monotonic_ns() - start
        output.sum().backward()
        starts = [*(start for start, _ in naps[1:]), time.monotonic_ns()][: len(naps)]
        self.backwards.append(Backward(forward_ns, [(nap[1], after) for nap, after in zip(naps, starts, strict=True)]))


def assert_launches_lie_between_the_naps(step: Step, watched: Watched, early_ns: int = 0, late_ns: int = 0) -> None:
    """Each launch lies between its layer's nap and the next one, or outside by no more than the test has measured."""
    for launch, (earliest, latest) in zip(step.comm_launch, watched.backwards[step.step].windows, strict=True):
        assert earliest - early_ns <= step.start_ns + launch <= latest + late_ns
