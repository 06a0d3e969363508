"""Watched jobs in one process, on a real GPU or on the CPU, also with made-up collectives (`SleepingGroup`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.probe.cuda import CudaClock
from ddpwatch.probe.cuda_calls import cuda_clock
from ddpwatch.probe.ddp import DdpProbe
from ddpwatch.probe.guard import Guard
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.sampling.schedule import SamplingSchedule
from tests.support.sleeping_group import SleepingGroup

CALIBRATION_CYCLES = 50_000_000
LEVELS = ("unwatched", "shadow", "ok")
LARGE: dict[str, Any] = {"layers": 3, "width": 8192, "batch": 4096}  # few launches: the host is many steps ahead


def average(state, bucket):  # type: ignore[no-untyped-def]  # without annotations: DDP takes none in quotes
    """A comm hook for a world of one: NCCL launches a kernel there only for an average."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def graphed(model: nn.Module, data: torch.Tensor) -> nn.Module:
    """A model whose forward and backward are replayed as CUDA graphs."""
    return torch.cuda.make_graphed_callables(model, (data.clone(),))  # type: ignore[return-value]


def nccl_alone(device: torch.device) -> dist.ProcessGroup:
    """Makes NCCL's default process group of a world of one."""
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    return group


def cycles_per_ms() -> float:
    """How many cycles `torch.cuda._sleep` takes for a millisecond."""
    torch.cuda._sleep(CALIBRATION_CYCLES)  # the clock speeds up
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return CALIBRATION_CYCLES / start.elapsed_time(end)


class OneLevel(SamplingSchedule):
    """Records all steps alike, from the third on.

    Attributes:
        level: One of `LEVELS`.
    """

    def __init__(self, level: str = "ok") -> None:
        super().__init__()
        self.level = level

    def is_light(self, step: int) -> bool:
        """Whether steps are light_steps now."""
        return step > 2 and self.level == "shadow"

    def is_bare(self, step: int) -> bool:
        """Whether steps are bare now."""
        return step > 2 and self.level == "unwatched"


class Watched:
    """A DDP module with a probe, without session, sender and collector; or without the probe, as its twin.

    Args:
        ddp: The module.
        device: Where it computes.
        gpu: A clock to pretend with that the device is a GPU; a GPU has its own.
        watch: Whether it has a probe.

    Attributes:
        records: Of its steps.
        errors: Of the probe.
        schedule: Chooses the steps' level.
    """

    def __init__(
        self, ddp: DistributedDataParallel, device: torch.device, gpu: CudaClock | None = None, watch: bool = True
    ) -> None:
        self.ddp = ddp
        self.device = device
        self.records: list[StepRecord] = []
        self.errors: list[Exception] = []
        self.schedule = OneLevel()
        self.recorder = StepRecorder(self.records.append)
        self.probe: DdpProbe | None = None
        if gpu is not None:
            ddp.device_type = "cuda"
        if watch:
            self.recorder.use(cuda_clock(device) if device.type == "cuda" else gpu, self.schedule)
            guard = Guard(lambda feature, error: self.errors.append(error))
            self.probe = DdpProbe(ddp, ProbeContext(self.recorder, guard, lambda layout: None))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends a step."""
        self.recorder.optimizer_begin()
        optimizer.step()
        self.recorder.optimizer_end()

    def synchronise(self) -> None:
        """Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def finish(self) -> str:
        """Ends the watching; a digest of all parameters and buffers."""
        self.synchronise()
        digest = hashlib.sha256()
        for tensor in (*self.ddp.parameters(), *self.ddp.buffers()):
            digest.update(tensor.detach().float().cpu().numpy().tobytes())
        if self.probe is not None:
            try:
                self.recorder.finish()
            except RuntimeError as error:
                self.errors.append(error)
            self.probe.close()
        return digest.hexdigest()[:12]


class Job(Watched):
    """A stack of linear layers in DDP, one bucket each.

    Args:
        device: Where it computes.
        cycles: How long each bucket's all-reduce sleeps.
        layers, width, batch: Its size.
        wrap: What becomes of the model before DDP gets it.
        gpu: See `Watched`.
        group: A process group instead of a `SleepingGroup`.
    """

    def __init__(
        self,
        device: torch.device,
        cycles: int = 0,
        layers: int = 8,
        width: int = 1024,
        batch: int = 1024,
        wrap: Callable[[nn.Module, torch.Tensor], nn.Module] = lambda model, data: model,
        gpu: CudaClock | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.data = torch.randn(batch, width, device=device)
        stack = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to(device)
        ddp = DistributedDataParallel(
            wrap(stack, self.data),
            process_group=group or SleepingGroup(device, cycles),
            init_sync=False,
            bucket_cap_mb=width * width * 4 / (1 << 20),
        )
        super().__init__(ddp, device, gpu)
        self.optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)

    def step(self) -> None:
        """Trains one step."""
        self.ddp(self.data).square().mean().backward()
        self.update(self.optimizer)
        self.optimizer.zero_grad()

    def steps(self, count: int, level: str = "ok", wait: bool = False) -> list[StepRecord]:
        """Trains steps of a level, and waits for the GPU.

        Args:
            count: How many records are wanted.
            level: One of `LEVELS`.
            wait: Whether to wait after each step: a GPU that is too far behind leaves steps unresolved.

        Returns:
            Their records. One step more was trained, which is still open.
        """
        self.schedule.level = level
        before = len(self.records)
        for _ in range(count + 1):
            self.step()
            if wait:
                self.synchronise()
        self.synchronise()
        if isinstance(self.recorder.gpu, CudaClock):
            self.recorder.gpu.poll()
        assert not self.errors, self.errors
        return self.records[before + 1 :]
