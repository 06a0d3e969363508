"""What the views draw: one frozen `Overview`, built from the run's state and from what the user has selected.

All arithmetic ends here or in `ddpwatch.analysis`; paint functions only place what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import overload

from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS
from ddpwatch.analysis.diagnosis.verdict import Verdict, verdict
from ddpwatch.analysis.window import RankSummary, Summariser, Summary
from ddpwatch.messages import Bye, Device, Hello, Status
from ddpwatch.sampling.cost import Cost
from ddpwatch.state import RankState, RankStatus, RunState, StepAcrossRanks
from ddpwatch.tui.models.history import HistoryPoint, StepHistory
from ddpwatch.tui.models.lanes import Timeline, timeline_of
from ddpwatch.tui.rank_filter import parse_filter

HISTORY_S = 120
LOOK_BACK = 130  # steps: at least one of every 64 is recorded in full
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
    """How the feed stands, and what belongs to it: a directory looked in, a job waited for, a name, a replay's speed.

    ``ended_min`` is how many minutes ago the run ended, where it had ended before it was looked at. ``position_s`` and
    ``length_s`` are a replay's, in whole seconds.
    """

    link: Link = Link.WAITING
    name: str = ""
    directory: str = ""
    job: str = ""
    speed: float = 1.0
    paused: bool = False
    replay: bool = False
    position_s: int = 0
    length_s: int = 0
    loop: bool = False
    ended_min: int | None = None

    @property
    def stale(self) -> bool:
        """Whether what is drawn is no longer fed."""
        return self.link is Link.GONE or (self.link is Link.ENDED and not self.replay)


@dataclass(frozen=True, slots=True)
class RankLine:
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


History = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """The newest sample of one device.

    Attributes:
        history: Its mean utilisation in each of the last `HISTORY_S` whole seconds, as (age in s, %), oldest first.
        memory, power: Likewise, in percent of what there is and of the limit.
        ranks: The ranks that run on it.
    """

    device: Device
    history: History = ()
    memory: History = ()
    power: History = ()
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that the overview draws."""

    link: LinkState = LinkState()
    run_id: str = ""
    hello: Hello | None = None
    world_size: int = 0
    newest_step: int | None = None
    summary: Summary = field(default_factory=Summary)
    cost: Cost | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict("starting", "none", ""))
    end: Bye | None = None
    status: Status | None = None
    dropped: int = 0
    timeline: Timeline | None = None
    ranks: Sequence[RankLine] = ()
    devices: tuple[DeviceLine, ...] = ()
    history: tuple[HistoryPoint, ...] = ()
    filter: str = ""
    following: bool = False


class RankLines(Sequence[RankLine]):
    """The rank table's lines; each is made when it is looked at."""

    def __init__(self, state: RunState, ranks: Sequence[int], summary: Summary) -> None:
        self._state = state
        self._ranks = ranks
        self._summary = summary
        self._made: dict[int, RankLine] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    @overload
    def __getitem__(self, index: int) -> RankLine: ...
    @overload
    def __getitem__(self, index: slice) -> list[RankLine]: ...
    def __getitem__(self, index: int | slice) -> RankLine | list[RankLine]:
        """Lines by position."""
        if isinstance(index, slice):
            return [self._row(rank) for rank in self._ranks[index]]
        return self._row(self._ranks[index])

    def _row(self, rank: int) -> RankLine:
        if rank not in self._made:
            self._made[rank] = _rank_row(self._state, self._state.ranks[rank], self._summary)
        return self._made[rank]


