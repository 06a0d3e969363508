"""Measures what the dashboard costs: frame time, key to paint, CPU time, bytes to the terminal, first paint, memory.

    python benchmarks/dashboard.py [--worlds 8 64 1024] [--seconds 10] [--view overview]

Takes about two minutes. A child process shows a synthetic job in a pseudo-terminal of 200x50 and paints ten times a
second; this process reads its output and presses keys. A frame covers the analysis, the painting and the conversion of
rows into bytes.

The columns:
    frame ms          a frame by the clock: p50 and p95
    CPU ms            the screen thread's CPU time for it, which other programs on the same cores do not change
    key ms p95        from a key to the first byte of its frame, in a paused view
    apply ms p95      taking in a batch of frames from the collector
    CPU %, KB/s       the process's share of a core, its output
    first paint s     since the start of the process
    MiB               resident memory
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from fcntl import ioctl
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from ddpwatch.common.garbage import few_collections
from ddpwatch.common.text import UNKNOWN, table
from tests.support.rounds import Rounds, rounds_done

WIDTH, HEIGHT = 200, 50
POOL = 24  # steps made beforehand, so that making them is not measured
KEYS = (b"[", b"[", b"]", b"2", b"4", b"1")  # steps back and forward, and other views
KEY_PRESSES = 30
WARM_UP_FRAMES = 5
FIRST_PAINT_PATIENCE_S, SETTLE_S = 60.0, 5.0  # to settle: until the window of 50 steps begins to fill
Cost = tuple[float, float]  # seconds by the clock, and of the thread's CPU time


# -- the child -----------------------------------------------------------------------------------------------


class SyntheticSource:
    """The frames of a synthetic job in real time: at most eight steps, or 1,024 rank-steps, per second."""

    def __init__(self, world: int) -> None:
        from tests.support.synthetic import Fleet

        self.over = False
        self.unreadable = self.missed = 0
        self.trouble = ""
        self.notes: list[str] = []
        self._fleet = Fleet(world, late={1: 12.0}, gpus=world > 2)
        self._waiting = [*self._fleet.introduction(), *self._fleet.devices(0)]
        self._pool = [[self._fleet.step(rank, number) for rank in range(world)] for number in range(1, POOL + 1)]
        self._every_s = max(0.125, world / 1024)
        self._number, self._due, self._seq = 0, time.monotonic(), 0

    def read(self, timeout_s: float, limit: int = 5000) -> list[Any]:
        """The next frames."""
        from ddpwatch.wire.messages import encode
        from ddpwatch.wire.transport import Envelope

        deadline = time.monotonic() + timeout_s
        while not self._waiting and time.monotonic() < min(self._due, deadline):
            time.sleep(0.01)
        if not self._waiting and time.monotonic() >= self._due:
            self._waiting, self._due = self._next_step(), self._due + self._every_s
        batch, self._waiting = self._waiting[:limit], self._waiting[limit:]
        self._seq += len(batch)
        now = time.time_ns()
        return [(message, Envelope(self._seq, now, encode(message))) for message in batch]

    def order_stacks(self, order: object) -> None:
        """Does nothing: nothing is sampled."""

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _next_step(self) -> list[Any]:
        import msgspec

        self._number += 1
        found = self._pool[self._number % POOL]
        later = (self._number - found[0].step) * 132_000_000
        steps = [msgspec.structs.replace(s, step=self._number, start_ns=s.start_ns + later) for s in found]
        return [*steps, *(self._fleet.devices(self._number // 8) if self._number % 8 == 0 else ())]


def child(world: int, view: str, result: Path) -> None:
    """Shows the job until a key ends it, then writes the costs to a file."""
    from textual.screen import Screen

    from ddpwatch.run.rundir import RunInfo
    from ddpwatch.tui.app import DashboardApp
    from ddpwatch.tui.feed import AttachSpec
    from ddpwatch.tui.settings import Settings

    run = RunInfo(run_id="synthetic", ingest="", publish="", pid=1, world_size=world, started=0.0)
    feed = AttachSpec(run=run, open_source=lambda _: SyntheticSource(world), list_runs=lambda: [run])
    app = DashboardApp(feed, settings=Settings(theme="dark", view=view))  # type: ignore[arg-type]
    frames: list[list[Cost]] = []
    app.tick = timed(app.tick, lambda cost: frames.append([cost]))  # type: ignore[method-assign]

    def drawn(cost: Cost) -> None:
        if frames:
            frames[-1].append(cost)

    Screen._compositor_refresh = timed(Screen._compositor_refresh, drawn)  # type: ignore[method-assign]
    apply: list[Cost] = []
    app.session.apply_frames = timed(app.session.apply_frames, apply.append)  # type: ignore[method-assign]
    with few_collections():
        app.run()
    painted = [[sum(part) for part in zip(*frame, strict=True)] for frame in frames if len(frame) > 1]
    result.write_text(json.dumps({"frames": painted, "apply": apply}))


def timed(call: Callable[..., Any], note: Callable[[Cost], object]) -> Callable[..., Any]:
    """The same call, which also reports its cost."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            note((time.perf_counter() - wall, time.thread_time() - cpu))

    return wrapped


