"""What the dashboard costs: frame time, key to paint, CPU time, bytes to the terminal, first paint, memory.

    python benchmarks/dashboard.py [--worlds 8 64 1024] [--seconds 10] [--view overview]
    python benchmarks/dashboard.py --hours 8 [--worlds 64]

Takes about three minutes. No budget; docs/guide.md has the figures.

A child process shows a synthetic job in a pseudo-terminal of 200x50 and paints ten times a second; this process reads
its output and presses keys. A frame covers the analysis, the painting and the conversion of rows into bytes. Below the
row of the dashboard is the slow baseline: a Rich table of the ranks in a `Static`, updated equally often.

The columns:
    frame ms          a frame by the clock: p50 and p95
    CPU ms            the screen thread's CPU time for it, which other programs on the same cores do not change
    key ms p95        from a key to the first byte of its frame, in a paused view
    apply ms p95      taking in a batch of frames from the collector
    CPU %, KB/s       the process's share of a core, its output
    first paint s     since the start of the process
    MiB               resident memory

``--hours`` feeds the frames of that many hours (four steps a second) as fast as the dashboard takes them, cycles
through the views, and prints the resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
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
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from ddpwatch.common.text import UNKNOWN, table
from tests.support.rounds import Rounds, rounds_done

WIDTH, HEIGHT = 200, 50
POOL = 24  # steps made beforehand, so that making them is not measured
KEYS = (b"[", b"[", b"]", b"2", b"4", b"1")  # steps back and forward, and other views
KEY_PRESSES = 30
WARM_UP_FRAMES = 5
FIRST_PAINT_PATIENCE_S, SETTLE_S = 60.0, 5.0  # to settle: until the window of 50 steps begins to fill
STEPS_PER_HOUR = 4 * 3600
DRAW_EVERY_STEPS = 5
MEMORY_ROWS = 40
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

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def step_of(self, number: int) -> list[Any]:
        """The frames of a step, without waiting for its time."""
        self._number = number
        return [(message, None) for message in self._next_step()]

    def _next_step(self) -> list[Any]:
        import msgspec

        self._number += 1
        found = self._pool[self._number % POOL]
        later = (self._number - found[0].step) * 132_000_000
        steps = [msgspec.structs.replace(s, step=self._number, start_ns=s.start_ns + later) for s in found]
        return [*steps, *(self._fleet.devices(self._number // 8) if self._number % 8 == 0 else ())]


def child(world: int, view: str, baseline: bool, result: Path) -> None:
    """Shows the job until a key ends it, then writes the costs to a file."""
    from textual.screen import Screen

    from ddpwatch.run.rundir import RunInfo
    from ddpwatch.tui.app import GC_THRESHOLDS, DashboardApp
    from ddpwatch.tui.feed import AttachSpec
    from ddpwatch.tui.settings import Settings

    run = RunInfo(run_id="synthetic", ingest="", publish="", pid=1, world_size=world, started=0.0)
    feed = AttachSpec(run=run, open_source=lambda _: SyntheticSource(world), list_runs=lambda: [run])
    app = DashboardApp(feed, settings=Settings(theme="dark", view=view))  # type: ignore[arg-type]
    if baseline:
        show_rich_table(app)
    frames: list[list[Cost]] = []
    app.tick = timed(app.tick, lambda cost: frames.append([cost]))  # type: ignore[method-assign]

    def drawn(cost: Cost) -> None:
        if frames:
            frames[-1].append(cost)

    Screen._compositor_refresh = timed(Screen._compositor_refresh, drawn)  # type: ignore[method-assign]
    gc.set_threshold(*GC_THRESHOLDS)
    apply: list[Cost] = []
    app.session.apply_frames = timed(app.session.apply_frames, apply.append)  # type: ignore[method-assign]
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


def show_rich_table(app: Any) -> None:
    """Replaces the dashboard's screen by the slow baseline: the same data as a Rich table in a `Static`."""
    from rich.table import Table
    from textual.widgets import Static

    static = Static()
    app.compose = lambda: iter([static])
    app.show_view = app.apply_theme = lambda *_: None
    app.on_mount = lambda: (app.set_interval(0.1, lambda: app.tick()), app.feed.start())

    def tick() -> None:
        if not app.session.refresh(app.session.live_link(False)):
            return
        model = app.session.overview
        table = Table("rank", "status", "step", "step ms", "late ms", "wait ms", "overlap", "exposed ms", expand=True)
        for row in model.ranks:
            figures = (row.summary.step_ns, row.summary.late_ns, row.summary.wait_ns)
            shown = [f"{(value or 0) / 1e6:.1f}" for value in figures]
            table.add_row(str(row.rank), row.status, str(row.step), *shown, str(row.summary.overlap), "0")
        static.update(table)

    app.tick = tick


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


