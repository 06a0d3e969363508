"""Runs the main demo: two Gloo ranks train, and the dashboard shows them in this terminal; ``q`` ends both.

Without a terminal it records the training to a file and prints the report.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RECORDING = "demo.mcap"
STEPS_SHOWN = 2000
STEPS_RECORDED = 60


def main() -> int:
    """Shows or records the job; the exit code is that of the dashboard, or of the training and its report."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return show()
    return record()


def show() -> int:
    """Trains in the background, with the dashboard in front."""
    log = tempfile.NamedTemporaryFile("w", prefix="ddpwatch-demo-", suffix=".log", delete=False)  # noqa: SIM115
    with log, training(f"--watch --steps {STEPS_SHOWN}".split(), log.fileno()):
        code = subprocess.call([BIN / "ddpwatch"])
    print(f"the training's output is in {log.name}", file=sys.stderr)
    return code


def record() -> int:
    """Trains in the foreground with a recording, then prints its report. A demo's old recording makes room."""
    Path(RECORDING).unlink(missing_ok=True)
    with training(f"--steps {STEPS_RECORDED} --record {RECORDING}".split(), None) as job:
        code = job.wait()
    if code:
        return code
    print(f"\nreport of {RECORDING}:\n", file=sys.stderr)
    return subprocess.call([BIN / "ddpwatch", "report", RECORDING])


@contextlib.contextmanager
def training(options: list[str], output: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the torchrun job, and ends it with the block; ``output`` is a file descriptor, None for this terminal."""
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", str(ROOT / "demo" / "train.py"), *options]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    job = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=output is not None)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks
            job.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # also while the training ends
        sys.exit(130)
