"""Does a viewer slow the job down? One run, windows of steps with each kind of viewer in turn, ratios side by side.

The windows alternate so that a noisy machine is equally noisy to all. `none` against `none` is the noise floor. On a
machine with fewer cores than ranks + 2 a *running* dashboard competes for the processor like any other program;
suspended or killed it must not matter.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ddpwatch import rundir  # noqa: E402
from ddpwatch.messages import Step  # noqa: E402
from ddpwatch.report.format import table  # noqa: E402
from ddpwatch.sources import LiveSource  # noqa: E402

BIN = Path(sys.executable).parent
ROUNDS = int(os.environ.get("ROUNDS", "5"))
WINDOW_STEPS = 15


class Dashboard:
    """`ddpwatch` in a terminal of its own, whose output is read and thrown away until `deaf`."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen([BIN / "ddpwatch"], stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._master, 1 << 16):
                pass

    def suspend(self) -> None:
        """Stops it as Ctrl-Z would: it takes no frame any more."""
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Ends it without a word."""
        self.process.kill()
        self.process.wait()


def viewers() -> dict[str, Callable[[], Dashboard | None]]:
    """What to set up before a window; whatever it returns is killed after it."""

    def suspended() -> Dashboard:
        dashboard = Dashboard()
        time.sleep(2)  # let it attach first
        dashboard.suspend()
        return dashboard

    def killed() -> None:
        dashboard = Dashboard()
        time.sleep(2)
        dashboard.kill()

    def running() -> Dashboard:
        dashboard = Dashboard()
        time.sleep(2)
        return dashboard

    return {
        "none": lambda: None,
        "none again": lambda: None,
        "suspended": suspended,
        "killed": killed,
        "running": running,
    }


class Steps:
    """The job's step durations, as its frames come in."""

    def __init__(self, source: LiveSource) -> None:
        self._source = source

    def window(self, count: int) -> list[float]:
        """The next ``count`` step durations of rank 0 in ms, beginning with steps that start from now on."""
        begin, durations = time.monotonic_ns(), []
        while len(durations) < count:
            for message, _ in self._source.read(0.2):
                if isinstance(message, Step) and message.rank == 0 and message.start_ns >= begin:
                    durations.append(message.duration_ns / 1e6)
        return durations[:count]


@contextlib.contextmanager
def job() -> Iterator[Steps]:
    """The demo's training, endless."""
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node=2", ROOT / "demo" / "train.py"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--watch", "--steps", "1000000"], stdout=log, stderr=log)
        try:
            while not rundir.live_runs():
                time.sleep(0.1)
            source = LiveSource(rundir.live_runs()[0].publish)
            yield Steps(source)
            source.close()
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    os.environ.update(DDPWATCH_DIR=tempfile.mkdtemp(prefix="dw-"), TERM="xterm-256color", OMP_NUM_THREADS="1")
    medians: dict[str, list[float]] = {name: [] for name in viewers()}
    with job() as steps:
        steps.window(20)  # warm-up
        for _ in range(ROUNDS):
            for name, set_up in viewers().items():
                dashboard = set_up()
                medians[name].append(statistics.median(steps.window(WINDOW_STEPS)))
                if dashboard is not None:
                    dashboard.kill()
    rows = []
    for name, values in medians.items():
        ratios = [value / base for value, base in zip(values, medians["none"], strict=True)]
        spread = f"{min(ratios):.3f} – {max(ratios):.3f}"
        rows.append([name, f"{statistics.median(values):.1f}", f"{statistics.median(ratios):.3f}", spread])
    print("\n".join(table(["viewer", "step ms (p50)", "ratio to none (p50)", "range"], rows)))
    print(f"{ROUNDS} rounds of {WINDOW_STEPS} steps each, {os.cpu_count()} cores, 2 ranks")


if __name__ == "__main__":
    main()
