"""The main job: two Gloo ranks train, and the dashboard shows them in this terminal.

Without a terminal it runs headlessly: it records to a file and prints the file's report. Leaving the dashboard ends
the training.
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
    """Runs the job, shown or recorded; the exit code is the job's where it ran to its end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return show()
    return record()


def show() -> int:
    """Trains in the background, watched here until `q`."""
    log = tempfile.NamedTemporaryFile("w", prefix="ddpwatch-demo-", suffix=".log", delete=False)  # noqa: SIM115
    with log, training(f"--watch --steps {STEPS_SHOWN}".split(), log.fileno()):
        code = subprocess.call([BIN / "ddpwatch"])
    print(f"The training's own output is in {log.name}", file=sys.stderr)
    return code


def record() -> int:
    """Trains in the foreground with a recording, then reports on it."""
    with training(f"--steps {STEPS_RECORDED} --record {RECORDING}".split(), None) as job:
        code = job.wait()
    if code:
        return code
    print(f"\nrecorded to {RECORDING}; its report:\n", file=sys.stderr)
    return subprocess.call([BIN / "ddpwatch", "report", RECORDING])


@contextlib.contextmanager
def training(options: list[str], output: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """The torchrun job; ended with everything it started when the block is left."""
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node=2", ROOT / "demo" / "train.py", *options]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    job = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=output is not None)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks
            job.wait()


if __name__ == "__main__":
    sys.exit(main())
