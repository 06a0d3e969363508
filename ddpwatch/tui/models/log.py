"""The Log view's model: a line for each arrival, layout, mark, unusual step and end, and two for each incident."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.incident_news import IncidentNews, News
from ddpwatch.analysis.diagnosis.words.wording import ranks_named
from ddpwatch.common.text import ms
from ddpwatch.sampling.levels import is_odd, status_name
from ddpwatch.wire.messages import Bye, Hello, Layout, Mark, Message, Node, Status, Step

KEEP_LINES = 2000


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of the log.

    Attributes:
        at_ns: When it was received (ns since the Unix epoch).
        kind: ``run``, ``rank``, ``layout``, ``step``, ``mark``, ``incident`` or ``output``.
        step: The step it belongs to, if any.
    """

    at_ns: int
    kind: str
    text: str
    severity: str = "text"
    step: int | None = None


class RunLog:
    """Turns messages and incidents into lines, and keeps the newest.

    Attributes:
        lines: Oldest first.
        count: Lines so far.
    """

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque(maxlen=KEEP_LINES)
        self.count = 0
        self._news = IncidentNews()
        self._recording_error = ""
        self._restarts = 0
        self._whole = ""
        self._layouts: set[tuple[int, int]] = set()
        self._unusual: set[tuple[int, str]] = set()
        self._unseen: set[int] = set()  # nodes

    def add_line(self, line: LogLine) -> None:
        """Appends a line."""
        self.count += 1
        self.lines.append(line)

    def newest(self, count: int) -> list[LogLine]:
        """Returns the newest lines kept, at most that many, oldest first."""
        return list(self.lines)[-count:] if count > 0 else []

    def take_message(self, message: Message, at_ns: int) -> None:
        """Takes a message; most add no line."""
        if isinstance(message, Step):
            if is_odd(message.status):
                self._step(message, at_ns)
        elif isinstance(message, Mark):
            if message.kind != "data":  # they come in any step; the phase and incidents tell of them
                self.add_line(_mark(message, at_ns))
        elif isinstance(message, Hello):
            self.add_line(LogLine(at_ns, "rank", f"rank {message.rank} attached: {message.host}, pid {message.pid}"))
        elif isinstance(message, Layout):
            self._layout(message, at_ns)
        elif isinstance(message, Bye):
            self.add_line(_bye(message, at_ns))
        elif isinstance(message, Node):
            self._node(message, at_ns)
        elif isinstance(message, Status):
            self._recording(message.recording_error, at_ns)
            self._restarted(message.restarts, at_ns)
            self._pointer(message.whole, at_ns)

    def log_incidents(self, incidents: Sequence[Incident], at_ns: int, unit: str) -> None:
        """Adds a line for each incident that has started, and for each that has ended; costs are in that unit."""
        for news in self._news.take_incidents(incidents, at_ns):
            self.add_line(_incident(news, at_ns, unit))

    def _step(self, step: Step, at_ns: int) -> None:
        key = (step.step, step.status)
        if key not in self._unusual:
            self._unusual = {other for other in self._unusual if other[0] > step.step - 100} | {key}
            what = status_name(step.status)
            severity = "warn" if step.status == "aborted" else "dim"
            self.add_line(LogLine(at_ns, "step", f"step {step.step} is {what} (rank {step.rank})", severity, step.step))

    def _recording(self, error: str, at_ns: int) -> None:
        """Adds a line for a new error of the recording. The header shows the growing count of lost frames."""
        what = error.partition(";")[0]
        if what and what != self._recording_error:
            self._recording_error = what
            self.add_line(LogLine(at_ns, "run", f"recording: {what}", "bad"))

    def _restarted(self, restarts: int, at_ns: int) -> None:
        """Adds a line for a collector that died and was started again."""
        if restarts > self._restarts:
            self._restarts = restarts
            self.add_line(
                LogLine(at_ns, "run", f"the collector died and was started again ({restarts} so far)", "warn")
            )

    def _node(self, node: Node, at_ns: int) -> None:
        """Adds a line for a host whose agent is gone, and one when it is back."""
        if node.connected == (node.node not in self._unseen):
            return
        self._unseen ^= {node.node}
        host = f"host {node.host}" if node.host else "another host"  # whose agent has not said its name yet
        if node.connected:
            text, severity = f"{host} is connected again: {ranks_named(node.ranks)}", "good"
        else:
            text, severity = f"{host} is not connected: {ranks_named(node.ranks)} unseen", "warn"
        self.add_line(LogLine(at_ns, "rank", text, severity))

    def _pointer(self, whole: str, at_ns: int) -> None:
        """Adds a line with what to type for the whole run, on a host that shows only its own ranks."""
        if whole != self._whole:
            self._whole = whole
            self.add_line(LogLine(at_ns, "run", f"these are the ranks of this host; for all hosts: {whole}"))

    def _layout(self, layout: Layout, at_ns: int) -> None:
        key = (layout.module, layout.epoch)
        if key not in self._layouts and layout.kind != "call":  # the table of collectives has the places
            self._layouts.add(key)
            units = "parameter groups" if layout.kind == "group" else "buckets"
            text = f"{len(layout.buckets)} {units} for {len(layout.params)} parameters (assignment {layout.epoch})"
            self.add_line(LogLine(at_ns, "buckets", text, "dim"))


class JobOutput:
    """The newest lines that a job launched by ddpwatch has printed. Unlike the log, it outlives the run.

    Attributes:
        version: Grows with every change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._lines: deque[LogLine] = deque(maxlen=KEEP_LINES)
        self._unfinished: list[LogLine] = []

    def add_output(self, lines: Iterable[str], unfinished: str, at_ns: int) -> None:
        """Appends complete lines, and replaces the unfinished one."""
        self.version += 1
        self._lines.extend(LogLine(at_ns, "output", line) for line in lines)
        self._unfinished = [LogLine(at_ns, "output", unfinished)] if unfinished else []

    @property
    def lines(self) -> list[LogLine]:
        """Oldest first."""
        return [*self._lines, *self._unfinished]


def style_of(incident: Incident) -> str:
    """Returns the style of an incident: what ends a run, or names a rank, is bad."""
    if incident.severity == "info":
        return "dim"
    return "bad" if incident.severity == "error" or KINDS[incident.kind].blames else "warn"


def _incident(news: News, at_ns: int, unit: str) -> LogLine:
    incident = news.incident
    step = incident.until_step if news.what == "ended" else incident.since_step
    return LogLine(at_ns, "incident", news.text(unit), "good" if news.what == "ended" else style_of(incident), step)


def mark_duration(mark: Mark) -> str:
    """Returns a mark's duration, to follow its name; empty for a moment."""
    return "" if mark.end_ns is None else f", {ms(mark.end_ns - mark.start_ns)} ms"


def _mark(mark: Mark, at_ns: int) -> LogLine:
    what = {"gc": "garbage collection", "user": f"mark “{mark.name}”"}.get(mark.kind, mark.name)
    text = f"rank {mark.rank}: {what}{mark_duration(mark)}"
    return LogLine(at_ns, "mark", text, "strong" if mark.kind == "user" else "dim")


def _bye(bye: Bye, at_ns: int) -> LogLine:
    who = "the run" if bye.rank is None else f"rank {bye.rank}"
    where = f" at step {bye.step}" if bye.step is not None else ""
    detail = f" ({bye.detail})" if bye.detail else ""
    severity = "text" if bye.reason == "finished" else "bad"
    return LogLine(at_ns, "run" if bye.rank is None else "rank", f"{who} ended: {bye.reason}{detail}{where}", severity)
