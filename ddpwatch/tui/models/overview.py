"""What every view draws of a run: one frozen `Overview`, built from the run's state and the user's choices.

All arithmetic ends here or in `ddpwatch.analysis`; paint functions only place what they are given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS
from ddpwatch.analysis.diagnosis.words.verdict import Verdict
from ddpwatch.analysis.diagnosis.words.why_unwatched import NOT_KNOWN, Why
from ddpwatch.analysis.diagnosis.words.wording import ACTIVITIES, LIVE_PHASES
from ddpwatch.analysis.figures import RankMemory, ThroughputFigures
from ddpwatch.analysis.step import buffer_waits
from ddpwatch.analysis.window import RankSummary, Summariser, Summary
from ddpwatch.common.units import NS_PER_S
from ddpwatch.sampling.cost import Cost
from ddpwatch.sampling.stillness import STILL_NS
from ddpwatch.tui.models.by_rank import ByRank
from ddpwatch.tui.models.devices import DeviceLine, DeviceLines
from ddpwatch.tui.models.history import HistoryPoint, StepHistory
from ddpwatch.tui.models.host_names import HostNames, host_names
from ddpwatch.tui.models.incidents import Diagnosed, struck
from ddpwatch.tui.models.lanes import StepLanes, step_lanes
from ddpwatch.tui.models.rank_filter import parse_filter
from ddpwatch.tui.models.verdict_facts import VerdictFacts, standstill_ns, stuck_ranks, verdict_facts
from ddpwatch.viewer.state import WAITING_NS, RankState, RankStatus, RunState, Stale, StepAcrossRanks
from ddpwatch.wire.messages import NO_LONGER_WATCHED, Beat, Bye, Hello, Status

SUMMARY_NS = 500_000_000


class Link(str, Enum):
    """The state of the feed."""

    WAITING = "waiting"
    ATTACHING = "attaching"
    LIVE = "live"
    GONE = "gone"
    REPLAY = "replay"
    SEEKING = "seeking"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LinkState:
    """The state of the feed, and its details.

    Attributes:
        name: The run's or the recording's name.
        directory: Where the feed looks for runs.
        job: The command that should start a run.
        why: Why nothing of it is watched yet.
        speed: A replay's speed in recorded seconds per second.
        position_s, length_s: A replay's, in whole seconds.
        ended_min: How many minutes ago the run ended, if it had ended before the dashboard attached.
        trouble: Why no frames come, if the feed knows.
    """

    link: Link = Link.WAITING
    name: str = ""
    directory: str = ""
    job: str = ""
    why: Why = NOT_KNOWN
    speed: float = 1.0
    paused: bool = False
    replay: bool = False
    position_s: int = 0
    length_s: int = 0
    loop: bool = False
    ended_min: int | None = None
    trouble: str = ""

    @property
    def stale(self) -> bool:
        """Whether the screen shows a live run that sends no more frames, or where a replay was before it jumped."""
        return self.link in (Link.GONE, Link.SEEKING) or (self.link is Link.ENDED and not self.replay)

    @property
    def at_rest(self) -> bool:
        """Whether no frame will come until the user does something."""
        return self.stale or (self.replay and self.link is Link.ENDED)


@dataclass(frozen=True, slots=True)
class RankLine:
    """One line of the rank table. All but ``summary`` comes from the rank's newest frames."""

    rank: int
    host: str
    pid: int | None
    status: str
    severity: str
    step: int | None
    dropped: int
    summary: RankSummary
    memory: RankMemory
    slowest: bool = False


