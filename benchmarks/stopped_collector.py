"""Does a suspended collector slow the job down, and does memory grow? One run, phases in turn, ratios side by side.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/stopped_collector.py

A tiny model, so that a step, and with it a frame, takes a few milliseconds: more frames than the queues hold. Every
round has three phases of PHASE_S (20) seconds: the collector running, running again, suspended. What the first two
differ by is noise. The job goes on into the next round without a restart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ddpwatch  # noqa: E402
from ddpwatch import rundir  # noqa: E402
from ddpwatch.probe import session  # noqa: E402
from ddpwatch.report.build import report_of  # noqa: E402
from ddpwatch.report.format import table  # noqa: E402

PHASE_S = float(os.environ.get("PHASE_S", "20"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
BLOCK = 50  # steps


class Training:
    """The job: trains in blocks that all ranks agree on."""

    def __init__(self, record: Path) -> None:
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self._model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.05)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._inputs = torch.randn(8, 64)
        self._go_on = torch.ones(1)
        self.watch = ddpwatch.watch(self._model, record=record)

    def phase(self, seconds: float) -> list[float]:
        """Trains that long; ms per step of every block."""
        end, blocks = time.monotonic() + seconds, []
        while True:
            begin = time.monotonic()
            for _ in range(BLOCK):
                self._model(self._inputs).square().mean().backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
            blocks.append((time.monotonic() - begin) / BLOCK * 1e3)
            self._go_on.fill_(time.monotonic() < end)
            dist.broadcast(self._go_on, 0)
            if not self._go_on.item():
                return blocks


def megabytes() -> float:
    """Memory of this rank."""
    return psutil.Process().memory_info().rss / 2**20


def dropped() -> int:
    """Frames that this rank has dropped so far."""
    return session._session.sender.dropped if session._session is not None else 0


class Phase(NamedTuple):
    """What was measured in one phase, and at its end."""

    step_ms: float
    memory: float
    dropped: int


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    file = Path(tempfile.mkdtemp(prefix="dw-")) / "run.mcap"
    training, first = Training(file), dist.get_rank() == 0
    training.phase(PHASE_S / 4)  # warm-up
    collector = next(info.pid for info in rundir.live_runs() if info.run_id == training.watch.run_id) if first else 0
    phases: dict[str, list[Phase]] = {"running": [], "running again": [], "suspended": []}
    for _ in range(ROUNDS):
        for name, measured in phases.items():
            with suspended(collector) if first and name == "suspended" else contextlib.nullcontext():
                measured.append(Phase(statistics.median(training.phase(PHASE_S)), megabytes(), dropped()))
    training.phase(PHASE_S / 4)  # frames of a collector that has come back
    training.watch.close()
    dist.barrier()
    if first:
        psutil.Process(collector).wait(60)  # it closes its recording
        show(phases, report_of(file))
    dist.destroy_process_group()


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """As Ctrl-Z would."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def show(phases: dict[str, list[Phase]], report: dict) -> None:
    lines = []
    for name, measured in phases.items():
        ratios = [phase.step_ms / base.step_ms for phase, base in zip(measured, phases["running"], strict=True)]
        middle = statistics.median(phase.step_ms for phase in measured)
        spread = f"{min(ratios):.3f} – {max(ratios):.3f}"
        memory, drops = (
            ", ".join(row) for row in zip(*[(f"{p.memory:.1f}", str(p.dropped)) for p in measured], strict=True)
        )
        lines.append([name, f"{middle:.2f}", f"{statistics.median(ratios):.3f}", spread, memory, drops])
    headings = ["collector", "step ms", "ratio (p50)", "range", "rank 0 MiB after each round", "dropped so far"]
    print("\n".join(table(headings, lines)))
    for row in report["ranks"]:
        print(f"rank {row['rank']} in the report: {row['steps']} steps, {row['dropped']} frames dropped")
    print(f"{ROUNDS} rounds, phases of {PHASE_S:.0f} s, {os.cpu_count()} cores, {dist.get_world_size()} ranks")


if __name__ == "__main__":
    main()
