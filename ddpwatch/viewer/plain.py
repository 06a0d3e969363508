"""Plain lines instead of a dashboard: one aligned line every few seconds, for logs, pipes and dumb terminals."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.incident_news import (
    IncidentNews,
    News,
    cost_text,
    costs_nothing,
    is_only_counted,
    message_text,
    steps_text,
)
from ddpwatch.analysis.diagnosis.words.lost_time import lost_text
from ddpwatch.analysis.diagnosis.words.why_unwatched import Why
from ddpwatch.analysis.diagnosis.words.wording import ranks_named, stack_lines
from ddpwatch.analysis.estimate import Estimate
from ddpwatch.analysis.kept_steps import KEPT
from ddpwatch.analysis.throughput import throughput_text
from ddpwatch.analysis.window import summarise
from ddpwatch.common.text import UNKNOWN, clean, counted, number, percent, plus_minus
from ddpwatch.common.units import NS_PER_S, to_ms
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.names import report_command
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.version import untested
from ddpwatch.viewer.follow import new_runs
from ddpwatch.viewer.live_source import SILENCE_S, LiveSource, Source, may_go_on
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Status
from ddpwatch.wire.transport import Frame

if TYPE_CHECKING:
    from ddpwatch.recording.reader import Recording

EVERY_S = 2.0
SELDOM_S = 60.0  # at most, while no step ends: each line that says the same comes after twice as long
INDENT = " " * 10  # of lines about incidents: as far as the step
HEADER = (
    f"{'step':>8}  {'it/s':>6}  {'step ms':>8}  {'overlap':>7}  {'exposed ms':>10}  {'in full':>10}  what stands out"
)


class RunLines:
    """Turns a run's frames into lines.

    Attributes:
        state: All that is known of the run.
    """

    def __init__(self) -> None:
        self.state = RunState()
        self._news = IncidentNews()
        self._has_pointed = self._has_named_torch = False
        self._step: int | None = None
        self._pause_ns = self._due_ns = 0

    def lines(self, last: bool = False) -> list[str]:
        """Returns a line for each incident that has started or ended since the last look, then the run's state.

        Args:
            last: Whether the state has to be among them; it is seldom, while no step ends.
        """
        state = self.state
        incidents = state.diagnosis.incidents()
        news = self._news.take_incidents(incidents, state.now_ns)
        changes = [line for item in news if item.incident.severity != "info" for line in _news_lines(item, state.unit)]
        states = [line(state, incidents)] if self._is_due(bool(changes) or last) else []
        return [*self._pointer(), *self._untested_torch(), *changes, *states]

    def _is_due(self, is_new: bool) -> bool:
        """Returns whether the state is worth a line, as it is new, or was said long enough ago."""
        now_ns, newest = self.state.now_ns, self.state.newest_step()
        step = None if newest is None else newest.step
        if is_new or step != self._step:
            self._pause_ns = 0
        elif now_ns < self._due_ns:
            return False
        self._step = step
        self._pause_ns = min(2 * self._pause_ns, int(SELDOM_S * NS_PER_S)) or int(EVERY_S * NS_PER_S)
        self._due_ns = now_ns + self._pause_ns
        return True

    def _pointer(self) -> list[str]:
        """Says once, on a host that shows only its own ranks, what to type for the whole run."""
        whole = "" if self.state.status is None else clean(self.state.status.whole)
        if not whole or self._has_pointed:
            return []
        self._has_pointed = True
        return [f"{INDENT}these are the ranks of this host; for all hosts: {whole}"]

    def _untested_torch(self) -> list[str]:
        """Says once that the job's torch is not one that is tested."""
        torch = next((rank.hello.torch for rank in self.state.ranks.values() if rank.hello is not None), "")
        beyond = untested(torch)
        if not beyond or self._has_named_torch:
            return []
        self._has_named_torch = True
        return [f"{INDENT}torch {clean(torch)} is {beyond}: ddpwatch doctor tries what works"]

    def closing(self, stretch: str = "") -> list[str]:
        """Returns all incidents, worst first, and where the time went; nothing before the first step.

        Infos that cost next to nothing are only counted.

        Args:
            stretch: What part of the run they are of; empty for all of it.
        """
        diagnosis = self.state.diagnosis
        incidents, lost = diagnosis.incidents(), lost_text(diagnosis.lost())
        unit = self.state.unit
        shown = [one for one in incidents if not is_only_counted(one.kind, one.severity, one.share)]
        rows = [
            [
                KINDS[row.kind].name,
                _ranks(row),
                steps_text(row),
                "" if costs_nothing(row) else cost_text(row, unit),
                clean(message_text(row)),
            ]
            for row in shown
        ]
        heading = f"incidents{stretch}: {len(incidents)}" + (f"; {lost}" if lost else "")
        lines = [line for row, incident in zip(_aligned(rows), shown, strict=True) for line in (row, *_below(incident))]
        if more := len(incidents) - len(shown):
            lines.append(f"  … {more} more, of no cost worth a figure")
        return [heading, *lines] if self.state.steps else []