def measure(world: int, seconds: float, view: str, baseline: bool) -> Measurement:
    """Runs the child for one row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = ["--child", str(world), "--view", view, "--result", str(result)]
        terminal = Terminal(*options, *(["--baseline"] if baseline else []))
        first_paint_s = terminal.wait_for(b"rank" if baseline else b"Overview", FIRST_PAINT_PATIENCE_S)
        terminal.read(SETTLE_S)
        process = psutil.Process(terminal.process.pid)
        resident = process.memory_info().rss
        cpu, start = sum(process.cpu_times()[:2]), time.monotonic()
        written = len(terminal.read(seconds))
        wall = time.monotonic() - start
        cpu = sum(process.cpu_times()[:2]) - cpu
        keys_s = [] if baseline else key_to_paint(terminal)
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


def report(measured: dict[tuple[int, str], Measurement], planned: int) -> list[str]:
    """The table, a line for each row without frames, and how many rows were measured.

    Args:
        measured: By the number of ranks and the name of what was shown.
        planned: How many rows there were to be.
    """
    rows = [[str(world), name, *row(found)] for (world, name), found in measured.items()]
    missing = [
        f"{world} ranks, {name}: {text}" for (world, name), found in measured.items() if (text := missing_frames(found))
    ]
    return [*table(["ranks", "", *COLUMNS], rows), *missing, rounds_done(len(rows), planned, "row")]


# -- memory over hours ---------------------------------------------------------------------------------------


async def memory(world: int, hours: float, rounds: Rounds) -> None:
    """Feeds the frames of some hours and prints the resident memory."""
    from ddpwatch.tui.app import GC_THRESHOLDS, DashboardApp
    from ddpwatch.tui.feed import FrameList, ReplaySpec
    from ddpwatch.wire.transport import Envelope

    gc.set_threshold(*GC_THRESHOLDS)
    app = DashboardApp(ReplaySpec("x", FrameList(())), ticking=False)
    source = SyntheticSource(world)
    total, views = int(hours * STEPS_PER_HOUR), list(app.views)
    print(f"{'hours':>6} {'frames':>10} {'drawn':>7} {'view':>10} {'MiB':>6}")
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        for number in range(total):
            if not rounds.go_on():
                break
            frames = source.read(0.0, limit=1 << 20) if number == 0 else source.step_of(number)
            at_ns = 10**18 + number * 10**9 * 3600 // STEPS_PER_HOUR
            app.session.apply_frames([(message, Envelope(number, at_ns, b"")) for message, _ in frames])
            if number % DRAW_EVERY_STEPS == 0:
                app.session.over = False
                app.tick()
                await pilot.pause()
            if number % max(total // MEMORY_ROWS, 1) == 0:
                app.show_view(views[number * MEMORY_ROWS // total % len(views)])
                print(memory_row(number, world, app.view.NAME), flush=True)


def memory_row(steps: int, world: int, view: str) -> str:
    """A line of the table, after that many steps."""
    mib = psutil.Process().memory_info().rss / 2**20
    return f"{steps / STEPS_PER_HOUR:6.2f} {steps * world:>10} {steps // DRAW_EVERY_STEPS:>7} {view:>10} {mib:6.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", help="ranks (default: 8 64 1024; with --hours: 64)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row (default: %(default)s)")
    parser.add_argument("--view", default="overview", help="default: %(default)s")
    parser.add_argument("--hours", type=float, help="feed the frames of that many hours and print the memory instead")
    parser.add_argument("--baseline", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.view, args.baseline, args.result)
        return
    with Rounds() as rounds:
        if args.hours is not None:
            asyncio.run(memory((args.worlds or [64])[0], args.hours, rounds))
        else:
            measure_all(args.worlds or [8, 64, 1024], args.seconds, args.view, rounds)


def measure_all(worlds: Sequence[int], seconds: float, view: str, rounds: Rounds) -> None:
    """Measures a row for each number of ranks, and one of the slow baseline below it; prints the table."""
    rows = list(product(worlds, (False, True)))
    measured = {
        (world, "Rich table" if baseline else "ddpwatch"): measure(world, seconds, view, baseline)
        for world, baseline in rounds.over(rows, "rows")
    }
    print("\n".join(report(measured, len(rows))))


if __name__ == "__main__":
    main()
