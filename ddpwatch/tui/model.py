"""What the views draw: one frozen `Overview`, built from the run's state and from what the user has selected.

All arithmetic ends here or in `ddpwatch.analysis`; paint functions only place what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ddpwatch.analysis.recent import ENOUGH_STEPS, RankSummary, Summariser, Summary
from ddpwatch.analysis.verdict import Verdict, verdict
from ddpwatch.messages import Bye, Device, Hello, Status
from ddpwatch.state import RankState, RankStatus, RunState, StepView
from ddpwatch.tui.lanes import Timeline, timeline_of

HISTORY_S = 120
HISTORY_STEPS = 400
SUMMARY_NS = 500_000_000


class Link(str, Enum):
    """How the feed stands."""

    WAITING = "waiting"
    ATTACHING = "attaching"
    LIVE = "live"
    GONE = "gone"
    REPLAY = "replay"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LinkState:
    """How the feed stands, and what belongs to it: a directory looked in, a name, a replay's speed."""

    link: Link = Link.WAITING
    name: str = ""
    directory: str = ""
    speed: float = 1.0
    paused: bool = False
    replay: bool = False

    @property
    def stale(self) -> bool:
        """Whether what is drawn is no longer fed."""
        return self.link is Link.GONE or (self.link is Link.ENDED and not self.replay)


@dataclass(frozen=True, slots=True)
class RankRow:
    """One line of the rank table. Medians come from ``summary``, the rest from the rank's newest frames."""

    rank: int
    host: str
    pid: int | None
    status: str
    severity: str
    step: int | None
    dropped: int
    summary: RankSummary
    slowest: bool = False


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The newest sample of one device.

    ``history`` is its mean utilisation in each of the last `HISTORY_S` whole seconds, as (age in s, %), oldest first.
    """

    device: Device
    history: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One step in the history strip: the longest of its ranks, and the most that was exposed on one."""

    step: int
    step_ns: int
    exposed_ns: int | None


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that the overview draws."""

    link: LinkState = LinkState()
    run_id: str = ""
    hello: Hello | None = None
    world_size: int = 0
    newest_step: int | None = None
    summary: Summary = field(default_factory=Summary)
    verdict: Verdict = field(default_factory=lambda: Verdict("starting", "none", ""))
    end: Bye | None = None
    status: Status | None = None
    dropped: int = 0
    timeline: Timeline | None = None
    ranks: tuple[RankRow, ...] = ()
    devices: tuple[DeviceRow, ...] = ()
    history: tuple[HistoryPoint, ...] = ()


class OverviewBuilder:
    """Builds overviews of one state. Keeps the summary until a further step is complete."""

    def __init__(self) -> None:
        self._comm_rows = 1
        self._key: tuple[int, ...] = ()
        self._summary = Summary()
        self._summariser = Summariser()
        self._at_ns = 0

    def build(self, state: RunState, link: LinkState) -> Overview:
        """The overview as of now, with the newest step in its timeline."""
        hellos = [rank.hello for rank in state.ranks.values() if rank.hello is not None]
        newest = state.newest_step()
        summary = self.summary(state, at_rest=link.stale or (link.replay and link.link is Link.ENDED))
        return Overview(
            link=link,
            run_id=state.run_id or link.name,
            hello=hellos[0] if hellos else None,
            world_size=state.world_size or len(state.ranks),
            newest_step=newest.step if newest else None,
            summary=summary,
            verdict=verdict(summary, state.presence(), state.end, len(state.ranks) >= state.world_size),
            end=state.end,
            status=state.status,
            dropped=sum(rank.dropped for rank in state.ranks.values()),
            timeline=self.timeline(newest, state) if newest else None,
            ranks=tuple(_rank_row(state, rank, summary) for rank in state.ranks.values()),
            devices=device_rows(state),
            history=_history(state),
        )

    def timeline(self, view: StepView, state: RunState) -> Timeline:
        """A step's timeline, with as many comm rows as any before it had."""
        timeline = timeline_of(view, state.ranks, self._comm_rows)
        self._comm_rows = timeline.comm_rows
        return timeline

    def summary(self, state: RunState, at_rest: bool = False) -> Summary:
        """Figures over the newest steps; anew twice a second by the state's clock, or at once where it stands still."""
        recent = state.recent()
        key = (recent[-1].step, len(recent), len(state.ranks)) if recent else ()
        due = at_rest or not 0 <= state.now_ns - self._at_ns < SUMMARY_NS or len(recent) < ENOUGH_STEPS
        if key != self._key and due:
            self._key, self._at_ns = key, state.now_ns
            self._summary = self._summariser.summarise(recent)
        return self._summary


