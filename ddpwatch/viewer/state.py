"""RunState: all that a viewer knows of a run, built from its frames, in bounded memory.

Live views and replays feed the same frames to the same `RunState.apply_message`. The state's clock is the receive time
of its newest frame, so a replayed run goes silent, waits and ends exactly as the live one did.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import ClockDomains
from ddpwatch.analysis.device_samples import DeviceSamples
from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.incident import Incident, LostTime
from ddpwatch.analysis.diagnosis.words.account_names import rank_seconds
from ddpwatch.analysis.diagnosis.words.turned_off import TurnedOff
from ddpwatch.analysis.diagnosis.words.verdict import Verdict, verdict, with_unseen
from ddpwatch.analysis.diagnosis.words.why_unwatched import forwards_known
from ddpwatch.analysis.explain.explanation import Explanations
from ddpwatch.analysis.figures import GoodputFigures, ThroughputFigures
from ddpwatch.analysis.goodput import goodput
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.kept_steps import KeptSteps
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.analysis.means import ENOUGH_FULL
from ddpwatch.analysis.memory import Memory
from ddpwatch.analysis.retention import KEEP_MARKS
from ddpwatch.analysis.run import Run
from ddpwatch.analysis.step import missing_steps
from ddpwatch.analysis.window import Summary
from ddpwatch.sampling.cost import CostMeter
from ddpwatch.sampling.levels import is_timed
from ddpwatch.wire.messages import (
    Beat,
    Bye,
    ClockExchange,
    Device,
    DeviceKey,
    Hello,
    Mark,
    Message,
    Node,
    NodeStep,
    RankSample,
    Status,
    Step,
    sends_no_more,
)

__all__ = ["RankState", "RankStatus", "RunState", "StepAcrossRanks"]

KEEP_DEVICE_SAMPLES = 65_536  # of all devices, some 1 kB each
SILENT_NS = 3_000_000_000
STALE_NS = 10_000_000_000  # older figures are not shown as of now: "–" in plain lines, faint in the dashboard
STALE_STEPS = 2  # as long, where steps take longer than that
WAITING_NS = 1_000_000_000


class Stale(NamedTuple):
    """Which figures are too old to be shown as of now.

    Attributes:
        steps: Those that every step has: how long it takes.
        timed: Those that only steps with timed collectives have: overlap, and what is exposed.
    """

    steps: bool = False
    timed: bool = False


class RankStatus(str, Enum):
    """What a rank is doing, as far as its frames show."""

    RUNNING = "running"
    WAITING = "waiting"  # for other ranks, in a collective, for longer than a second
    SILENT = "silent"  # no sign of life for three seconds
    UNSEEN = "unseen"  # nothing comes from its host's agent
    ENDED = "ended"


@dataclass(slots=True)
class RankState:
    """One rank.

    Attributes:
        last_step: Its newest one, by its own count.
        sample: What the operating system denied it in the last second.
        seen_ns: Receive time of its newest frame.
        first_beat: Its oldest one that came here.
        dropped: Frames that it dropped itself.
        missing: Steps that it sent and that never came, for example to a collector that died.
    """

    rank: int
    hello: Hello | None = None
    beat: Beat | None = None
    first_beat: Beat | None = None
    bye: Bye | None = None
    last_step: Step | None = None
    sample: RankSample | None = None
    seen_ns: int = 0
    dropped: int = 0
    missing: int = 0

    @property
    def watched(self) -> bool:
        """Whether steps of it may still come."""
        return self.bye is None and (self.beat is None or not sends_no_more(self.beat))


@dataclass(slots=True)
class RunState:
    """The state of a run after the frames so far.

    Attributes:
        now_ns: Receive time of the newest frame (ns since the Unix epoch); 0 before the first.
        version: Grows with every frame. A picture drawn at another version is stale.
        nodes: The run's nodes, by number, as the root saw them last; empty if it has only one collector.
        groups: The process groups.
        diagnosis: What is wrong with the run, and where its time goes.
        clocks: The ranks' clocks; of several, the steps that all ranks have sent are on one time line where possible.
        layouts: By module, group and epoch.
        explanations: Why ranks are late, as far as somebody has asked.
        memory: What ranks use.
        off: What ddpwatch has stopped seeing.
        end: The collector's goodbye, once the run is over.
    """

    run_id: str = ""
    now_ns: int = 0
    first_ns: int = 0
    version: int = 0
    frames: int = 0
    nodes: dict[int, Node] = field(default_factory=dict)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=KEEP_MARKS))
    ends: deque[Bye] = field(default_factory=lambda: deque(maxlen=100))
    off: TurnedOff = field(default_factory=TurnedOff)
    status: Status | None = None
    end: Bye | None = None
    cost: CostMeter = field(default_factory=CostMeter)
    _device_samples: DeviceSamples[Device] = field(
        default_factory=lambda: DeviceSamples(KEEP_DEVICE_SAMPLES, lambda _: 1)
    )
    groups: Groups = field(init=False)
    layouts: Layouts = field(init=False)
    clocks: ClockDomains = field(init=False)
    diagnosis: Diagnosis = field(init=False)
    explanations: Explanations = field(init=False)
    memory: Memory = field(init=False)
    _run: Run = field(init=False)
    _kept: KeptSteps = field(default_factory=KeptSteps)
    _ranks: dict[int, RankState] = field(default_factory=dict)
    _in_order: bool = True  # the ranks are
    _unseen: set[int] = field(default_factory=set)  # ranks
    _forwards: bool | None = False
    _restarts_before: int = 0
    _stepped_ns: int = 0  # when the newest step came
    _timed_ns: int = 0

    def __post_init__(self) -> None:
        self._run = run = Run(kept=self._kept)
        self.groups, self.layouts, self.clocks, self.diagnosis = run.groups, run.layouts, run.clocks, run.diagnosis
        self.explanations, self.memory = run.explanations, run.memory

    @property
    def steps(self) -> OrderedDict[int, StepAcrossRanks]:
        """The newest steps by number, oldest first."""
        return self._kept.by_number

    @property
    def ranks(self) -> dict[int, RankState]:
        """The ranks seen, in ascending order."""
        if not self._in_order:
            self._ranks, self._in_order = dict(sorted(self._ranks.items())), True
        return self._ranks

    @property
    def devices(self) -> Mapping[DeviceKey, Sequence[Device]]:
        """The newest samples of each device, oldest first."""
        return self._device_samples.by_device

    @property
    def world_size(self) -> int:
        """Ranks of the job; 0 while unknown."""
        return self.groups.world_size

    def apply_message(self, message: Message, received_ns: int, frame: bytes = b"") -> None:
        """Takes one message, and the frame that it came in, if that is known.

        Never raises on a valid message, in whatever order they come.
        """
        self.now_ns = max(self.now_ns, received_ns)
        self.first_ns = self.first_ns or received_ns
        self.version += 1
        self.frames += 1
        self._run.apply_message(message, received_ns, frame)
        if isinstance(message, Step):  # nearly all are
            self._apply_step(message, received_ns)
        elif isinstance(message, Device):
            self._device_samples.add_sample(message.key, message, received_ns)
        elif isinstance(message, Status):
            if self.status is None:
                self._restarts_before = message.restarts
            self.status = message
            self.cost.add_status(message)
        elif isinstance(message, Node):
            self._apply_node(message)
        elif isinstance(message, Mark):
            self.marks.append(message)
            self.off.apply_message(message)
        elif isinstance(message, RankSample):  # from the collector: no sign of life
            self._rank(message.rank).sample = message
        elif isinstance(message, Bye) and message.rank is None:
            self.end = message
            deque(self._run.rest(), maxlen=0)
        elif isinstance(message, (ClockExchange, NodeStep)):
            pass  # nothing else of a ping; what is packed is expanded where frames are read (`wire.node_step.read`)
        elif message.rank is not None:
            self._apply_rank(self._rank(message.rank), message, received_ns)

    def _rank(self, rank: int) -> RankState:
        found = self._ranks.get(rank)
        if found is None:
            self._in_order = self._in_order and (not self._ranks or rank > next(reversed(self._ranks)))
            found = self._ranks[rank] = RankState(rank)
        return found

    def _apply_rank(self, rank: RankState, message: Message, received_ns: int) -> None:
        rank.seen_ns = received_ns
        if isinstance(message, (Beat, Bye)):
            self._forwards = forwards_known(self._forwards, message)
        if isinstance(message, Beat):
            rank.beat, rank.dropped = message, message.dropped
            rank.first_beat = rank.first_beat or message
        elif isinstance(message, Hello):
            self._apply_hello(rank, message)
        elif isinstance(message, Bye):
            rank.bye = message
            self.ends.append(message)

    def _apply_node(self, node: Node) -> None:
        """Takes a node's ranks for unseen from now on, or for back."""
        before = self.nodes.get(node.node)
        for rank in () if before is None else before.ranks:
            self._unseen.discard(rank)
        self.nodes[node.node] = node
        if not node.connected:
            self._unseen.update(node.ranks)

    def _apply_hello(self, rank: RankState, hello: Hello) -> None:
        rank.hello, rank.bye = hello, None
        self.run_id = hello.run_id or self.run_id

    def _apply_step(self, step: Step, received_ns: int) -> None:
        rank = self._rank(step.rank)
        rank.seen_ns = self._stepped_ns = received_ns
        if is_timed(step.status):
            self._timed_ns = received_ns
        rank.missing += missing_steps(rank.last_step, step)
        rank.last_step, rank.dropped = step, max(rank.dropped, step.dropped)
        self.cost.add_step(step)

    # -- reading ---------------------------------------------------------------------------------------------

    def status_of(self, rank: int) -> RankStatus:
        """Returns what the rank is doing, by the state's own clock."""
        state = self.ranks[rank]
        if state.bye is not None:
            return RankStatus.ENDED
        if rank in self._unseen:
            return RankStatus.UNSEEN
        if self.now_ns - state.seen_ns > SILENT_NS:
            return RankStatus.SILENT
        beat = state.beat
        if beat is not None and beat.phase == "sync" and beat.at_ns - beat.since_ns > WAITING_NS:
            return RankStatus.WAITING
        return RankStatus.RUNNING

    def throughput(self, step_ns: float | None) -> ThroughputFigures | None:
        """Returns what the newest steps get done, given what they take; None if nothing is counted."""
        return self._run.throughput.figures(step_ns, newest=True)

    def goodput(self) -> GoodputFigures | None:
        """Returns the share of the rank-time that steps took so far; None before the first."""
        time = self._run.time()
        return None if time is None else goodput([(self.run_id, time)])

    def verdict(self, summary: Summary, incidents: Sequence[Incident], lost: LostTime | None = None) -> Verdict:
        """Returns what matters most now, given the figures of the newest steps, all incidents, and what is lost."""
        about = (len(self.ranks), self.end, self.world_size, self.finished_steps, self._forwards, self._issued())
        found = verdict(summary, incidents, *about, lost or self.diagnosis.lost())
        if self.end is None and (unseen := self.unseen):
            return with_unseen(found, unseen)
        return found

    def stale(self, step_ns: float | None) -> Stale:
        """Returns which figures are too old, given what a step takes; none once the run is over."""
        limit = max(STALE_NS, STALE_STEPS * (step_ns or 0.0))
        ages = (self.now_ns - at_ns for at_ns in (self._stepped_ns, self._timed_ns))
        return Stale() if self.end is not None else Stale(*(age > limit for age in ages))

    def _issued(self) -> bool | None:
        """Returns whether a rank's watched groups have issued collectives since its first heartbeat.

        None if unknown.
        """
        if self.off.has("collectives"):
            return None
        beats = [(one.first_beat, one.beat) for one in self.ranks.values() if one.beat is not one.first_beat]
        counts = [(first.issued, last.issued) for first, last in beats if first is not None and last is not None]
        rose = [last > first for first, last in counts if first is not None and last is not None]
        return any(rose) if rose else None

    @property
    def unseen(self) -> frozenset[int]:
        """The ranks of nodes that are not connected and have not ended."""
        return frozenset(rank for rank in self._unseen if rank in self.ranks and self.ranks[rank].bye is None)

    @property
    def finished_steps(self) -> int:
        """How many steps the rank that is furthest has taken."""
        return max((rank.last_step.step + 1 for rank in self.ranks.values() if rank.last_step is not None), default=0)

    @property
    def dropped(self) -> int:
        """Frames that ranks and agents dropped, as they say themselves."""
        ranks = sum(rank.dropped for rank in self.ranks.values())
        return ranks + sum(node.dropped for node in self.nodes.values())

    @property
    def unit(self) -> str:
        """What rank-time is counted in."""
        return rank_seconds(next((rank.hello.timing_source for rank in self.ranks.values() if rank.hello), None))

    @property
    def missing_steps(self) -> int | None:
        """Steps of all ranks that never came. None if the collector had been started again before this viewer came."""
        if self._restarts_before:
            return None
        return sum(rank.missing for rank in self.ranks.values())

    def newest_step(self) -> StepAcrossRanks | None:
        """Returns the newest step that every rank has sent that is still watched.

        If there is none, the newest of all.
        """
        alive = {rank for rank, state in self.ranks.items() if state.watched} or set(self.ranks)
        for across in reversed(self.steps.values()):
            if alive <= across.members:
                return across
        return next(reversed(self.steps.values()), None)

    def window(self) -> list[StepAcrossRanks]:
        """Returns the `recent` steps and all ordinary ones between them, oldest first."""
        recent = self.recent()
        since = recent[0].step if recent else 0
        steps = takewhile(lambda across: across.step >= since, reversed(self.steps.values()))
        return [across for across in steps if self._is_whole(across) and across.ordinary][::-1]

    def recent(self, count: int = 50) -> list[StepAcrossRanks]:
        """Returns the `newest` steps that count and that every rank has sent that was still watched then."""
        steps = reversed(self.steps.values())
        return newest(count, (across for across in steps if across.counted and self._is_whole(across)))

    def _is_whole(self, across: StepAcrossRanks) -> bool:
        """Returns whether no rank is missing that was still watched then."""
        if len(across) >= len(self.ranks):
            return True
        missing = (state for rank, state in self.ranks.items() if rank not in across.members)
        return all(not state.watched and self._run.newest.get(state.rank, -1) < across.step for state in missing)


def newest(count: int, steps: Iterable[StepAcrossRanks]) -> list[StepAcrossRanks]:
    """Returns the newest ``count`` steps, and older full ones up to `ENOUGH_FULL` of these; oldest first.

    Args:
        count: How many.
        steps: Newest first.
    """
    found: list[StepAcrossRanks] = []
    full = 0
    for across in steps:
        if len(found) < count or across.full:
            found.append(across)
            full += across.full
        if len(found) >= count and full >= ENOUGH_FULL:
            break
    return found[::-1]