@dataclass(frozen=True, slots=True)
class Overview:
    """What every view knows of the run. ``lanes`` is the step shown.

    Attributes:
        diagnosed: The run's incidents and lost time; in a replay those of the whole recording.
        groups: The numbers of each rank's process groups, by their ranks; empty if all ranks are in the same.
        facts: On the incident that the verdict is about.
        ended: Whether the run had ended when that was judged; ``end`` goes on in a pause.
        standstill_ns: In a hang, for how long no rank has finished a step; None if other groups go on.
        stale: Which figures of the summary are too old to be shown as of now.
        worst: The lines of ranks that a table starts with if not all fit, worst first.
        hosts: What the host of each rank is called; empty if all ranks are on one.
        unseen: The ranks of which nothing is known, because their host's agent is not connected.
        off: What ddpwatch has stopped seeing, in a few words.
        clock_error_ns: How far lateness may be off because hosts have clocks of their own; None on one clock.
        buffers: Whether ranks wait for DDP's buffers: that makes them late, and is no rank's own lateness.
        throughput: What the newest steps get done.
        now_ns: The receive time of the newest frame.
        in_log: Whether the Log shows it, with the incidents below.
    """

    link: LinkState = LinkState()
    run_id: str = ""
    hello: Hello | None = None
    world_size: int = 0
    parallelism: str = ""
    newest_step: int | None = None
    summary: Summary = field(default_factory=Summary)
    cost: Cost | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict("starting", "none", ""))
    facts: VerdictFacts | None = None
    standstill_ns: int | None = None
    stale: Stale = field(default_factory=Stale)
    diagnosed: Diagnosed = field(default_factory=Diagnosed)
    end: Bye | None = None
    ended: bool = False
    status: Status | None = None
    dropped: int = 0
    missing_steps: int | None = 0
    lanes: StepLanes | None = None
    ranks: Sequence[RankLine] = ()
    worst: Sequence[RankLine] = ()
    devices: tuple[DeviceLine, ...] = ()
    history: tuple[HistoryPoint, ...] = ()
    filter: str = ""
    following: bool = False
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    unseen: frozenset[int] = frozenset()
    off: str = ""
    clock_error_ns: int | None = None
    buffers: bool = False
    throughput: ThroughputFigures | None = None
    now_ns: int = 0
    in_log: bool = False

    @property
    def slowest(self) -> Incident | None:
        """The late rank that costs most at the moment."""
        return self.diagnosed.slowest


def rank_lines(
    state: RunState, ranks: Sequence[int], hosts: HostNames, summary: Summary, diagnosed: Diagnosed
) -> ByRank[RankLine]:
    """Returns the rank table's lines."""
    blamed, stuck = diagnosed.slowest.ranks[0] if diagnosed.slowest else None, stuck_ranks(diagnosed.incidents)

    def line(rank: int) -> RankLine:
        known = state.ranks[rank]
        status = rank_status(state, known, stuck)
        host = hosts.of_rank.get(rank, "")
        return _rank_line(known, host, status, summary, state.memory.of_rank(rank), rank == blamed)

    return ByRank(ranks, line)


class OverviewBuilder:
    """Builds overviews of one state. Renews the summary and the diagnosis at most twice a second."""

    def __init__(self) -> None:
        self._comm_rows = 1
        self._key: tuple[int, ...] = ()
        self._summary = Summary()
        self._cost: Cost | None = None
        self._summariser = Summariser()
        self._history = StepHistory()
        self._devices = DeviceLines()
        self._at_ns = 0
        self._diagnosed = Diagnosed()
        self._diagnosed_at: tuple[int, int, Bye | None] = (-1, 0, None)  # the state's version and time, the last end

    def build(
        self, state: RunState, link: LinkState, filter_text: str = "", whole: Diagnosed | None = None
    ) -> Overview:
        """Returns the present overview, of the ranks that the filter selects; its lanes are the step to show.

        ``whole`` is the diagnosis of the whole recording, if there is one: what ranks cost in it orders the worst.
        """
        hellos = [rank.hello for rank in state.ranks.values() if rank.hello is not None]
        newest, summary = state.newest_step(), self.summary(state, link.at_rest)
        diagnosed = self.diagnosis(state, link.at_rest)
        verdict = state.verdict(summary, diagnosed.incidents, diagnosed.lost)
        shown = step_to_show(state, verdict.incident)
        if verdict.incident is not None and verdict.incident.open and verdict.incident.ranks:
            summary = summary.with_lateness_since(verdict.incident.since_step or 0)
        hosts = host_names(state)
        lines = rank_lines(state, filtered(state, state.ranks, filter_text), hosts, summary, diagnosed)
        return Overview(
            link=link,
            run_id=state.run_id or link.name,
            hello=hellos[0] if hellos else None,
            world_size=state.world_size or len(state.ranks),
            parallelism=state.groups.parallelism(),
            newest_step=newest.step if newest else None,
            now_ns=state.now_ns,
            summary=summary,
            cost=self._cost,
            verdict=verdict,
            facts=verdict_facts(verdict.incident, state, hosts),
            standstill_ns=standstill_ns(diagnosed.incidents, state),
            stale=state.stale(summary.step_ns),
            diagnosed=diagnosed,
            end=state.end,
            ended=state.end is not None,
            status=state.status,
            dropped=state.dropped,
            missing_steps=state.missing_steps,
            lanes=self.lanes(shown, state, filter_text) if shown else None,
            ranks=lines,
            worst=_worst(state, lines, verdict.ranks, (whole if whole and whole.whole else diagnosed).waited_for),
            devices=self._devices.build(state, hosts),
            history=self._history.points(list(state.steps.values()), len(state.ranks)),
            filter=filter_text,
            groups=_groups(state),
            hosts=hosts.of_rank if hosts.several else {},
            unseen=state.unseen,
            off=", ".join(off.label for off in state.off.found()),
            clock_error_ns=newest.skew.error if newest and state.clocks.several and newest.comparable else None,
            buffers=shown is not None and any(map(buffer_waits, islice(shown.ranks.values(), 1))),
            throughput=state.throughput(summary.step_ns),
        )

    def due(self, state: RunState) -> bool:
        """Returns whether the diagnosis has to be looked at again, by the state's clock."""
        _, at_ns, end = self._diagnosed_at
        return not 0 <= state.now_ns - at_ns < SUMMARY_NS or end is not _last_end(state)

    def diagnosis(self, state: RunState, at_rest: bool = False) -> Diagnosed:
        """Returns what is wrong with the run so far, renewed like the summary."""
        version = self._diagnosed_at[0]
        if version != state.version and (at_rest or self.due(state) or state.finished_steps < ENOUGH_STEPS):
            found = state.diagnosis
            self._diagnosed = Diagnosed(tuple(found.incidents()), found.lost(), found.slowest(), unit=state.unit)
            self._diagnosed_at = (state.version, state.now_ns, _last_end(state))
        return self._diagnosed

    def lanes(self, step: StepAcrossRanks, state: RunState, filter_text: str = "") -> StepLanes:
        """Returns a step's lanes, with at least as many comm rows as any step before it had."""
        shown = set(filtered(state, step.members, filter_text)) if filter_text else None
        lanes = step_lanes(step, state.ranks, self._comm_rows, shown, state.marks)
        self._comm_rows = lanes.comm_rows
        return lanes

    def summary(self, state: RunState, at_rest: bool = False) -> Summary:
        """Returns figures over the newest steps, renewed twice a second by the state's clock, or at once at rest."""
        steps = state.window()
        key = (steps[-1].step, len(steps), len(state.ranks)) if steps else ()
        due = at_rest or not 0 <= state.now_ns - self._at_ns < SUMMARY_NS or len(steps) < ENOUGH_STEPS
        if key != self._key and due:
            self._key, self._at_ns = key, state.now_ns
            self._summary = self._summariser.summarise(steps)
            self._cost = state.cost.cost()
        return self._summary


