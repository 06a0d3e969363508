"""Measures how many frames the collector takes: made-up ranks send at a fixed rate, without and with a recording.

    python benchmarks/collector.py [--seconds 60]

Takes about three minutes. Budget at 10,000 frames/s: at most 60 % of a core and 300 MB, no frame lost. The ranks are
those of `tests/support/load.py`. What the senders could not send in time shows in the column "sent/s".

The columns:
    sent/s      frames that the ranks have sent
    lost        frames that the ranks could not send or the collector has not counted, of all
    unrecorded  frames that did not reach the recording
    core        the collector's CPU time, as a share of one core
    MB          its largest resident memory while the ranks send (a viewer's snapshot takes more for a moment)
    end         the collector's exit code. The one that records is ended by SIGTERM: it has a second to complete its
                recording (what it leaves for late viewers comes after that)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from ddpwatch.common.text import table
from tests.support.load import Counts, collector, last_status, memory_mb, start_senders
from tests.support.rounds import Rounds, rounds_done

ROWS = {"5,000/s": (5000, False), "10,000/s": (10_000, False), "5,000/s, recording": (5000, True)}
END_S = 60.0


def measure(name: str, seconds: float) -> list[str]:
    """One line of the table."""
    (rate, recording), counts = ROWS[name], Counts()
    with (
        tempfile.TemporaryDirectory(prefix="dw-") as folder,
        collector(str(Path(folder) / "load.mcap") if recording else "") as (ingest, publish, process),
    ):
        senders = start_senders(ingest, rate, seconds, counts)
        before = psutil.Process(process.pid).cpu_times()
        sent, refused = (sum(column) for column in zip(*(counts.get() for _ in senders), strict=True))
        peak_mb = memory_mb(process.pid, "VmHWM")
        status = last_status(publish, lambda status: status.frames >= sent)
        now = psutil.Process(process.pid).cpu_times()
        core = (now.user + now.system - before.user - before.system) / seconds
        end = f", {completed_s(process, Path(publish[6:]).with_suffix('.mcap')):.2f} s" if recording else ""
        counts.join_goodbye.set()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        for sender in senders:
            sender.join()
        end = "still runs" if process.returncode is None else f"{process.returncode}{end}"
    lost = refused + sent - (status.frames if status is not None else 0)
    unrecorded = re.search(r"(\d+) frames lost", status.recording_error if status is not None else "")
    return [
        name, f"{sent / seconds:,.0f}", f"{lost:,} of {sent + refused:,}",
        (f"{int(unrecorded[1]) if unrecorded else 0:,}") if recording else "–",
        f"{core:.0%}", f"{peak_mb:.0f}", end,
    ]  # fmt: skip


def completed_s(process: subprocess.Popen[bytes], last_view: Path) -> float:
    """How long the collector takes from SIGTERM until it has completed its recording, and starts on its last view."""
    process.terminate()
    asked = time.monotonic()
    while not last_view.exists() and process.poll() is None:
        time.sleep(0.005)
    return time.monotonic() - asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each row (default: %(default)s)")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="dw-") as folder, Rounds() as rounds:
        os.environ["DDPWATCH_DIR"] = str(Path(folder) / "run")
        done = [measure(name, seconds) for name in rounds.over(ROWS, "rows")]
    print("\n".join(table(["ranks send", "sent/s", "lost", "unrecorded", "core", "MB", "end"], done)))
    print(f"{rounds_done(len(done), len(ROWS), 'row')} of {seconds:.0f} s, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