def recorded_lines(status: Status | None) -> list[str]:
    """Returns what to type for the report of what the collector has recorded; nothing if that is nothing."""
    if status is None or not status.recording or not status.recording_bytes:
        return []
    return [f"recorded: {clean(report_command(status.recording))}"]


def _below(incident: Incident) -> list[str]:
    """Returns the stacks of a hang, and what to do next."""
    stacks = stack_lines(incident.ranks, incident.evidence)
    return [f"      {clean(text)}" for text in (*stacks, f"next: {incident.next_step}")]


def _news_lines(news: News, unit: str) -> list[str]:
    """Returns what is new, and what to do about it each time that it comes."""
    step = f"{INDENT}next: {clean(news.incident.next_step)}"
    return [f"{INDENT}{clean(news.text(unit))}", *([step] if news.needs_step else [])]


def _ranks(incident: Incident) -> str:
    return ranks_named(incident.ranks) if incident.ranks else "all ranks"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns columns of text, the last one ragged."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return ["  " + "  ".join([f"{c:<{w}}" for c, w in zip(row, widths, strict=False)] + [row[-1]]) for row in rows]


def line(state: RunState, incidents: Sequence[Incident]) -> str:
    """Returns the state of a run in one line, which ends with the verdict."""
    summary = summarise(state.window())
    newest = state.newest_step()
    found, stale, known = state.verdict(summary, incidents), state.stale(summary.step_ns), summary.estimate
    rate, step_ns = (None, None) if stale.steps else (summary.rate, summary.step_ns)
    overlap, exposed_ns = (None, None) if stale.timed else (known.overlap, known.exposed_ns)
    exposed = plus_minus(number(to_ms(exposed_ns)), number(to_ms(known.exposed_reach_ns)))
    return (
        f"{UNKNOWN if newest is None else newest.step:>8}  {number(rate, 2):>6}  "
        f"{number(to_ms(step_ns)):>8}  {percent(overlap):>7}  {exposed.replace(' ', ''):>10}  "
        f"{_full(known):>10}  {_notes(state)}{_throughput(state, step_ns)}{clean(found.with_others())}"
    )


def _full(known: Estimate) -> str:
    """Returns from how many steps, and of how many, what is exposed is known."""
    return f"{known.full}/{known.steps}" if known.steps else UNKNOWN


def _throughput(state: RunState, step_ns: float | None) -> str:
    """Returns what the newest steps get done; empty if that is not known."""
    text = throughput_text(state.throughput(step_ns))
    return f"{text}; " if text else ""


def _notes(state: RunState) -> str:
    """Returns what is off, messages lost, collectors that were started again, an error of the recording."""
    status, notes = state.status, "".join(f"{clean(off.label)}; " for off in state.off.found())
    if state.dropped:
        notes += f"{counted(state.dropped, 'lost message')}; "
    if status is not None and status.restarts:
        missing = UNKNOWN if state.missing_steps is None else state.missing_steps
        notes += f"collector restarts: {status.restarts}, {missing} steps missing; "
    if status is not None and status.recording_error:
        notes += f"recording: {clean(status.recording_error)}; "
    return notes


def follow(info: RunInfo | None, endpoint: str | None, budget_ppm: int = 0) -> None:
    """Prints lines about a live run until it ends; waits for one if there is none."""
    if endpoint is None:
        info = info or wait_for_run()
        _narrate(f"attached to {info.run_id}, {counted(info.world_size, 'rank')}")
        endpoint = info.publish
    for text in lines(endpoint, budget_ppm):
        print(text, flush=True)


def lines(endpoint: str, budget_ppm: int = 0) -> Iterator[str]:
    """Yields the header, lines about a live run every few seconds; at its end, its incidents and recording.

    Args:
        endpoint: Where its frames come from; see `LiveSource`.
        budget_ppm: See `LiveSource`.
    """
    source, run = LiveSource(endpoint, budget_ppm), RunLines()
    yield HEADER
    state, trouble = run.state, ""
    received = time.monotonic()
    due = received + EVERY_S
    try:
        while state.end is None and (time.monotonic() - received < SILENCE_S or may_go_on(source, endpoint)):
            for message, envelope in source.read(0.2):
                state.apply_message(message, envelope.received_ns, envelope.frame)
                received = time.monotonic()
            trouble = _narrate_change(trouble, source)
            if source.over:
                break
            if time.monotonic() >= due and state.frames:
                yield from run.lines()
                due = time.monotonic() + EVERY_S
        if state.status is not None and state.status.recording:  # one more says how the recording was closed
            for message, envelope in source.read(0.3):
                state.apply_message(message, envelope.received_ns, envelope.frame)
    finally:
        source.close()
    yield from run.lines(last=True)
    yield from run.closing()
    yield from recorded_lines(state.status)
    if state.end is None and not source.over:
        _narrate(f"no frame from the collector for {SILENCE_S:.0f} s: it is gone")