def _last_end(state: RunState) -> Bye | None:
    """Returns the end of the run, or of the last rank that ended: what it caused is shown at once."""
    return state.end or (state.ends[-1] if state.ends else None)


def _groups(state: RunState) -> dict[int, tuple[int, ...]]:
    """Returns the process groups of each rank; empty if there is only one."""
    known = sorted(state.groups.known(), key=lambda group: group.ranks)
    if len(known) < 2:
        return {}
    numbers = {group.id: number for number, group in enumerate(known)}
    found = {rank: tuple(sorted(numbers.get(key, 0) for key in state.groups.of_rank(rank))) for rank in state.ranks}
    return found if len(set(found.values())) > 1 else {}


def filtered(state: RunState, ranks: Iterable[int], filter_text: str) -> list[int]:
    """Returns those of the ranks that the filter selects, in order."""
    test = parse_filter(filter_text)
    if test is None:
        return sorted(ranks)
    return [rank for rank in sorted(ranks) if rank in state.ranks and test(state.ranks[rank], state.status_of(rank))]


def step_to_show(state: RunState, incident: Incident | None = None) -> StepAcrossRanks | None:
    """Returns the step to show while the user has chosen none.

    Of those that the incident has struck so far, if it lasts, the newest with timed collectives, else the newest that
    is watched in part. Else the newest of all with timed collectives, unless that is long ago.
    """
    newest = state.newest_step()
    if newest is None:
        return None
    # At least one of every 64 is recorded in full
    newer = islice(reversed(state.steps.values()), 130)
    steps = [step for step in newer if step.step <= newest.step and step.members >= newest.members]
    ill = struck(incident, newest.step) if incident is not None and incident.open else ()
    hit = [step for step in steps if step.counted and step.step in ill]
    timed = next((step for step in hit or steps if step.timed), None)
    return timed or (hit or [newest])[0]


def paused_overview(frozen: Overview, now: Overview, lanes: StepLanes | None) -> Overview:
    """Returns the overview as it was at the pause, with another step's lanes and the header's present counters."""
    return replace(frozen, link=now.link, newest_step=now.newest_step, end=now.end, lanes=lanes or frozen.lanes)