def paused_overview(frozen: Overview, now: Overview, timeline: Timeline | None) -> Overview:
    """The overview as it was when the view was paused, on another step, with the header's counters of now."""
    return replace(
        frozen, link=now.link, newest_step=now.newest_step, end=now.end, timeline=timeline or frozen.timeline
    )


def device_rows(state: RunState) -> tuple[DeviceRow, ...]:
    """The newest sample per device, GPUs before hosts."""
    rows = [DeviceRow(samples[-1], _utilisation(samples)) for samples in state.devices.values() if samples]
    return tuple(sorted(rows, key=lambda row: (row.device.kind != "cuda", row.device.host, row.device.index)))


def _utilisation(samples: Sequence[Device]) -> tuple[tuple[int, float], ...]:
    """By whole seconds, so that it changes once a second however often samples come."""
    newest = samples[-1].at_ns // 1_000_000_000
    by_age: dict[int, list[float]] = {}
    for sample in samples:
        age = newest - sample.at_ns // 1_000_000_000
        if sample.utilization is not None and 0 < age <= HISTORY_S:
            by_age.setdefault(age, []).append(sample.utilization)
    return tuple((age, sum(values) / len(values)) for age, values in sorted(by_age.items(), reverse=True))


def _history(state: RunState) -> tuple[HistoryPoint, ...]:
    views = [view for view in list(state.steps.values())[-HISTORY_STEPS:] if view.counted]
    return tuple(_history_point(view) for view in views)


def _history_point(view: StepView) -> HistoryPoint:
    exposed = [row.exposed_ns for row in view.figures.values() if row.exposed_ns is not None]
    longest = max(step.duration_ns for step in view.ranks.values())
    return HistoryPoint(view.step, longest, max(exposed, default=None))


def _rank_row(state: RunState, rank: RankState, summary: Summary) -> RankRow:
    text, severity = rank_status(state, rank)
    return RankRow(
        rank=rank.rank,
        host=rank.hello.host if rank.hello else "",
        pid=rank.hello.pid if rank.hello else None,
        status=text,
        severity=severity,
        step=rank.last_step.step if rank.last_step else None,
        dropped=rank.dropped,
        summary=summary.ranks.get(rank.rank, RankSummary(rank.rank)),
        slowest=summary.slowest is not None and summary.slowest.rank == rank.rank,
    )


def rank_status(state: RunState, rank: RankState) -> tuple[str, str]:
    """What a rank is doing, in words, and how bad that is (a style name)."""
    status = state.status_of(rank.rank)
    if rank.bye is not None:
        return end_words(rank.bye)
    if status is RankStatus.SILENT:
        return f"silent {(state.now_ns - rank.seen_ns) / 1e9:.0f} s", "bad"
    if status is RankStatus.WAITING and rank.beat is not None:
        waited = (rank.beat.at_ns - rank.beat.since_ns) / 1e9
        return f"waiting {waited:.0f} s{_in_flight(rank.beat.in_flight, ' for')}", "warn"
    return "running", "good"


def end_words(bye: Bye) -> tuple[str, str]:
    """How a rank ended, and how bad that is."""
    if bye.reason == "finished":
        return "ended: finished", "dim"
    how = f"killed {bye.detail}" if bye.reason == "killed" else bye.reason
    where = f" in {bye.phase}" if bye.phase else ""
    return f"ended: {how}{where}{_in_flight(bye.in_flight, ',')}", "bad"


def _in_flight(buckets: Sequence[int], lead: str) -> str:
    if not buckets:
        return ""
    shown = ", ".join(str(bucket) for bucket in buckets[:4]) + (" …" if len(buckets) > 4 else "")
    return f"{lead} bucket{'s' if len(buckets) > 1 else ''} {shown}"