def _narrate_change(before: str, source: Source) -> str:
    """Says what is wrong with the source, or that nothing is any more, if that is new."""
    if source.trouble != before:
        _narrate(source.trouble or "connected again")
    return source.trouble


def narrate_runs(
    runs: Callable[[], list[RunInfo]],
    over: threading.Event,
    without_run: Callable[[], Iterable[str]],
    why: Callable[[], Why],
    budget_ppm: int = 0,
) -> None:
    """Prints lines about a job's runs to stderr, one run after the other, until the job is over.

    Args:
        runs: The job's live runs.
        over: Set when the job is over.
        without_run: Lines to print at the end if there was no run.
        why: Why there is none so far.
        budget_ppm: See `LiveSource`.
    """
    try:
        _narrate_all(runs, over, without_run, why, budget_ppm)
    except (DdpwatchError, OSError) as error:  # the run directory is gone: that is no fault of the job
        _narrate(f"the job is no longer shown: {error}")


def _narrate_all(
    runs: Callable[[], list[RunInfo]],
    over: threading.Event,
    without_run: Callable[[], Iterable[str]],
    why: Callable[[], Why],
    budget_ppm: int,
) -> None:
    seen, waiting = list[RunInfo](), _Waiting()

    def idle() -> None:
        if not seen:
            waiting.narrate(str(why()))

    for info in new_runs(runs, over, idle):
        seen.append(info)
        _narrate(f"watching {info.run_id}, {counted(info.world_size, 'rank')}")
        for text in lines(info.publish, budget_ppm):
            _narrate(text)
    for text in [] if seen else without_run():
        _narrate(text)


class _Waiting:
    """Says once why nothing is watched, when that has not changed for `EVERY_S`: a job that starts is quicker."""

    def __init__(self) -> None:
        self._why = self._said = ""
        self._since = 0.0

    def narrate(self, why: str) -> None:
        """Takes the reason of now."""
        now = time.monotonic()
        if why != self._why:
            self._why, self._since = why, now
        elif why != self._said and now - self._since >= EVERY_S:
            self._said = why
            _narrate(f"nothing is watched yet: {clean(why)}")


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
        lead_in = recording.lead_in(from_ns, KEPT.of(recording.world_size), EVERY_S)
        stretch = "" if lead_in.everything else " from here on"
        print_lines(recording.select(lead_in), from_ns, speed, sleep, stretch, str(recording.path))
        for text in recording.left_out:
            _narrate(text)
        if not loop:
            return


def print_lines(
    frames: Iterable[Frame],
    from_ns: int = 0,
    speed: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
    stretch: str = "",
    source: str = "",
) -> None:
    """Prints lines for every `EVERY_S` of receive time, and the incidents at the end; see `replay_lines`.

    Args:
        frames: What to print lines about.
        from_ns: Where to start (ns since the Unix epoch).
        speed: See `replay_lines`.
        sleep: See `replay_lines`.
        stretch: See `RunLines.closing`.
        source: The recording, for commands that read it.
    """
    run, printed_ns = RunLines(), from_ns
    state = run.state
    state.diagnosis.places.read_from(source)

    def print_line(last: bool = False) -> None:
        if speed is not None:
            sleep(max(state.now_ns - printed_ns, 0) / 1e9 / speed)
        for text in run.lines(last):
            print(text)

    print(HEADER)
    for message, envelope in frames:
        state.apply_message(message, envelope.received_ns, envelope.frame)
        printed_ns = printed_ns or envelope.received_ns
        if envelope.received_ns - printed_ns >= EVERY_S * 1e9:
            print_line()
            printed_ns = envelope.received_ns
    print_line(last=True)
    print(*run.closing(stretch), sep="\n")


def wait_for_run() -> RunInfo:
    """Returns the newest run; if there is none, says so, and waits for one."""
    info = rundir.newest_run()
    if info is None:
        how = "call ddpwatch.watch(model) in its script, or start it with ddpwatch run"
        _narrate(f"waiting for a run (looking in {rundir.directory()}); {how}")
    return info or next(new_runs(rundir.live_runs))


def _narrate(text: str) -> None:
    print(f"ddpwatch: {text}", file=sys.stderr, flush=True)
