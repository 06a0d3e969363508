"""One rank of a real job that goes wrong as planned, stretch by stretch (see `diagnosis_real.py`, which starts it).

    torchrun --standalone --nproc-per-node=2 benchmarks/diagnosis_job.py PLAN.json FOLDER

It trains a plain DDP loop, the same with compute as pauses, or the trainer of `trainer/` with its faults, and records
to ``FOLDER/run.mcap``. Each rank writes what it did to itself to ``FOLDER/strikes-RANK.json``: stretch, step, and how
long it took. It adds, for each step, how long that took, for how long DDP's own logger says that the backward waited
for communication, and how long the kernel says that the training thread was ready to run and had no core (ns).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

LEARN_STEPS = range(12, 32)  # how long a step usually takes
LAYERS, WIDTH, BATCH, CAP_MIB = 8, 512, 192, 2.0
PACED_WIDTH, PACED_BATCH, PACED_CAP_MIB, PACED_MS = 256, 8, 0.5, 3.0  # per layer in the forward, twice in the backward
MODEL = "gpt:width=96"
GARBAGE = 100_000


@dataclass(frozen=True)
class Stretch:
    """Steps in which something goes wrong.

    Attributes:
        rank: Whose step; None: everybody's.
        place: data, between, forward, backward (sleeps), gc, stop (SIGSTOP) or busy (something else on its core).
        size: Of a usual step; ``seconds`` serve instead where they are not 0.
        period: In every so many steps of the stretch.
        layer: Which layer it strikes at.
    """

    kind: str
    place: str
    rank: int | None
    since: int
    until: int
    size: float = 0.0
    seconds: float = 0.0
    period: int = 1
    layer: int = LAYERS // 2

    def due(self, step: int) -> bool:
        """Whether it strikes in this step."""
        return self.since <= step < self.until and (step - self.since) % self.period == 0


class Injector:
    """What this rank does to itself.

    Attributes:
        step: The current step.
        steps: Of each one before it: number, duration, wait for a core, exposed communication by DDP's logger (ns).
    """

    def __init__(self, stretches: list[Stretch], rank: int) -> None:
        self.step = -1
        self.steps: list[tuple[int, int, int, int]] = []
        self._ddp: DistributedDataParallel | None = None
        self._ended: tuple[int, int, int] | None = None  # the newest step: number, duration, wait for a core
        self.mine = {at: one for at, one in enumerate(stretches) if one.rank in (None, rank)}
        self.strikes: list[tuple[int, int, int]] = []
        self.layers: dict[int, str] = {}
        self._usual_s, self._durations, self._started, self._starved = 0.0, [0.0], time.monotonic(), 0
        self._busy: subprocess.Popen[bytes] | None = None

    def measure(self, ddp: DistributedDataParallel) -> None:
        """From now on, DDP measures every step, not every hundredth."""
        ddp._set_ddp_runtime_logging_sample_rate(1)
        self._ddp = ddp

    def begin(self, step: int) -> None:
        """A step starts."""
        now, starved = time.monotonic(), _starved_ns()
        if self._ddp is not None and self.step >= 0:
            logged = self._ddp._get_ddp_logging_data()
            exposed = logged.get("backward_comm_time", 0) - logged.get("backward_compute_comm_overlap_time", 0)
            if self._ended is not None:  # in each forward, DDP works out the figures of the step before
                self.steps.append((*self._ended, exposed))
            self._ended = self.step, int(1e9 * (now - self._started)), starved - self._starved
        if self.step in LEARN_STEPS:
            self._durations.append(now - self._started)
            self._usual_s = median(self._durations)
        self.step, self._started, self._starved = step, now, starved
        for at, one in self.mine.items():
            if one.place == "busy":
                self._occupy(at, one)

    def at(self, place: str, layer: int | None = None) -> None:
        """Strikes if that is due here."""
        for at, one in self.mine.items():
            if one.place == place and (layer is None or one.layer == layer) and one.due(self.step):
                self.strike(at, one)

    def strike(self, at: int, one: Stretch) -> None:
        """Sleeps, stops, or collects garbage, and notes how long that took."""
        started = time.monotonic_ns()
        seconds = one.seconds or one.size * self._usual_s
        if one.place == "stop":
            subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif one.place == "gc":
            _make_garbage()
            started = time.monotonic_ns()
            gc.collect()
        else:
            time.sleep(seconds)
        self.strikes.append((at, self.step, time.monotonic_ns() - started))

    def _occupy(self, at: int, one: Stretch) -> None:
        if one.due(self.step):
            self.strikes.append((at, self.step, 0))
        if one.due(self.step) and self._busy is None:
            self._busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            os.sched_setaffinity(self._busy.pid, os.sched_getaffinity(0))
        elif not one.due(self.step) and self._busy is not None and self.step >= one.until:
            self.end()

    def end(self) -> None:
        """Ends what keeps the core busy."""
        if self._busy is not None:
            self._busy.kill()
            self._busy.wait()
            self._busy = None


def _starved_ns() -> int:
    """For how long the calling thread has been ready to run without a core, since it exists."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def _make_garbage() -> None:
    for _ in range(GARBAGE):
        cycle: list[object] = []
        cycle.append(cycle)


