"""The Timeline view's model: one step or several on one axis, the window on it, and what lies under the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ddpwatch.analysis.diagnosis.verdict import LayerNames
from ddpwatch.messages import Mark
from ddpwatch.sampling.levels import is_watched
from ddpwatch.state import StepAcrossRanks
from ddpwatch.tui.models.lanes import MOST_COMM_ROWS, Bar, Lane, Lanes, Timeline
from ddpwatch.tui.text import UNKNOWN, Field, clean, ms, size

_ZOOM_LIMIT_NS = 1_000  # a window of a microsecond is enough


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of the axis in view: [start_ns, start_ns + length_ns) of [0, whole_ns)."""

    start_ns: int
    length_ns: int
    whole_ns: int

    @classmethod
    def all_of(cls, whole_ns: int) -> Window:
        """Everything."""
        return cls(0, max(whole_ns, 1), max(whole_ns, 1))

    @property
    def zoomed(self) -> bool:
        """Whether it is less than everything."""
        return self.length_ns < self.whole_ns

    def fitted(self, whole_ns: int) -> Window:
        """The same window on another step: still everything, or the same stretch as far as there is one."""
        if not self.zoomed:
            return Window.all_of(whole_ns)
        return replace(self, whole_ns=max(whole_ns, 1))._kept()

    def zoom(self, factor: float, around_ns: int) -> Window:
        """``factor`` times shorter, with the moment ``around_ns`` where it was."""
        length = min(max(int(self.length_ns / factor), _ZOOM_LIMIT_NS), self.whole_ns)
        share = (around_ns - self.start_ns) / self.length_ns
        return replace(self, start_ns=int(around_ns - share * length), length_ns=length)._kept()

    def pan(self, share: float) -> Window:
        """Moved by a share of its length."""
        return replace(self, start_ns=self.start_ns + int(share * self.length_ns))._kept()

    def showing(self, at_ns: int) -> Window:
        """Moved so that a moment is in it."""
        if self.start_ns <= at_ns < self.start_ns + self.length_ns:
            return self
        return replace(self, start_ns=at_ns - self.length_ns // 2)._kept()

    def _kept(self) -> Window:
        length = min(self.length_ns, self.whole_ns)
        return replace(self, start_ns=min(max(self.start_ns, 0), self.whole_ns - length), length_ns=length)


@dataclass(frozen=True, slots=True)
class Trace:
    """Steps on one axis.

    Attributes:
        views: The steps, oldest first.
        lanes: Their lanes, likewise.
        ranks: The ranks shown.
        title: What is shown, in words.
        step: The newest of the steps.
    """

    views: tuple[StepAcrossRanks, ...]
    lanes: tuple[Lanes, ...]
    ranks: Sequence[int]
    length_ns: int
    aligned: bool
    comm_rows: int
    title: str
    step: int

    def track(self, rank: int) -> list[Lane]:
        """A rank's steps."""
        return [lanes.of(rank) for lanes, view in zip(self.lanes, self.views, strict=True) if rank in view.members]


def trace_of_step(view: StepAcrossRanks, timeline: Timeline) -> Trace:
    """One step."""
    title = f"step {timeline.step}"
    title += f" ({timeline.status})" if timeline.status else ""
    title += "" if timeline.aligned else ", each rank from its own start: clocks differ"
    title += f", {len(timeline.missing)} ranks missing" if timeline.missing else ""
    return Trace(
        (view,), (timeline.lanes,), timeline.lanes.ranks, timeline.length_ns, timeline.aligned, timeline.comm_rows,
        title, view.step,
    )  # fmt: skip


def trace_of_seconds(
    views: Sequence[StepAcrossRanks], seconds: float, ranks: Sequence[int], comm_rows: int, marks: Sequence[Mark] = ()
) -> Trace:
    """The last seconds of the given steps (oldest first, not empty)."""
    end_ns = views[-1].end_ns
    chosen = tuple(v for v in views if v.end_ns > end_ns - int(seconds * 1e9) and v.comparable) or (views[-1],)
    origin = chosen[0].start_ns
    lanes = tuple(Lanes(view, ranks, origin, marks) for view in chosen)
    title = f"the last {(end_ns - origin) / 1e9:.1f} s, steps {chosen[0].step}–{chosen[-1].step}"
    rows = min(comm_rows, MOST_COMM_ROWS)
    return Trace(chosen, lanes, ranks, max(end_ns - origin, 1), True, rows, title, chosen[-1].step)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the user looks: a moment on the axis, a rank, and a second moment to measure from."""

    at_ns: int = 0
    rank: int | None = None
    mark_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What lies under the cursor, as lines of fields."""

    place: tuple[Field, ...] = ()
    bucket: tuple[Field, ...] = ()
    params: str = ""
    measured: str = ""


@dataclass
class _Under:
    """A bucket in flight under the cursor."""

    lane: Lane
    bar: Bar
    view: StepAcrossRanks
    others: list[int] = field(default_factory=list)


def inspect(trace: Trace, cursor: Cursor, names: LayerNames) -> Inspection:
    """The exact values at the cursor."""
    if cursor.rank is None:
        return Inspection()
    at = cursor.at_ns
    lane = next((lane for lane in trace.track(cursor.rank) if _holds(lane, at)), None)
    place = [Field(f"rank {cursor.rank} at {ms(at)} ms", f"r{cursor.rank} {ms(at)} ms", 0, "strong")]
    measured = (
        "" if cursor.mark_ns is None else f"measured {ms(abs(at - cursor.mark_ns))} ms from {ms(cursor.mark_ns)} ms"
    )
    if lane is None:
        return Inspection((*place, Field("between steps", "–", 1, "dim")), measured=measured)
    place += _phase(lane, at) + _hook(lane, at, names) + _marks(lane, at)
    view = next(view for view in trace.views if view.step == lane.step.step)
    if not is_watched(lane.step.status):
        return Inspection(tuple(place), measured=measured)
    flying = [bar for bar in lane.bars() if bar.start <= at and (bar.end is None or at < bar.end)]
    if not flying:
        return Inspection(tuple(place), (Field("no bucket in flight", "no bucket", 0, "dim"),), measured=measured)
    under = _Under(lane, flying[0], view, [bar.index for bar in flying[1:]])
    return Inspection(tuple(place), tuple(_bucket(under)), _params(under, names), measured)


def _holds(lane: Lane, at: int) -> bool:
    return lane.offset_ns <= at < lane.offset_ns + lane.step.duration_ns


def _phase(lane: Lane, at: int) -> list[Field]:
    if not is_watched(lane.step.status):
        return [Field("not watched: what it does is not known", "not watched", 1, "dim")]
    inside = at - lane.offset_ns
    for span in lane.step.spans:
        if span.start <= inside < span.end:
            name = "waits for its buckets" if span.phase == "sync" else span.phase
            where = f"{ms(lane.offset_ns + span.start)}–{ms(lane.offset_ns + span.end)}"
            return [
                Field(
                    f"{name} {where} ms ({ms(span.end - span.start)} ms)", f"{name} {ms(span.end - span.start)} ms", 1
                )
            ]
    return [Field("idle", "idle", 1, "dim")]


def _hook(lane: Lane, at: int, names: LayerNames) -> list[Field]:
    """The newest gradient."""
    inside = at - lane.offset_ns
    fired = [(ns, param) for param, ns in zip(lane.step.hook_param, lane.step.hook_ns, strict=True) if ns <= inside]
    if not fired:
        return []
    ns, param = max(fired)
    name = clean(names.layer(param), 40) or f"parameter {param}"
    return [Field(f"last gradient {name} at {ms(lane.offset_ns + ns)} ms", name, 3)]


def _marks(lane: Lane, at: int) -> list[Field]:
    inside = at - lane.offset_ns
    names = [
        name for name, _, start, end in lane.marks if start <= inside <= (start + 1_000_000 if end is None else end)
    ]
    return [Field(f"◆ {clean(name, 24)}", "◆", 2) for name in names]


def _bucket(under: _Under) -> list[Field]:
    step, bar, offset = under.lane.step, under.bar, under.lane.offset_ns
    ready = step.bucket_ready[bar.position]
    facts = under.view.facts_of(step.rank)
    exposed = facts.exposed[bar.position]
    fields = [
        Field(f"bucket {bar.index}", f"b{bar.index}", 0, "strong"),
        Field(size(bar.nbytes), size(bar.nbytes), 4),
        Field(f"ready {ms(None if ready is None else offset + ready)}", "", 5),
        Field(f"launch {ms(bar.start)}", f"l {ms(bar.start)}", 1),
        Field(f"done {_ms(bar.end)}", f"d {ms(bar.end)}", 2),
        Field(f"waited {_ms(_waited(under))}", f"w {ms(_waited(under))}", 3),
        Field(f"exposed {_ms(exposed)}", f"x {ms(exposed)}", 3, "warn" if exposed else "text"),
    ]
    if under.others:
        fields.append(Field(f"also in flight: {', '.join(map(str, under.others[:6]))}", "", 6, "dim"))
    return fields


def _ms(ns: float | None) -> str:
    return UNKNOWN if ns is None else f"{ms(ns)} ms"


def _waited(under: _Under) -> int | None:
    """How long the bucket waited for its last rank."""
    facts = under.view.facts_of(under.lane.rank)
    skew = under.view.skew.buckets.get(facts.keys[under.bar.position])
    return None if skew is None else skew.last - facts.launch[under.bar.position]


def _params(under: _Under, names: LayerNames) -> str:
    params = names.bucket_params(under.bar.index)
    return f"{len(params)} parameters: {', '.join(clean(name, 60) for name in params[:12])}" if params else ""
