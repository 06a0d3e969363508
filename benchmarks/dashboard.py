"""What the dashboard costs: frame time, key to paint, processor, bytes to the terminal, first paint.

python benchmarks/dashboard.py [--worlds 8 64 1024] [--seconds 10] [--view overview]
python benchmarks/dashboard.py --hours 8 [--worlds 64]

A child process shows a synthetic job in a pseudo-terminal of 200x50, drawing ten times a second; this process reads
what it writes and presses keys. A frame is all of the screen's thread that it takes: figures, painting, and turning
rows into bytes; its time is given by the clock and, since others may use the same cores, as that thread's processor
time. Below each row is the naive way: a Rich table of the ranks in a `Static`, updated as often.
``--hours`` feeds that many hours' worth of frames (four steps a second) as fast as they are taken, goes through the
views meanwhile, and prints the resident size.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Sequence
from fcntl import ioctl
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

WIDTH, HEIGHT = 200, 50
POOL = 24  # steps made beforehand, so that making them is not measured
KEYS = 30
STEPS_PER_HOUR = 4 * 3600
DRAWN_EVERY = 5  # steps
Cost = tuple[float, float]  # seconds by the clock, and of the thread's processor time


# -- the child -----------------------------------------------------------------------------------------------


class SyntheticSource:
    """Frames of a synthetic job, in real time: at most eight steps, or 1,024 rank-steps, a second."""

    def __init__(self, world: int) -> None:
        from benchmarks.synthetic import Fleet

        self.over = False
        self.unreadable = 0
        self._fleet = Fleet(world, late={1: 12.0}, gpus=world > 2)
        self._waiting = [*self._fleet.introduction(), *self._fleet.devices(0)]
        self._pool = [[self._fleet.step(rank, number) for rank in range(world)] for number in range(1, POOL + 1)]
        self._every_s = max(0.125, world / 1024)
        self._number, self._due, self._seq = 0, time.monotonic(), 0

    def read(self, timeout_s: float, limit: int = 5000) -> list[Any]:
        """The next frames."""
        from ddpwatch.messages import encode
        from ddpwatch.transport import Envelope

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
        """Nothing to let go of."""

    def step_of(self, number: int) -> list[Any]:
        """The frames of a step, whenever it is due."""
        self._number = number
        return [(message, None) for message in self._next_step()]

    def _next_step(self) -> list[Any]:
        import msgspec

        self._number += 1
        found = self._pool[self._number % POOL]
        later = (self._number - found[0].step) * 132_000_000
        steps = [msgspec.structs.replace(s, step=self._number, start_ns=s.start_ns + later) for s in found]
        return [*steps, *(self._fleet.devices(self._number // 8) if self._number % 8 == 0 else ())]


def child(world: int, view: str, naive: bool, result: Path) -> None:
    """Shows the job until it is told to quit, then writes down what it took."""
    from textual.screen import Screen

    from ddpwatch.rundir import RunInfo
    from ddpwatch.tui.app import GC_THRESHOLDS, DashboardApp
    from ddpwatch.tui.feed import AttachSpec
    from ddpwatch.tui.settings import Settings

    run = RunInfo(run_id="synthetic", ingest="", publish="", pid=1, world_size=world, started=0.0)
    feed = AttachSpec(run=run, open_source=lambda _: SyntheticSource(world), list_runs=lambda: [run])
    app = DashboardApp(feed, settings=Settings(theme="dark", view=view))  # type: ignore[arg-type]
    if naive:
        make_naive(app)
    frames: list[list[Cost]] = []
    app.tick = timed(app.tick, lambda cost: frames.append([cost]))  # type: ignore[method-assign]

    def drawn(cost: Cost) -> None:
        if frames:
            frames[-1].append(cost)

    Screen._compositor_refresh = timed(Screen._compositor_refresh, drawn)  # type: ignore[method-assign]
    gc.set_threshold(*GC_THRESHOLDS)
    apply: list[Cost] = []
    app.session.apply = timed(app.session.apply, apply.append)  # type: ignore[method-assign]
    app.run()
    whole = [[sum(part) for part in zip(*frame, strict=True)] for frame in frames if len(frame) > 1][5:]
    result.write_text(json.dumps({"frames": whole, "apply": apply}))


def timed(call: Callable[..., Any], note: Callable[[Cost], object]) -> Callable[..., Any]:
    """The same call, with its cost noted."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        wall, own = time.perf_counter(), time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            note((time.perf_counter() - wall, time.thread_time() - own))

    return wrapped


def make_naive(app: Any) -> None:
    """The same data as a Rich table in a `Static`."""
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
        self._ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.began = time.monotonic()
        command = [sys.executable, __file__, *arguments]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)

    def read(self, seconds: float) -> bytes:
        """What is written within that time."""
        deadline, data = time.monotonic() + seconds, b""
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._ours], [], [], left)[0]:
                data += os.read(self._ours, 1 << 16)
        return data

    def wait_for(self, text: bytes, patience_s: float = 60.0) -> float:
        """Seconds since the start until that is written."""
        deadline, data = time.monotonic() + patience_s, b""
        while text not in data:
            assert time.monotonic() < deadline, data[-2000:]
            data = data[-4096:] + self.read(0.002)
        return time.monotonic() - self.began

    def press(self, key: bytes) -> float:
        """Presses a key; seconds until something is written. Only of use while nothing else is."""
        before = time.monotonic()
        os.write(self._ours, key)
        select.select([self._ours], [], [], 2.0)
        took = time.monotonic() - before
        self.read(0.15)
        return took

    def quit(self) -> None:
        """Leaves the dashboard."""
        os.write(self._ours, b"q")
        with contextlib.suppress(OSError):  # its end closes the terminal
            while self.process.poll() is None:
                self.read(0.05)
        self.process.wait()
        os.close(self._ours)