# -- a plain script ------------------------------------------------------------------------------------------


def plain(injector: Injector, steps: int, file: Path, *, paced: bool = False) -> None:
    """An ordinary DDP loop with a DataLoader; ``paced``: with compute as pauses."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import ddpwatch
    from tests.support.paced import pace

    width, size, cap_mib = (PACED_WIDTH, PACED_BATCH, PACED_CAP_MIB) if paced else (WIDTH, BATCH, CAP_MIB)

    class Batches(Dataset["torch.Tensor"]):
        def __len__(self) -> int:
            return steps

        def __getitem__(self, index: int) -> torch.Tensor:
            injector.at("data")
            return batch

    torch.manual_seed(0)
    batch = torch.randn(size, width)
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    if paced:
        pace(layers, PACED_MS)
    for number, layer in enumerate(layers):
        injector.layers[number] = str(number)
        layer.register_forward_pre_hook(_hook(injector, number, "forward", "gc", "stop"))
        layer.register_full_backward_pre_hook(_hook(injector, number, "backward"))
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=cap_mib)
    injector.measure(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ddpwatch.watch(model, record=file):
        batches = iter(DataLoader(Batches(), batch_size=None))
        for step in range(steps):
            injector.begin(step)
            injector.at("between")
            model(next(batches)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _hook(injector: Injector, layer: int, *places: str) -> Callable[..., None]:
    def strike(*_: Any) -> None:
        for place in places:
            injector.at(place, layer)

    return strike


# -- the trainer of this repository --------------------------------------------------------------------------


def trained(injector: Injector, steps: int, file: Path) -> None:
    """The trainer, with its own places for faults."""
    from trainer.config import TrainConfig
    from trainer.distributed import World, process_group
    from trainer.faults import Fault, Place, target_layer
    from trainer.loop import Trainer
    from trainer.stopping import stop_on_signal
    from trainer.strategies.ddp import DDP
    from trainer.task import build_task
    from trainer.watching import watched

    @dataclass(frozen=True, kw_only=True)
    class Planned(Fault):
        stretch: Stretch

        def due(self, step: int) -> bool:
            return self.stretch.due(step - 1)

    places: dict[str, Place] = {"data": "input", "forward": "forward", "gc": "forward", "stop": "forward"}
    config = TrainConfig(model=MODEL, batch_sizes=(4,), steps=steps, log_every=1 << 30)
    world = World.from_environment(config.device)
    task = build_task(config, world)
    faults = []
    for at, one in injector.mine.items():
        strike = _striking(injector, at, one)
        if one.place not in ("busy", "between"):
            faults.append(Planned(name=one.kind, place=places.get(one.place, "backward"), strike=strike, stretch=one))
            layer = target_layer(faults[-1], task.model)
            injector.layers[one.layer] = next(name for name, module in task.model.named_modules() if module is layer)

    def before(step: int) -> bool:
        injector.begin(step - 1)
        return agreement.before(step)

    with process_group(world) as store, stop_on_signal(store) as agreement:
        trainer = Trainer(config, world, replace(task, faults=tuple(faults)), before)
        assert isinstance(trainer.strategy, DDP)
        injector.measure(trainer.strategy.ddp)
        with watched(trainer.strategy, file):
            trainer.fit()


def _striking(injector: Injector, at: int, one: Stretch) -> Callable[[], None]:
    return lambda: injector.strike(at, one)


def main() -> None:
    plan, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    if plan["pinned"]:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    injector = Injector([Stretch(**one) for one in plan["stretches"]], rank)
    try:
        if plan["script"] == "trainer":
            trained(injector, plan["steps"], folder / "run.mcap")
        else:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            plain(injector, plan["steps"], folder / "run.mcap", paced=plan["script"] == "paced")
            dist.destroy_process_group()
    finally:
        injector.end()
    about = {"strikes": injector.strikes, "layers": injector.layers, "steps": injector.steps}
    (folder / f"strikes-{rank}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
