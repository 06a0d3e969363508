"""Whether a viewer slows the job down: one run, windows of steps with each kind of viewer in turn.

    python benchmarks/viewers.py [--rounds 5]

Takes about four minutes. Budget: 0 ms to training from a suspended or killed viewer.

The windows alternate, so that a noisy machine disturbs all kinds equally. On a machine with fewer cores than ranks + 2
a *running* dashboard competes for the processor like any other program; suspended or killed it must not matter.

The columns:
    step ms (p50)     the median over the rounds, of each window's median step
    ratio             to "none" of the same round (`paired.hodges_lehmann`); "none again" is the noise floor
    95 % interval     of that ratio
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

from ddpwatch.common.text import table
from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire.messages import Step
from tests.support.paired import ratio_cells
from tests.support.rounds import Rounds, rounds_done

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
VIEWERS = ("none", "none again", "suspended", "killed", "running")
ATTACH_S = 2.0
WARM_UP_STEPS, WINDOW_STEPS = 20, 15


@contextlib.contextmanager
def viewer(kind: str) -> Iterator[None]:
    """A dashboard that has attached, in the state of that kind; killed afterwards."""
    if kind.startswith("none"):
        yield
        return
    with dashboard() as process:
        time.sleep(ATTACH_S)
        if kind == "suspended":
            process.send_signal(signal.SIGSTOP)  # as Ctrl-Z would: it reads no more frames
        elif kind == "killed":
            process.kill()
            process.wait()
        yield


@contextlib.contextmanager
def dashboard() -> Iterator[subprocess.Popen[bytes]]:
    """``ddpwatch`` in a pseudo-terminal, whose output is read and thrown away."""
    master, slave = pty.openpty()
    command: list[str | Path] = [BIN / "ddpwatch"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
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


def window(source: LiveSource, count: int) -> float:
    """The median step in ms, of the next ``count`` steps of rank 0 that start from now on."""
    start_ns, durations = time.monotonic_ns(), list[float]()
    while len(durations) < count:
        for message, _ in source.read(0.2):
            if isinstance(message, Step) and message.rank == 0 and message.start_ns >= start_ns:
                durations.append(message.duration_ns / 1e6)
    return statistics.median(durations[:count])


@contextlib.contextmanager
def job() -> Iterator[LiveSource]:
    """The demo's training without end; gives its frames."""
    command: list[str | Path] = [BIN / "torchrun", "--standalone", "--nproc-per-node=2", ROOT / "demo" / "train.py"]
    with tempfile.TemporaryFile() as log:
        options = ["--watch", "--steps", "1000000"]
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, start_new_session=True)
        try:
            while not rundir.live_runs():
                time.sleep(0.1)
            with contextlib.closing(LiveSource(rundir.live_runs()[0].publish)) as source:
                yield source
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    medians: dict[str, list[float]] = {kind: [] for kind in VIEWERS}
    with tempfile.TemporaryDirectory(prefix="dw-", ignore_cleanup_errors=True) as folder, Rounds() as rounds:
        os.environ.update(DDPWATCH_DIR=folder, TERM="xterm-256color", OMP_NUM_THREADS="1")
        with job() as source:
            window(source, WARM_UP_STEPS)
            for _, kind in rounds.over(list(product(range(args.rounds), VIEWERS)), "windows"):
                with viewer(kind):
                    medians[kind].append(window(source, WINDOW_STEPS))
    show(medians, args.rounds)


def show(medians: dict[str, list[float]], planned: int) -> None:
    """Prints the complete rounds."""
    done = min(map(len, medians.values()))
    if done:
        steps_ms = {kind: values[:done] for kind, values in medians.items()}
        rows = [
            [kind, f"{statistics.median(values):.1f}", *ratio_cells(values, steps_ms["none"])]
            for kind, values in steps_ms.items()
        ]
        print("\n".join(table(["viewer", "step ms (p50)", "ratio", "95 % interval"], rows)))
    print(f"{rounds_done(done, planned)}, windows of {WINDOW_STEPS} steps, {os.cpu_count()} cores, 2 ranks")


if __name__ == "__main__":
    main()
