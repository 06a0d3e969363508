"""The Timeline view's model: one step or several on one axis, the window on it, and the values at the cursor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ddpwatch.analysis.diagnosis.words.sentences import LayerNames
from ddpwatch.common.intervals import total_within
from ddpwatch.common.text import UNKNOWN, counted, ms, size, with_unit
from ddpwatch.sampling.levels import is_watched
from ddpwatch.tui.models.lanes import MAX_COMM_ROWS, Bar, Lane, Lanes, StepLanes, lanes_of, marks_by_rank
from ddpwatch.tui.text import Field, shorten_name
from ddpwatch.viewer.state import StepAcrossRanks
from ddpwatch.wire.messages import Mark

_MIN_WINDOW_NS = 1_000
_MOMENT_NS = 1_000_000  # after a mark without an end, the cursor still finds it for so long


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of the axis in view: [start_ns, start_ns + length_ns) of [0, axis_ns)."""

    start_ns: int
    length_ns: int
    axis_ns: int

    @classmethod
    def all_of(cls, axis_ns: int) -> Window:
        """Returns the complete axis."""
        return cls(0, max(axis_ns, 1), max(axis_ns, 1))

    @property
    def zoomed(self) -> bool:
        """Whether it is less than the complete axis."""
        return self.length_ns < self.axis_ns

    def fitted(self, axis_ns: int) -> Window:
        """Returns the same window on another step.

        The complete axis, or the same stretch as far as the axis reaches.
        """
        if not self.zoomed:
            return Window.all_of(axis_ns)
        return replace(self, axis_ns=max(axis_ns, 1))._clamped()

    def zoom(self, factor: float, around_ns: int) -> Window:
        """Returns a window ``factor`` times shorter, with ``around_ns`` staying where it is on the screen."""
        length = min(max(int(self.length_ns / factor), _MIN_WINDOW_NS), self.axis_ns)
        share = (around_ns - self.start_ns) / self.length_ns
        return replace(self, start_ns=int(around_ns - share * length), length_ns=length)._clamped()

    def pan(self, share: float) -> Window:
        """Moves by a share of its length."""
        return replace(self, start_ns=self.start_ns + int(share * self.length_ns))._clamped()

    def showing(self, at_ns: int) -> Window:
        """Moves, if necessary, so that ``at_ns`` is in it."""
        if self.start_ns <= at_ns < self.start_ns + self.length_ns:
            return self
        return replace(self, start_ns=at_ns - self.length_ns // 2)._clamped()

    def _clamped(self) -> Window:
        length = min(self.length_ns, self.axis_ns)
        return replace(self, start_ns=min(max(self.start_ns, 0), self.axis_ns - length), length_ns=length)


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step or several on one axis.

    Attributes:
        steps: The steps, oldest first.
        lanes: The lanes of each step.
        ranks: The ranks shown.
        aligned: Whether the ranks share one axis; otherwise each starts at 0.
        title: Names the steps shown.
    """

    steps: tuple[StepAcrossRanks, ...]
    lanes: tuple[Lanes, ...]
    ranks: Sequence[int]
    length_ns: int
    aligned: bool
    comm_rows: int
    title: str
    by_role: bool = False

    def lanes_of(self, rank: int) -> list[Lane]:
        """Returns a rank's lane in each of the steps."""
        return [lanes.of(rank) for lanes, step in zip(self.lanes, self.steps, strict=True) if rank in step.members]


def timeline_of_step(step: StepAcrossRanks, lanes: StepLanes) -> Timeline:
    """Shows one step."""
    title = f"step {lanes.step}"
    title += f" ({lanes.status})" if lanes.status else ""
    title += lanes.notes
    title += f", {counted(len(lanes.missing), 'rank')} missing" if lanes.missing else ""
    axis = lanes.length_ns, lanes.aligned
    return Timeline((step,), (lanes.lanes,), lanes.lanes.ranks, *axis, lanes.comm_rows, title, lanes.by_role)


def timeline_of_seconds(
    steps: Sequence[StepAcrossRanks], seconds: float, ranks: Sequence[int], comm_rows: int, marks: Iterable[Mark] = ()
) -> Timeline:
    """Returns the last seconds of the given steps (oldest first, not empty)."""
    end_ns = steps[-1].end_ns
    since_ns = end_ns - int(seconds * 1e9)
    shown = tuple(step for step in steps if step.end_ns > since_ns and step.comparable) or (steps[-1],)
    origin = shown[0].start_ns
    by_rank = marks_by_rank(marks)
    lanes = tuple(lanes_of(step, ranks, origin, by_rank) for step in shown)
    title = f"steps {shown[0].step}–{shown[-1].step}, {(end_ns - origin) / 1e9:.1f} s"
    rows, by_role = min(comm_rows, MAX_COMM_ROWS), any(lane.roles for lane in lanes[-1][:1])
    return Timeline(shown, lanes, ranks, max(end_ns - origin, 1), True, rows, title, by_role)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The cursor: a time on the axis, a rank, and a second time to measure from."""

    at_ns: int = 0
    rank: int | None = None
    mark_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """The exact values at the cursor, as lines of fields."""

    position: tuple[Field, ...] = ()
    bucket: tuple[Field, ...] = ()
    params: str = ""
    measured: str = ""


@dataclass
class _BucketAtCursor:
    """A bucket in flight at the cursor, and the indices of others in flight at that time."""

    lane: Lane
    bar: Bar
    step: StepAcrossRanks
    others: list[str] = field(default_factory=list)


def inspect(timeline: Timeline, cursor: Cursor, names: LayerNames) -> Inspection:
    """Returns the exact values at the cursor."""
    if cursor.rank is None:
        return Inspection()
    at = cursor.at_ns
    lane = next((lane for lane in timeline.lanes_of(cursor.rank) if _contains(lane, at)), None)
    position = [Field(f"rank {cursor.rank} at {ms(at)} ms", f"r{cursor.rank} {ms(at)} ms", 0, "strong")]
    measured = _measured(cursor)
    if lane is None:
        return Inspection((*position, Field("between steps", "–", 1, "dim")), measured=measured)
    position += _phase(lane, at) + _hook(lane, at, names) + _marks(lane, at)
    if not is_watched(lane.step.status):
        return Inspection(tuple(position), measured=measured)
    in_flight = [bar for bar in lane.bars if bar.start <= at and (bar.end is None or at < bar.end)]
    if not in_flight:
        carried = "collective" if lane.step.comm_op else "bucket"
        nothing = Field(f"no {carried} in flight", f"no {carried}", 0, "dim")
        return Inspection(tuple(position), (nothing,), measured=measured)
    step = next(step for step in timeline.steps if step.step == lane.step.step)
    found = _BucketAtCursor(lane, in_flight[0], step, [bar.label for bar in in_flight[1:]])
    return Inspection(tuple(position), tuple(_bucket(found, names)), _params(found, names), measured)


def _measured(cursor: Cursor) -> str:
    if cursor.mark_ns is None:
        return ""
    return f"measured {ms(abs(cursor.at_ns - cursor.mark_ns))} ms from {ms(cursor.mark_ns)} ms"


def _contains(lane: Lane, at: int) -> bool:
    return lane.offset_ns <= at < lane.offset_ns + lane.step.duration_ns


def _phase(lane: Lane, at: int) -> list[Field]:
    if not is_watched(lane.step.status):
        return [Field("not watched: its phases are not known", "not watched", 1, "dim")]
    inside = at - lane.offset_ns
    for phase, start, end in reversed(lane.stretches()):
        if start <= inside < end:
            name = lane.waits_for(phase) or phase
            between = f"{ms(lane.offset_ns + start)}–{ms(lane.offset_ns + end)}"
            took = f"{ms(end - start)} ms"
            return [Field(f"{name} {between} ms ({took})", f"{name} {took}", 1)]
    return [Field("idle", "idle", 1, "dim")]


def _hook(lane: Lane, at: int, names: LayerNames) -> list[Field]:
    """Returns the newest hook fire."""
    inside = at - lane.offset_ns
    fired = [(ns, param) for param, ns in zip(lane.step.hook_param, lane.step.hook_ns, strict=True) if ns <= inside]
    if not fired:
        return []
    ns, param = max(fired)
    name = shorten_name(names.layer(param), 40) or f"parameter {param}"
    return [Field(f"gradient of {name} ready at {ms(lane.offset_ns + ns)} ms", name, 3)]


def _marks(lane: Lane, at: int) -> list[Field]:
    clock_ns = at - lane.offset_ns + lane.step.start_ns
    found = (m for m in lane.marks if m.start_ns <= clock_ns <= (m.end_ns or m.start_ns + _MOMENT_NS))
    return [Field(f"◆ {shorten_name(mark.name, 24)}", "◆", 2) for mark in found]


def _bucket(found: _BucketAtCursor, names: LayerNames) -> list[Field]:
    step, bar, offset = found.lane.step, found.bar, found.lane.offset_ns
    ready = step.comm_ready[bar.position]
    facts = found.step.facts_of(step.rank)
    exposed = facts.exposed[bar.position]
    fields = [
        _which(found, names),
        Field(size(bar.nbytes), size(bar.nbytes), 4),
        Field(f"ready {ms(None if ready is None else offset + ready)}", "", 5),
        Field(f"launch {ms(bar.start)}", f"launch {ms(bar.start)}", 1),
        Field(f"done {with_unit(ms(bar.end), 'ms')}", f"done {ms(bar.end)}", 2),
        _waited(found),
        Field(
            f"exposed {with_unit(ms(exposed), 'ms')}{_exposed_wait(found)}",
            f"exposed {ms(exposed)}",
            3,
            "warn" if exposed else "text",
        ),
    ]
    if found.others:
        fields.append(Field(f"also in flight: {', '.join(found.others[:6])}", "", 6, "dim"))
    return fields


def _which(found: _BucketAtCursor, names: LayerNames) -> Field:
    bar = found.bar
    if not bar.own:
        if bar.use:
            return Field(f"group {bar.name}", f"group {bar.name}", 0, "strong")
        return Field(f"bucket {bar.name}", f"bucket {bar.index}", 0, "strong")
    place = names.bucket_layer(bar.index, module=found.lane.step.comm_module[bar.position])
    at = f" at {shorten_name(place, 40)}" if place else ""
    return Field(f"{bar.name}{at}, {bar.role}", bar.name, 0, "strong")


def _waited(found: _BucketAtCursor) -> Field:
    """Returns how long this rank's bucket waited for the last rank's launch, and which rank that was."""
    facts = found.step.facts_of(found.lane.rank)
    skew = found.step.skew.buckets.get(facts.keys[found.bar.position])
    waited = 0 if skew is None else skew.last - facts.launch[found.bar.position]
    if skew is None or (waited and skew.last_rank is None):  # not known, or within the error of the clocks
        return Field(f"waited {UNKNOWN}", f"waited {UNKNOWN}", 3)
    whom = f" for rank {skew.last_rank}" if waited else ", launched last"
    return Field(f"waited {ms(waited)} ms{whom}", f"waited {ms(waited)}", 3)


def _exposed_wait(found: _BucketAtCursor) -> str:
    """Returns how much of the bucket's exposed time it waited for another rank."""
    flight = found.lane.flights[found.bar.position]
    if flight is None or not flight.wait_ns:
        return ""
    waited = total_within(found.lane.figures.exposed, flight.start, flight.transfer)
    return f", {ms(waited)} of it waiting" if waited else ""


def _params(found: _BucketAtCursor, names: LayerNames) -> str:
    params = names.bucket_params(found.bar.index, module=found.lane.step.comm_module[found.bar.position])
    return f"{len(params)} parameters: {', '.join(shorten_name(name, 60) for name in params[:12])}" if params else ""
