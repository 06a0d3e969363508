"""Checks whether a suspended or killed viewer or collector slows the job down, and whether memory grows meanwhile.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/stopped.py [--rounds 4]

Takes about four minutes. Budget: 0 ms to training, memory bounded, drops counted, recovery without a restart.

The model is tiny: a step, and with it a frame, takes a few milliseconds, so that there are more frames than the queues
hold. Every round has a window of ``--seconds`` for each case, 2.5 times as long for the last one. Windows alternate,
so that a noisy machine disturbs all cases equally; the difference between the first two is noise. A *running* dashboard
competes for the cores like any other program; suspended or killed it must not matter.

The columns:
    step ms           the median step
    ratio             to "nothing" of the same round (`paired.hodges_lehmann`), with its 95 % interval
    rank 0 MiB        resident memory after each round
    dropped so far    frames that rank 0's sender has dropped, after each round
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from ddpwatch.analysis.figures import Report
from ddpwatch.common.text import table
from ddpwatch.probe import session
from ddpwatch.report.build import report_of
from ddpwatch.run import rundir
from tests.support.paired import ratio_cells
from tests.support.rounds import Rounds, rounds_done

BLOCK_STEPS = 50
SUSPENDED_TIMES = 2.5  # as long is the collector suspended, so that its queues are full
ATTACH_S = 2.0
COLLECTOR_S = 60.0
CASES = (
    "nothing", "nothing again", "viewer running", "viewer suspended", "viewer killed", "collector suspended",
)  # fmt: skip


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
        dist.barrier()
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
    parser.add_argument("--rounds", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a window (default: %(default)s)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with Rounds.of_job() as rounds, tempfile.TemporaryDirectory(prefix="dw-") as folder:
        measure(rounds, args.rounds, args.seconds, Path(folder) / "run.mcap")
    dist.destroy_process_group()


def measure(rounds: Rounds, count: int, seconds: float, file: Path) -> None:
    """Trains all rounds, then prints the table on rank 0."""
    training, first = Training(file, rounds), dist.get_rank() == 0
    training.window(seconds)  # warm-up
    run_id = training.watch.run_id
    collector = collector_of(str(run_id)) if first else 0
    windows: dict[str, list[Window]] = {case: [] for case in CASES}
    for _, case in rounds.over(list(product(range(count), CASES)), "windows"):
        with case_of(case, str(run_id), collector) if first else contextlib.nullcontext():
            longer = SUSPENDED_TIMES if case == CASES[-1] else 1.0
            window = measured(training.window(longer * seconds))
        if not rounds.stop_requested:  # else it is shorter than the others
            windows[case].append(window)
    training.window(seconds)  # so that the recording has frames from after the last suspension
    training.watch.close()
    dist.barrier()
    if first:
        psutil.Process(collector).wait(COLLECTOR_S)  # it closes its recording
        show(windows, count, report_of(file))


def collector_of(run_id: str) -> int:
    """The collector's pid, once it runs; the other ranks wait."""
    deadline = time.monotonic() + COLLECTOR_S
    while time.monotonic() < deadline:
        for info in rundir.live_runs():
            if info.run_id == run_id:
                return info.pid
        time.sleep(0.1)
    raise SystemExit("the job has no collector")


@contextlib.contextmanager
def case_of(case: str, run_id: str, collector: int) -> Iterator[None]:
    """Brings a case about, while the other ranks wait."""
    if case == "collector suspended":
        os.kill(collector, signal.SIGSTOP)  # as Ctrl-Z would
        try:
            yield
        finally:
            os.kill(collector, signal.SIGCONT)
    elif case.startswith("viewer"):
        with dashboard(run_id) as process:
            time.sleep(ATTACH_S)
            if case == "viewer suspended":
                process.send_signal(signal.SIGSTOP)  # it reads no more frames
            elif case == "viewer killed":
                process.kill()
                process.wait()
            yield
    else:
        yield


@contextlib.contextmanager
def dashboard(run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """``ddpwatch`` in a pseudo-terminal, whose output is read and thrown away."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "ddpwatch", "attach", run_id]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    threading.Thread(target=drain, args=(master,), daemon=True).start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def drain(terminal: int) -> None:
    """Reads a pseudo-terminal until the other side closes it."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
    os.close(terminal)


def show(windows: dict[str, list[Window]], planned: int, report: Report) -> None:
    """Prints the complete rounds, and the drops that the recording's report counts."""
    done = min(map(len, windows.values()))
    rows = []
    for case, measured in windows.items() if done else ():
        step_ms, memory_mib, dropped = zip(*measured[:done], strict=True)
        ratio = ratio_cells(step_ms, [window.step_ms for window in windows[CASES[0]][:done]])
        memory = ", ".join(f"{value:.1f}" for value in memory_mib)
        rows.append([case, f"{statistics.median(step_ms):.2f}", *ratio, memory, ", ".join(map(str, dropped))])
    heading = ["", "step ms (p50)", "ratio", "95 % interval", "rank 0 MiB", "dropped so far"]
    print("\n".join(table(heading, rows)))
    for row in report.ranks:
        print(f"rank {row.rank} in the report: {row.steps} steps, {row.dropped} frames dropped")
    print(f"{rounds_done(done, planned)}, {os.cpu_count()} cores, {dist.get_world_size()} ranks")


if __name__ == "__main__":
    main()
