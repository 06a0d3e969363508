"""Plain lines instead of a dashboard: one aligned line every few seconds, for logs, pipes and dumb terminals."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ddpwatch import rundir
from ddpwatch.analysis.step import NS_PER_MS
from ddpwatch.analysis.window import summarise
from ddpwatch.live_source import SILENCE_S, LiveSource
from ddpwatch.report.format import UNKNOWN, clean, number, percent, table
from ddpwatch.rundir import RunInfo
from ddpwatch.state import KEEP_STEPS, RunState
from ddpwatch.transport import Frame

if TYPE_CHECKING:
    from ddpwatch.recording.reader import Recording

EVERY_S = 2.0
AFTER_END_S = 0.3  # after the run's end, for the last status of its recording
HEADER = (
    f"{'step':>8}  {'it/s':>6}  {'step ms':>8}  {'overlap':>7}  {'exposed ms':>10}  {'full':>5}  {'drops':>5}  "
    "what stands out"
)


def run_table(runs: Sequence[RunInfo]) -> list[str]:
    """The runs as aligned lines."""
    rows = [
        [
            info.run_id,
            str(info.world_size),
            time.strftime("%H:%M:%S", time.localtime(info.started)),
            _place(info),
            info.recording,
        ]
        for info in runs
    ]
    return table(["run", "ranks", "started", "where", "recording"], [[clean(cell) for cell in row] for row in rows])


def _place(info: RunInfo) -> str:
    """Where a run's collector is. Nobody here knows whether it is alive on another host."""
    if not rundir.is_elsewhere(info):
        return "here"
    return f"on {info.host}" + (", an earlier boot" if info.host == socket.gethostname() else "")


def line(state: RunState) -> str:
    """The state of a run in one line."""
    summary = summarise(state.recent())
    newest = state.newest_step()
    drops = sum(rank.dropped for rank in state.ranks.values())
    found = state.verdict(summary)
    return (
        f"{UNKNOWN if newest is None else newest.step:>8}  {number(summary.rate, 2):>6}  "
        f"{_ms(summary.step_ns):>8}  {percent(summary.overlap):>7}  {_ms(summary.exposed_ns):>10}  "
        f"{_full(state):>5}  {drops:>5}  {clean(found.text)}{_budget(state)}{_trouble(state)}"
    )


def _full(state: RunState) -> str:
    """How many of the newest steps are full."""
    full, steps = state.cost.newest_full()
    return f"{full}/{steps}" if steps else UNKNOWN


def _budget(state: RunState) -> str:
    """What sampling may cost while somebody looks."""
    ppm = None if state.status is None else state.status.lease_ppm
    return "" if ppm is None else f"; budget {ppm / 1e4:g} %"


def _trouble(state: RunState) -> str:
    """Notes about a collector that was started again, and an error of its recording; "" without any."""
    status, notes = state.status, ""
    if status is not None and status.restarts:
        missing = UNKNOWN if state.missing_steps is None else state.missing_steps
        notes += f"; collector restarts: {status.restarts}, {missing} steps missing"
    if status is not None and status.recording_error:
        notes += f"; recording: {clean(status.recording_error)}"
    return notes


def follow(info: RunInfo | None, endpoint: str | None, budget_ppm: int = 0) -> None:
    """Prints lines about a live run until it ends; waits for one if there is none."""
    if endpoint is None:
        info = info or _wait_for_run()
        _narrate(f"attached to {info.run_id}, {info.world_size} ranks")
        endpoint = info.publish
    print(HEADER, flush=True)
    for text in lines(endpoint, budget_ppm):
        print(text, flush=True)


def lines(endpoint: str, budget_ppm: int = 0) -> Iterator[str]:
    """Yields a line about a live run every few seconds, and one at its end; see `LiveSource` for the budget."""
    source, state = LiveSource(endpoint, budget_ppm), RunState()
    received = time.monotonic()
    due = received + EVERY_S
    try:
        while state.end is None and (time.monotonic() - received < SILENCE_S or rundir.is_live(endpoint)):
            for message, envelope in source.read(0.2):
                state.apply(message, envelope.received_ns)
                received = time.monotonic()
            if time.monotonic() >= due and state.frames:
                yield line(state)
                due = time.monotonic() + EVERY_S
        for message, envelope in source.read(AFTER_END_S):
            state.apply(message, envelope.received_ns)
    finally:
        source.close()
    yield line(state)
    if state.end is None:
        _narrate(f"no frame from the collector for {SILENCE_S:.0f} s: it is gone")


def narrate_runs(
    runs: Callable[[], list[RunInfo]],
    over: threading.Event,
    without_run: Callable[[], Iterable[str]],
    budget_ppm: int = 0,
) -> None:
    """Prints lines about a job's runs to stderr, one run after the other, until the job is over.

    Args:
        runs: The job's live runs.
        over: Set when the job is over.
        without_run: Lines to print at the end if there was no run.
        budget_ppm: See `LiveSource`.
    """
    seen: set[str] = set()
    while True:
        last_look = over.is_set()
        for info in runs():
            if info.run_id not in seen:
                seen.add(info.run_id)
                _narrate(f"watching {info.run_id}, {info.world_size} ranks")
                _narrate(HEADER)
                for text in lines(info.publish, budget_ppm):
                    _narrate(text)
        if last_look:
            break
        over.wait(0.3)
    for text in [] if seen else without_run():
        _narrate(text)


def replay_lines(
    recording: Recording,
    from_ns: int = 0,
    speed: float | None = None,
    loop: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Prints the lines that a live view would have printed.

    Args:
        recording: What to replay.
        from_ns: Where to start (ns since the Unix epoch).
        speed: Recorded seconds per second; None prints everything at once, or with ``loop`` at normal speed.
        loop: Whether to start again at the end.
        sleep: Called to wait, with seconds.
    """
    if speed is None and loop:
        speed = 1.0
    while True:
        since_ns = recording.lead_in(from_ns, KEEP_STEPS, EVERY_S) if from_ns else 0
        print_lines(recording.seek(since_ns), from_ns, speed, sleep)
        if recording.skipped:
            _narrate(f"frames left out: {recording.skipped}, damaged or of a type unknown to this version of ddpwatch")
        if recording.cut_tail:
            _narrate("the recording was cut off here")
        if not loop:
            return


def print_lines(
    frames: Iterable[Frame],
    from_ns: int = 0,
    speed: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Prints a line for every `EVERY_S` of receive time, and one at the end; see `replay_lines`."""
    state, printed_ns = RunState(), from_ns

    def print_line() -> None:
        if speed is not None:
            sleep(max(state.now_ns - printed_ns, 0) / 1e9 / speed)
        print(line(state))

    print(HEADER)
    for message, envelope in frames:
        state.apply(message, envelope.received_ns)
        printed_ns = printed_ns or envelope.received_ns
        if envelope.received_ns - printed_ns >= EVERY_S * 1e9:
            print_line()
            printed_ns = envelope.received_ns
    print_line()


def _wait_for_run() -> RunInfo:
    info = rundir.newest_run()
    if info is None:
        _narrate(f"waiting for a run (looking in {rundir.directory()}); start one with --watch")
    while info is None:
        time.sleep(0.5)
        info = rundir.newest_run()
    return info


def _narrate(text: str) -> None:
    print(f"ddpwatch: {text}", file=sys.stderr, flush=True)


def _ms(ns: float | None) -> str:
    return number(ns, 1) if ns is None else number(ns / NS_PER_MS, 1)
