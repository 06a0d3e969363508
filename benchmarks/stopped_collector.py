"""Whether a suspended collector slows the job down, and whether memory grows meanwhile.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/stopped_collector.py [--rounds 3]

Takes about four minutes. Budget: 0 ms to training, memory bounded, drops counted, recovery without a restart.

The model is tiny: a step, and with it a frame, takes a few milliseconds, so that there are more frames than the queues
hold. Every round has three windows of ``--seconds``, with the collector running, running again, and suspended. The
difference between the first two is noise. All rounds belong to one run of the job.

The columns:
    step ms           the median step
    ratio             to "running" of the same round (`paired.hodges_lehmann`), with its 95 % interval
    rank 0 MiB        resident memory after each round
    dropped so far    frames that rank 0's sender has dropped, after each round
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from ddpwatch.common.text import table
from ddpwatch.probe import session
from ddpwatch.report.build import report_of
from ddpwatch.run import rundir
from tests.support.paired import ratio_cells
from tests.support.rounds import Rounds, rounds_done

BLOCK_STEPS = 50
COLLECTOR_EXIT_S = 60.0
COLLECTOR = ("running", "running again", "suspended")


class Training:
    """The job: trains in blocks of steps, after each of which rank 0 decides whether all ranks go on."""

    def __init__(self, record: Path, rounds: Rounds) -> None:
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self._model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.05)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._inputs = torch.randn(8, 64)
        self._rounds, self._go_on = rounds, torch.ones(1)
        self.watch = ddpwatch.watch(self._model, record=record)

    def window(self, seconds: float) -> float:
        """Trains that long, or until the rounds are to stop; the median ms per step over the blocks."""
        end, blocks = time.monotonic() + seconds, []
        while self._go_on.item():
            start = time.monotonic()
            for _ in range(BLOCK_STEPS):
                self._model(self._inputs).square().mean().backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
            blocks.append((time.monotonic() - start) / BLOCK_STEPS * 1e3)
            self._go_on.fill_(time.monotonic() < end and not self._rounds.stop_requested)
            dist.broadcast(self._go_on, 0)
        self._go_on.fill_(1)
        return statistics.median(blocks)


class Window(NamedTuple):
    """What was measured in one window, and on this rank at its end."""

    step_ms: float
    memory_mib: float
    dropped: int


def measured(step_ms: float) -> Window:
    """The window that ends now."""
    assert session._session is not None
    return Window(step_ms, psutil.Process().memory_info().rss / 2**20, session._session.sender.dropped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a window (default: %(default)s)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with Rounds.of_job() as rounds, tempfile.TemporaryDirectory(prefix="dw-") as folder:
        measure(rounds, args.rounds, args.seconds, Path(folder) / "run.mcap")
    dist.destroy_process_group()


def measure(rounds: Rounds, count: int, seconds: float, file: Path) -> None:
    """Trains all rounds, then prints the table on rank 0."""
    training, first = Training(file, rounds), dist.get_rank() == 0
    training.window(seconds / 4)  # warm-up
    collector = next(info.pid for info in rundir.live_runs() if info.run_id == training.watch.run_id) if first else 0
    windows: dict[str, list[Window]] = {name: [] for name in COLLECTOR}
    for _, name in rounds.over(list(product(range(count), COLLECTOR)), "windows"):
        with suspended(collector) if first and name == "suspended" else contextlib.nullcontext():
            window = measured(training.window(seconds))
        if not rounds.stop_requested:  # else it is shorter than the others
            windows[name].append(window)
    training.window(seconds / 4)  # so that the recording has frames from after the last suspension
    training.watch.close()
    dist.barrier()
    if first:
        psutil.Process(collector).wait(COLLECTOR_EXIT_S)  # it closes its recording
        show(windows, count, report_of(file))


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspends a process as Ctrl-Z would."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def show(windows: dict[str, list[Window]], planned: int, report: dict[str, Any]) -> None:
    """Prints the complete rounds, and the drops that the recording's report counts."""
    done = min(map(len, windows.values()))
    if done:
        print("\n".join(summary({name: measured[:done] for name, measured in windows.items()})))
    for row in report["ranks"]:
        print(f"rank {row['rank']} in the report: {row['steps']} steps, {row['dropped']} frames dropped")
    print(f"{rounds_done(done, planned)}, {os.cpu_count()} cores, {dist.get_world_size()} ranks")


def summary(windows: dict[str, list[Window]]) -> list[str]:
    """The table, of as many windows of each kind."""
    rows = []
    for name, measured in windows.items():
        step_ms, memory_mib, dropped = zip(*measured, strict=True)
        ratio = ratio_cells(step_ms, [window.step_ms for window in windows[COLLECTOR[0]]])
        memory = ", ".join(f"{value:.1f}" for value in memory_mib)
        rows.append([name, f"{statistics.median(step_ms):.2f}", *ratio, memory, ", ".join(map(str, dropped))])
    heading = ["collector", "step ms (p50)", "ratio", "95 % interval", "rank 0 MiB", "dropped so far"]
    return table(heading, rows)


if __name__ == "__main__":
    main()