def _worst(
    state: RunState, lines: ByRank[RankLine], named: Sequence[int], cost: Mapping[int, int]
) -> tuple[RankLine, ...]:
    """Returns the ranks that the verdict names, those of which nothing comes or that failed, and those waited for."""
    order = [*sorted(named, key=lambda rank: -cost.get(rank, 0)), *filter(partial(_troubled, state), lines.ranks)]
    order += sorted(cost, key=lambda rank: -cost[rank])
    shown = set(lines.ranks)
    # Ranks that a table may begin with
    return tuple(lines.of(rank) for rank in islice(filter(shown.__contains__, dict.fromkeys(order)), 64))


def _troubled(state: RunState, rank: int) -> bool:
    bye = state.ranks[rank].bye
    return state.status_of(rank) in (RankStatus.SILENT, RankStatus.UNSEEN) if bye is None else bye.reason != "finished"


def lines_shown(model: Overview, first: int | None, room: int) -> Sequence[RankLine]:
    """Returns so many lines from the ``first`` on; for None, the worst first if not all fit."""
    if first is None and len(model.ranks) > room:
        named = {line.rank for line in model.worst}
        others = (line for line in model.ranks if line.rank not in named)
        return [*model.worst[:room], *islice(others, max(room - len(model.worst), 0))]
    start = min(max(first or 0, 0), max(len(model.ranks) - room, 0))
    return model.ranks[start : start + room]


def _rank_line(
    rank: RankState, host: str, status: tuple[str, str], summary: Summary, memory: RankMemory, blamed: bool
) -> RankLine:
    text, severity = status
    return RankLine(
        rank=rank.rank,
        host=host,
        pid=rank.hello.pid if rank.hello else None,
        status=text,
        severity=severity,
        step=rank.last_step.step if rank.last_step else None,
        dropped=rank.dropped,
        summary=summary.ranks.get(rank.rank, RankSummary(rank.rank)),
        memory=memory,
        slowest=blamed,
    )


def rank_status(state: RunState, rank: RankState, stuck: Collection[int] = ()) -> tuple[str, str]:
    """Returns what a rank is doing, as a text and its style; ``stuck`` are those that hold up the others."""
    status = state.status_of(rank.rank)
    if rank.bye is not None:
        return end_text(rank.bye)
    if status is RankStatus.UNSEEN:
        return "unseen: its host is not connected", "warn"
    if status is RankStatus.SILENT:
        return f"silent {(state.now_ns - rank.seen_ns) / 1e9:.0f} s", "bad"
    if rank.rank in stuck and rank.beat is not None:
        return " ".join(filter(None, ("stuck", _place(rank.beat), f"{_since_s(rank.beat):.0f} s"))), "bad"
    if not rank.watched:
        return ACTIVITIES[NO_LONGER_WATCHED], "warn"
    if rank.beat is not None and rank.beat.activity and _since_s(rank.beat) * NS_PER_S > WAITING_NS:
        return f"{_place(rank.beat)} {_since_s(rank.beat):.0f} s", "warn"  # as a checkpoint that the others wait for
    if status is RankStatus.WAITING and rank.beat is not None:
        waited = (rank.beat.at_ns - rank.beat.since_ns) / 1e9
        return f"waiting {waited:.0f} s{_in_flight(rank.beat.in_flight, ' for')}", "warn"
    if stuck and rank.beat is not None and _since_s(rank.beat) * NS_PER_S > STILL_NS:  # in a bare step, for example
        return f"waiting {_since_s(rank.beat):.0f} s", "warn"
    return "running", "good"


def _since_s(beat: Beat) -> float:
    """Returns for how long a rank has been where `_place` says, as of its heartbeat."""
    return (beat.at_ns - (beat.activity_since_ns if beat.activity else beat.since_ns)) / 1e9


def _place(beat: Beat) -> str:
    if beat.activity:
        return ACTIVITIES.get(beat.activity, beat.activity)
    return LIVE_PHASES.get(beat.phase, f"in {beat.phase}" if beat.phase else "")


def end_text(bye: Bye) -> tuple[str, str]:
    """Returns how a rank ended, as a text and its style."""
    if bye.reason == "finished":
        return "ended: finished", "dim"
    how = f"killed {bye.detail}" if bye.reason == "killed" else bye.reason
    where = f" {LIVE_PHASES.get(bye.phase, f'in {bye.phase}')}" if bye.phase else ""
    return f"ended: {how}{where}{_in_flight(bye.in_flight, ',')}", "bad"


def _in_flight(buckets: Sequence[int], lead: str) -> str:
    if not buckets:
        return ""
    shown = ", ".join(str(bucket) for bucket in buckets[:4]) + (" …" if len(buckets) > 4 else "")
    return f"{lead} bucket{'s' if len(buckets) > 1 else ''} {shown}"