class OverviewBuilder:
    """Builds overviews of one state. Keeps the summary until a further step is complete."""

    def __init__(self) -> None:
        self._comm_rows = 1
        self._key: tuple[int, ...] = ()
        self._summary = Summary()
        self._cost: Cost | None = None
        self._summariser = Summariser()
        self._history = StepHistory()
        self._at_ns = 0

    def build(self, state: RunState, link: LinkState, wanted: str = "") -> Overview:
        """The overview as of now, with the newest step in its timeline, of the ranks that a filter lets through."""
        hellos = [rank.hello for rank in state.ranks.values() if rank.hello is not None]
        newest, shown = state.newest_step(), pictured(state)
        summary = self.summary(state, at_rest=link.stale or (link.replay and link.link is Link.ENDED))
        return Overview(
            link=link,
            run_id=state.run_id or link.name,
            hello=hellos[0] if hellos else None,
            world_size=state.world_size or len(state.ranks),
            newest_step=newest.step if newest else None,
            summary=summary,
            cost=self._cost,
            verdict=judge(state, summary),
            end=state.end,
            status=state.status,
            dropped=sum(rank.dropped for rank in state.ranks.values()),
            timeline=self.timeline(shown, state, wanted) if shown else None,
            ranks=RankLines(state, self.shown(state, state.ranks, wanted), summary),
            devices=device_rows(state),
            history=self._history.points(list(state.steps.values()), len(state.ranks)),
            filter=wanted,
        )

    def shown(self, state: RunState, ranks: Iterable[int], wanted: str) -> list[int]:
        """Those of the ranks that a filter lets through, in order."""
        test = parse_filter(wanted)
        if test is None:
            return sorted(ranks)
        return [
            rank for rank in sorted(ranks) if rank in state.ranks and test(state.ranks[rank], state.status_of(rank))
        ]

    def timeline(self, view: StepAcrossRanks, state: RunState, wanted: str = "") -> Timeline:
        """A step's timeline, with as many comm rows as any before it had."""
        shown = set(self.shown(state, view.members, wanted)) if wanted else None
        timeline = timeline_of(view, state.ranks, self._comm_rows, shown, state.marks)
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
            self._cost = state.cost.cost()
        return self._summary


def pictured(state: RunState) -> StepAcrossRanks | None:
    """The step to show while nobody has chosen one: the newest with timed collectives, unless that is long ago."""
    newest = state.newest_step()
    if newest is None or newest.timed:
        return newest
    newer = (view for view in islice(reversed(state.steps.values()), LOOK_BACK) if view.step < newest.step)
    return next((view for view in newer if view.timed and view.members >= newest.members), newest)


def judge(state: RunState, summary: Summary) -> Verdict:
    """What is to be said about a run first."""
    return verdict(summary, state.presence(), state.end, len(state.ranks) >= state.world_size, state)


def paused_overview(frozen: Overview, now: Overview, timeline: Timeline | None) -> Overview:
    """The overview as it was when the view was paused, on another step, with the header's counters of now."""
    return replace(
        frozen, link=now.link, newest_step=now.newest_step, end=now.end, timeline=timeline or frozen.timeline
    )


def device_rows(state: RunState) -> tuple[DeviceLine, ...]:
    """The newest sample per device, GPUs before hosts."""
    places: dict[tuple[str, str], set[int]] = {}
    for rank in state.ranks.values():
        if rank.hello is not None:
            places.setdefault((rank.hello.host, rank.hello.device_uuid), set()).add(rank.rank)
            places.setdefault((rank.hello.host, ""), set()).add(rank.rank)
    rows = [_device_row(samples, places) for samples in state.devices.values() if samples]
    return tuple(sorted(rows, key=lambda row: (row.device.kind != "cuda", row.device.host, row.device.index)))


def _device_row(samples: Sequence[Device], places: Mapping[tuple[str, str], set[int]]) -> DeviceLine:
    newest = samples[-1]
    known = newest.kind != "cuda" or bool(newest.uuid)
    ranks = places.get((newest.host, newest.uuid if newest.kind == "cuda" else ""), set()) if known else set()
    return DeviceLine(
        newest,
        _by_age(samples, lambda sample: sample.utilization),
        _by_age(samples, lambda sample: _share(sample.memory_used, sample.memory_total)),
        _by_age(samples, lambda sample: _share(sample.power_w, sample.power_limit_w)),
        frozenset(ranks),
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def _by_age(samples: Sequence[Device], read: Callable[[Device], float | None]) -> History:
    """By whole seconds, so that it changes once a second however often samples come."""
    newest = samples[-1].at_ns // 1_000_000_000
    by_age: dict[int, list[float]] = {}
    for sample in samples:
        age, value = newest - sample.at_ns // 1_000_000_000, read(sample)
        if value is not None and 0 < age <= HISTORY_S:
            by_age.setdefault(age, []).append(value)
    return tuple((age, sum(values) / len(values)) for age, values in sorted(by_age.items(), reverse=True))


def _rank_row(state: RunState, rank: RankState, summary: Summary) -> RankLine:
    text, severity = rank_status(state, rank)
    return RankLine(
        rank=rank.rank,
        host=rank.hello.host if rank.hello else "",
        pid=rank.hello.pid if rank.hello else None,
        status=text,
        severity=severity,
        step=rank.last_step.step if rank.last_step else None,
        dropped=rank.dropped,
        summary=summary.ranks.get(rank.rank, RankSummary(rank.rank)),
        slowest=summary.straggler is not None and summary.straggler.rank == rank.rank,
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
