"""What happened in a run, one line each: arrivals, layouts, marks, odd steps, ends, findings that come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ddpwatch.analysis.diagnosis.verdict import Verdict
from ddpwatch.messages import Bye, Hello, Layout, Mark, Message, Status, Step
from ddpwatch.sampling.levels import is_odd, status_name
from ddpwatch.tui.text import ms

KEEP_EVENTS = 2000
GONE_NS = 3_000_000_000  # a finding that comes back sooner was never gone: a figure that wavers around its threshold
_QUIET = ("starting", "collecting", "ended")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log.

    Attributes:
        at_ns: When it was received (ns since the Unix epoch).
        kind: ``run``, ``rank``, ``layout``, ``step``, ``mark``, ``finding`` or ``output``.
        step: The step it belongs to, if any.
    """

    at_ns: int
    kind: str
    text: str
    severity: str = "text"
    step: int | None = None


class RunLog:
    """Takes messages and verdicts, keeps the newest events.

    Attributes:
        events: Oldest first.
        finding: The finding that holds now, or has been gone for less than `GONE_NS`.
        count: Events so far.
    """

    def __init__(self) -> None:
        self.events: deque[LogLine] = deque(maxlen=KEEP_EVENTS)
        self.finding: Verdict | None = None
        self.count = 0
        self._gone: tuple[int, int | None] | None = None  # since when (ns, step) the finding does not hold
        self._trouble = ""
        self._layouts: set[tuple[int, int]] = set()
        self._odd: set[tuple[int, str]] = set()

    def add(self, event: LogLine) -> None:
        """Takes one event."""
        self.count += 1
        self.events.append(event)

    def newest(self, count: int) -> list[LogLine]:
        """The newest events kept, at most that many, oldest first."""
        return list(self.events)[-count:] if count > 0 else []

    def take(self, message: Message, at_ns: int) -> None:
        """Takes one message; most are no event."""
        if isinstance(message, Step):
            if is_odd(message.status):
                self._step(message, at_ns)
        elif isinstance(message, Mark):
            self.add(_mark(message, at_ns))
        elif isinstance(message, Hello):
            self.add(LogLine(at_ns, "rank", f"rank {message.rank} attached: {message.host}, pid {message.pid}"))
        elif isinstance(message, Layout):
            self._layout(message, at_ns)
        elif isinstance(message, Bye):
            self.add(_bye(message, at_ns))
        elif isinstance(message, Status):
            self._recording(message.recording_error, at_ns)

    def judge(self, verdict: Verdict, at_ns: int, step: int | None) -> None:
        """Notes a finding that is new, and one that is gone for good. Changing figures make no new finding."""
        before = self.finding
        if before is not None and _same(before, verdict):
            self.finding, self._gone = verdict, None
            return
        if before is not None and _found(before) and before.kind not in _QUIET:
            self._gone = self._gone or (at_ns, step)
            since_ns, last = self._gone
            if not _found(verdict) and 0 <= at_ns - since_ns < GONE_NS:
                return
            self.add(LogLine(at_ns, "finding", f"cleared: {before.text}", "good", last))
        self.finding, self._gone = verdict, None
        if _found(verdict):
            self.add(LogLine(at_ns, "finding", verdict.text, verdict.severity, step))

    def _step(self, step: Step, at_ns: int) -> None:
        key = (step.step, step.status)
        if key not in self._odd:
            self._odd = {other for other in self._odd if other[0] > step.step - 100} | {key}
            what = status_name(step.status)
            severity = "warn" if step.status == "aborted" else "dim"
            self.add(LogLine(at_ns, "step", f"step {step.step} is {what} (rank {step.rank})", severity, step.step))

    def _recording(self, trouble: str, at_ns: int) -> None:
        """What the disk does not take; that it is more and more is told elsewhere."""
        what = trouble.partition(";")[0]
        if what and what != self._trouble:
            self._trouble = what
            self.add(LogLine(at_ns, "run", f"recording: {what}", "bad"))

    def _layout(self, layout: Layout, at_ns: int) -> None:
        key = (layout.module, layout.epoch)
        if key not in self._layouts:
            self._layouts.add(key)
            text = f"{len(layout.buckets)} buckets for {len(layout.params)} parameters (layout {layout.epoch})"
            self.add(LogLine(at_ns, "layout", text, "dim"))


class JobOutput:
    """What a job that we have started prints; its newest lines. Unlike the log, it outlives the run.

    Attributes:
        version: Grows with everything that is heard.
    """

    def __init__(self) -> None:
        self.version = 0
        self._lines: deque[LogLine] = deque(maxlen=KEEP_EVENTS)
        self._begun: list[LogLine] = []

    def hear(self, lines: Iterable[str], begun: str, at_ns: int) -> None:
        """Takes whole lines, and the one that is begun."""
        self.version += 1
        self._lines.extend(LogLine(at_ns, "output", line) for line in lines)
        self._begun = [LogLine(at_ns, "output", begun)] if begun else []

    @property
    def events(self) -> list[LogLine]:
        """Oldest first."""
        return [*self._lines, *self._begun]


def _found(verdict: Verdict) -> bool:
    return verdict.severity in ("warn", "bad")


def _same(a: Verdict, b: Verdict) -> bool:
    return (a.kind, a.rank, a.bucket, a.severity) == (b.kind, b.rank, b.bucket, b.severity)


def _mark(mark: Mark, at_ns: int) -> LogLine:
    took = "" if mark.end_ns is None else f", {ms(mark.end_ns - mark.start_ns)} ms"
    what = {"gc": "garbage collection", "user": f"mark “{mark.name}”"}.get(mark.kind, mark.name)
    return LogLine(at_ns, "mark", f"rank {mark.rank}: {what}{took}", "strong" if mark.kind == "user" else "dim")


def _bye(bye: Bye, at_ns: int) -> LogLine:
    who = "the run" if bye.rank is None else f"rank {bye.rank}"
    where = f" at step {bye.step}" if bye.step is not None else ""
    detail = f" ({bye.detail})" if bye.detail else ""
    severity = "text" if bye.reason == "finished" else "bad"
    return LogLine(at_ns, "run" if bye.rank is None else "rank", f"{who} ended: {bye.reason}{detail}{where}", severity)