def measure(world: int, seconds: float, view: str, naive: bool) -> dict[str, float | None]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = ["--child", str(world), "--view", view, "--result", str(result), *(["--naive"] if naive else [])]
        terminal = Terminal(*options)
        first = terminal.wait_for(b"rank" if naive else b"Overview")
        terminal.read(5.0)  # until the window of 50 steps begins to fill
        process = psutil.Process(terminal.process.pid)
        resident = process.memory_info().rss
        before, began = sum(process.cpu_times()[:2]), time.monotonic()
        written = len(terminal.read(seconds))
        wall = time.monotonic() - began
        share = (sum(process.cpu_times()[:2]) - before) / wall
        keys = [] if naive else pressed(terminal)
        terminal.quit()
        taken = json.loads(result.read_text())
    clock, own = zip(*taken["frames"], strict=True)
    return {
        "frame p50 ms": 1e3 * median(clock), "p95": 1e3 * p95(clock), "own p50 ms": 1e3 * median(own),
        "p95 ": 1e3 * p95(own), "key p95 ms": 1e3 * p95(keys) if keys else None,
        "apply p95 ms": 1e3 * p95([wall for wall, _ in taken["apply"]]), "CPU %": 100 * share,
        "KB/s": written / wall / 1e3, "first paint s": first, "MiB": resident / 2**20,
    }  # fmt: skip


def p95(values: Sequence[float]) -> float:
    """The quantile."""
    return sorted(values)[int(0.95 * len(values))]


def pressed(terminal: Terminal) -> list[float]:
    """Key to paint: steps back and forward, and the other views, while the view is paused."""
    os.write(terminal._ours, b" ")
    terminal.read(1.0)
    return [terminal.press(key) for _, key in zip(range(KEYS), cycle(b"[", b"[", b"]", b"2", b"4", b"1"), strict=False)]


def cycle(*keys: bytes) -> Iterator[bytes]:
    while True:
        yield from keys


def memory(world: int, hours: float) -> None:
    """Feeds hours' worth of frames and prints the resident size."""
    import asyncio

    asyncio.run(_memory(world, hours))


async def _memory(world: int, hours: float) -> None:
    from ddpwatch.transport import Envelope
    from ddpwatch.tui.app import GC_THRESHOLDS, DashboardApp
    from ddpwatch.tui.feed import FrameList, ReplaySpec

    gc.set_threshold(*GC_THRESHOLDS)
    app = DashboardApp(ReplaySpec("x", FrameList(())), ticking=False)
    source = SyntheticSource(world)
    total, views = int(hours * STEPS_PER_HOUR), list(app.views)
    process = psutil.Process()
    print(f"{'hours':>6} {'frames':>10} {'drawn':>7} {'view':>10} {'MiB':>6}")
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        for number in range(total):
            frames = source.read(0.0, limit=1 << 20) if number == 0 else source.step_of(number)
            at = 10**18 + number * 10**9 * 3600 // STEPS_PER_HOUR
            app.session.apply([(message, Envelope(number, at, b"")) for message, _ in frames])
            if number % DRAWN_EVERY == 0:
                app.session.over = False
                app.tick()
                await pilot.pause()
            if number % max(total // 40, 1) == 0:
                view = views[number * 40 // total % len(views)]
                app.show_view(view)
                print(
                    f"{number / STEPS_PER_HOUR:6.2f} {number * world:>10} {number // DRAWN_EVERY:>7} "
                    f"{app.view.NAME:>10} {process.memory_info().rss / 2**20:6.0f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--worlds", type=int, nargs="*", help="ranks (default: 8 64 1024; with --hours: 64)")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--view", default="overview")
    parser.add_argument("--hours", type=float, help="feed that much and watch the memory instead")
    parser.add_argument("--naive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child, args.view, args.naive, args.result)
        return
    if args.hours is not None:
        memory((args.worlds or [64])[0], args.hours)
        return
    table(args.worlds or [8, 64, 1024], args.seconds, args.view)


def table(worlds: Sequence[int], seconds: float, view: str) -> None:
    """Prints a row per number of ranks, and below it the naive way's."""
    headed = False
    for world, naive in product(worlds, (False, True)):
        row = measure(world, seconds, view, naive)
        if not headed:
            print(f"{'ranks':>6} {'':10} " + " ".join(f"{name:>13}" for name in row))
            headed = True
        cells = (
            "–" if value is None else f"{value:.1f}" if name != "first paint s" else f"{value:.2f}"
            for name, value in row.items()
        )
        print(
            f"{world:>6} {'Rich table' if naive else 'ddpwatch':10} " + " ".join(f"{c:>13}" for c in cells), flush=True
        )


if __name__ == "__main__":
    main()