# -- the parent ----------------------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal with the child in it."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.started = time.monotonic()
        command = [sys.executable, __file__, *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)

    def read(self, seconds: float) -> bytes:
        """The output of that time."""
        deadline, data = time.monotonic() + seconds, b""
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._master], [], [], left)[0]:
                data += os.read(self._master, 1 << 16)
        return data

    def wait_for(self, text: bytes, patience_s: float) -> float | None:
        """Seconds from the start until that text is in the output; None if it never is."""
        deadline, data = time.monotonic() + patience_s, b""
        while text not in data:
            if time.monotonic() > deadline:
                return None
            data = data[-4096:] + self.read(0.002)
        return time.monotonic() - self.started

    def write(self, keys: bytes) -> None:
        """Presses keys."""
        os.write(self._master, keys)

    def press(self, key: bytes) -> float:
        """Presses a key; seconds until there is output. The screen must be still before."""
        before = time.monotonic()
        self.write(key)
        select.select([self._master], [], [], 2.0)
        seconds = time.monotonic() - before
        self.read(0.15)
        return seconds

    def quit(self) -> None:
        """Ends the child."""
        self.write(b"q")
        with contextlib.suppress(OSError):  # its end closes the terminal
            while self.process.poll() is None:
                self.read(0.05)
        self.process.wait()
        os.close(self._master)


class Measurement(NamedTuple):
    """One run of the child, ``seconds`` long; costs and times in seconds.

    Attributes:
        frames: What painting took, each time.
        apply: What taking in frames took, each time.
    """

    seconds: float
    frames: Sequence[Cost]
    apply: Sequence[Cost]
    keys_s: Sequence[float]
    cpu_share: float
    bytes_per_s: float
    first_paint_s: float | None
    resident_bytes: int


def measure(world: int, seconds: float, view: str) -> Measurement:
    """Runs the child for one row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        terminal = Terminal("--child", str(world), "--view", view, "--result", str(result))
        first_paint_s = terminal.wait_for(b"Overview", FIRST_PAINT_PATIENCE_S)
        terminal.read(SETTLE_S)
        process = psutil.Process(terminal.process.pid)
        resident = process.memory_info().rss
        cpu, start = sum(process.cpu_times()[:2]), time.monotonic()
        written = len(terminal.read(seconds))
        wall = time.monotonic() - start
        cpu = sum(process.cpu_times()[:2]) - cpu
        keys_s = key_to_paint(terminal)
        lasted = time.monotonic() - terminal.started
        terminal.quit()
        costs = json.loads(result.read_text())
    painting = lasted, costs["frames"], costs["apply"]
    return Measurement(*painting, keys_s, cpu / wall, written / wall, first_paint_s, resident)


def key_to_paint(terminal: Terminal) -> list[float]:
    """Seconds from a key to its frame, while the view is paused."""
    terminal.write(b" ")
    terminal.read(1.0)
    return [terminal.press(key) for key in islice(cycle(KEYS), KEY_PRESSES)]


# -- the report ----------------------------------------------------------------------------------------------

COLUMNS = (
    "frame ms p50", "p95", "CPU ms p50", "p95", "key ms p95", "apply ms p95", "CPU %", "KB/s", "first paint s", "MiB",
)  # fmt: skip


def row(measured: Measurement) -> list[str]:
    """The cells of `COLUMNS`; what was not measured is a dash."""
    frames = measured.frames[WARM_UP_FRAMES:]
    wall, cpu = ([cost[place] for cost in frames] for place in (0, 1))
    apply = [cost[0] for cost in measured.apply]
    quantiles = [p50(wall), p95(wall), p50(cpu), p95(cpu), p95(measured.keys_s), p95(apply)]
    first_paint = UNKNOWN if measured.first_paint_s is None else f"{measured.first_paint_s:.2f}"
    return [
        *(UNKNOWN if value is None else f"{1e3 * value:.1f}" for value in quantiles),
        f"{100 * measured.cpu_share:.1f}", f"{measured.bytes_per_s / 1e3:.1f}", first_paint,
        f"{measured.resident_bytes / 2**20:.1f}",
    ]  # fmt: skip


def missing_frames(measured: Measurement) -> str:
    """Why a row has no frame time; empty where it has one."""
    painted = len(measured.frames)
    if painted > WARM_UP_FRAMES:
        return ""
    return f"{f'only {painted} frames' if painted else 'no frame'} in {measured.seconds:.0f} s"


def p50(values: Sequence[float]) -> float | None:
    """The median, None of nothing."""
    return median(values) if values else None


def p95(values: Sequence[float]) -> float | None:
    """The 95th percentile, None of nothing."""
    return sorted(values)[int(0.95 * len(values))] if values else None


def report(measured: dict[int, Measurement], planned: int) -> list[str]:
    """The table, a line for each row without frames, and how many rows were measured.

    Args:
        measured: By the number of ranks.
        planned: How many rows there were to be.
    """
    rows = [[str(world), *row(found)] for world, found in measured.items()]
    missing = [f"{world} ranks: {text}" for world, found in measured.items() if (text := missing_frames(found))]
    return [*table(["ranks", *COLUMNS], rows), *missing, rounds_done(len(rows), planned, "row")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=[8, 64, 1024], help="ranks (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row (default: %(default)s)")
    parser.add_argument("--view", default="overview", help="default: %(default)s")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.view, args.result)
        return
    with Rounds() as rounds:
        measured = {world: measure(world, args.seconds, args.view) for world in rounds.over(args.worlds, "rows")}
    print("\n".join(report(measured, len(args.worlds))))


if __name__ == "__main__":
    main()
