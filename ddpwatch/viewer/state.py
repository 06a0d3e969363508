"""RunState: all that a viewer knows of a run, built from its frames, in bounded memory.

Live views and replays feed the same frames to the same `RunState.apply`. The state's clock is the receive time of its
newest frame, so a replayed run goes silent, waits and ends exactly as the live one did.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import ClockDomains
from ddpwatch.analysis.device_samples import DeviceSamples
from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.turned_off import TurnedOff
from ddpwatch.analysis.diagnosis.words.verdict import Verdict, verdict, with_unseen
from ddpwatch.analysis.diagnosis.words.why_unwatched import forwards_known
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.analysis.matching import NumberedStep, StepMatcher
from ddpwatch.analysis.step import missing_steps
from ddpwatch.analysis.window import Summary
from ddpwatch.sampling.cost import CostMeter
from ddpwatch.wire.messages import (
    Beat,
    Bye,
    ClockExchange,
    Device,
    DeviceKey,
    Group,
    Hello,
    Layout,
    Mark,
    Message,
    Node,
    NodeStep,
    RankSample,
    Status,
    Step,
    sends_no_more,
)

__all__ = ["KEEP_STEPS", "RankState", "RankStatus", "RunState", "StepAcrossRanks"]

KEEP_STEPS = 512
KEEP_RANK_STEPS = 65_536  # steps times ranks: what bounds memory in large jobs
KEEP_DECODED = 2_048  # steps times ranks; older frames are kept encoded
FULL_STEPS = 3  # at least: a figure that only full steps have must not rest on a single one
KEEP_FIGURES = 64  # steps; older figures are computed again on demand
KEEP_SAMPLES = 65_536  # of all devices, some 1 kB each
KEEP_MARKS = 1000
KEEP_ENDS = 100
SILENT_NS = 3_000_000_000
WAITING_NS = 1_000_000_000


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
        newest: Number of that among all ranks, which may count otherwise; -1 before the first.
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
    newest: int = -1
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
        steps: The newest steps by number, oldest first.
        nodes: The run's nodes, by number, as the root saw them last; empty if it has only one collector.
        groups: The process groups.
        diagnosis: What is wrong with the run, and where its time goes.
        clocks: The ranks' clocks; of several, the steps that all ranks have sent are on one time line where possible.
        layouts: By module, group and epoch.
        off: What ddpwatch has stopped seeing.
        end: The collector's goodbye, once the run is over.
    """

    run_id: str = ""
    groups: Groups = field(default_factory=Groups)
    now_ns: int = 0
    first_ns: int = 0
    version: int = 0
    frames: int = 0
    ranks: dict[int, RankState] = field(default_factory=dict)
    steps: OrderedDict[int, StepAcrossRanks] = field(default_factory=OrderedDict)
    layouts: Layouts = field(init=False)
    nodes: dict[int, Node] = field(default_factory=dict)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=KEEP_MARKS))
    ends: deque[Bye] = field(default_factory=lambda: deque(maxlen=KEEP_ENDS))
    off: TurnedOff = field(default_factory=TurnedOff)
    status: Status | None = None
    end: Bye | None = None
    clocks: ClockDomains = field(default_factory=ClockDomains)
    cost: CostMeter = field(default_factory=CostMeter)
    _device_samples: DeviceSamples[Device] = field(default_factory=lambda: DeviceSamples(KEEP_SAMPLES, lambda _: 1))
    _unseen: set[int] = field(default_factory=set)  # ranks
    _forwards: bool | None = False
    _undiagnosed: dict[int, StepAcrossRanks] = field(default_factory=dict)
    _restarts_before: int = 0
    diagnosis: Diagnosis = field(init=False)
    _matcher: StepMatcher = field(init=False)

    def __post_init__(self) -> None:
        self._matcher = StepMatcher(self.groups.members)
        self.layouts = Layouts(self.groups)
        self.diagnosis = Diagnosis(self.layouts, self.groups)

    @property
    def devices(self) -> Mapping[DeviceKey, Sequence[Device]]:
        """The newest samples of each device, oldest first."""
        return self._device_samples.by_device

    @property
    def world_size(self) -> int:
        """Ranks of the job; 0 while unknown."""
        return self.groups.world_size

    def apply(self, message: Message, received_ns: int) -> None:
        """Takes one message. Never raises on a valid message, in whatever order they come."""
        self.now_ns = max(self.now_ns, received_ns)
        self.first_ns = self.first_ns or received_ns
        self.version += 1
        self.frames += 1
        self.diagnosis.apply(message, received_ns)
        if isinstance(message, Step):  # nearly all are
            self._apply_step(message, received_ns)
        elif isinstance(message, Device):
            self._device_samples.add_sample(message.key, message, received_ns)
        elif isinstance(message, Status):
            if self.status is None:
                self._restarts_before = message.restarts
            self.status = message
        elif isinstance(message, ClockExchange):
            self.clocks.exchange(message)
        elif isinstance(message, Node):
            self._apply_node(message)
        elif isinstance(message, NodeStep):
            pass  # expanded where frames are read (`ddpwatch.wire.node_step.read`)
        elif isinstance(message, Mark):
            self.marks.append(message)
            self.off.apply(message)
        elif isinstance(message, RankSample):  # from the collector: no sign of life
            self._rank(message.rank).sample = message
        elif isinstance(message, Bye) and message.rank is None:
            self.end = message
            self._diagnose_rest()
        elif message.rank is not None:
            self._apply_rank(self._rank(message.rank), message, received_ns)

    def _rank(self, rank: int) -> RankState:
        if rank not in self.ranks:
            in_order = not self.ranks or rank > next(reversed(self.ranks))
            self.ranks[rank] = RankState(rank)
            if not in_order:
                self.ranks = dict(sorted(self.ranks.items()))
        return self.ranks[rank]

    def _apply_rank(self, rank: RankState, message: Message, received_ns: int) -> None:
        rank.seen_ns = received_ns
        if isinstance(message, (Beat, Bye)):
            self._forwards = forwards_known(self._forwards, message)
        if isinstance(message, Beat):
            rank.beat, rank.dropped = message, message.dropped
            rank.first_beat = rank.first_beat or message
            if not rank.watched:
                self._add_steps(self._matcher.leave(rank.rank))
        elif isinstance(message, Hello):
            self._apply_hello(rank, message)
        elif isinstance(message, Layout):
            self.layouts.apply_layout(message)
        elif isinstance(message, Group):
            self.groups.apply(message)
        elif isinstance(message, Bye):
            rank.bye = message
            self.ends.append(message)
            self._add_steps(self._matcher.leave(rank.rank))

    def _apply_node(self, node: Node) -> None:
        """Its ranks are unseen from now on, or have come back."""
        before = self.nodes.get(node.node)
        for rank in () if before is None else before.ranks:
            self._unseen.discard(rank)
        self.nodes[node.node] = node
        if not node.connected:
            self._unseen.update(node.ranks)

    def _apply_hello(self, rank: RankState, hello: Hello) -> None:
        rank.hello, rank.bye = hello, None
        self.run_id = hello.run_id or self.run_id
        self.groups.apply(hello)
        self.clocks.meet(hello)

    def _apply_step(self, step: Step, received_ns: int) -> None:
        rank = self._rank(step.rank)
        rank.seen_ns = received_ns
        rank.missing += missing_steps(rank.last_step, step)
        rank.last_step, rank.dropped = step, max(rank.dropped, step.dropped)
        self.cost.add_step(step)
        self._add_steps(self._matcher.add_step(step))

    def _add_steps(self, steps: Iterable[NumberedStep]) -> None:
        for number, step in steps:
            rank = self._rank(step.rank)
            rank.newest = max(rank.newest, number)
            across = self.steps.get(number) or self._make_step(number)
            if across is not None:
                across.add_step(step)
                if self.clocks.several and len(across) >= len(self.ranks):
                    self.clocks.observe(across.ranks)
                    across.align(self.clocks.shifts(across.ranks))
                if len(across) >= max(self.world_size, 1):
                    self._diagnose(number)
        if self.frames % KEEP_DECODED == 0:
            self._tidy(everything=True)

    def _diagnose(self, number: int) -> None:
        """A step that all ranks have sent, after those before it that some will never send, as frames come in order."""
        for older in sorted(other for other in self._undiagnosed if other <= number):
            self.diagnosis.add_step(self._undiagnosed.pop(older))

    def _diagnose_rest(self) -> None:
        """The steps that some ranks never sent."""
        self._diagnose(max(self._undiagnosed, default=-1))

    def _make_step(self, number: int) -> StepAcrossRanks | None:
        """A new step; None if it is older than anything kept."""
        if len(self.steps) >= self._room() and number < next(iter(self.steps)):
            return None
        in_order = not self.steps or number > next(reversed(self.steps))
        across = self.steps[number] = StepAcrossRanks(number, not self.clocks.several, self.groups.members)
        self._undiagnosed[number] = across
        if not in_order:
            self.steps = OrderedDict(sorted(self.steps.items()))
        self._tidy()
        return across

    def _room(self) -> int:
        """How many steps are kept."""
        return max(min(KEEP_STEPS, KEEP_RANK_STEPS // max(len(self.ranks), 1)), 2)

    def _tidy(self, everything: bool = False) -> None:
        """Drops the oldest steps except the last few full ones, and packs those that are no longer new.

        Usually one step has become old since the last time. ``everything`` also finds older ones that changed.
        """
        if (spare := len(self.steps) - self._room()) > 0:
            full = islice((across for across in reversed(self.steps.values()) if across.full), FULL_STEPS)
            kept = {across.step for across in full}
            for step in [step for step in islice(self.steps, spare) if step not in kept]:
                del self.steps[step]
                self._undiagnosed.pop(step, None)
        unpacked = max(KEEP_DECODED // max(len(self.ranks), 1), 2)
        for across in islice(reversed(self.steps.values()), unpacked, None):
            if not across.pack() and not everything:
                break
        for across in islice(reversed(self.steps.values()), KEEP_FIGURES, None):
            if not across.forget_facts() and not everything:
                break

    # -- reading ---------------------------------------------------------------------------------------------

    def status_of(self, rank: int) -> RankStatus:
        """What the rank is doing, by the state's own clock."""
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

    def verdict(self, summary: Summary, incidents: Sequence[Incident]) -> Verdict:
        """What matters most now, given the figures of the newest steps and all incidents."""
        about = (len(self.ranks), self.end, self.world_size, self.finished_steps, self._forwards, self._issued())
        found = verdict(summary, incidents, *about)
        if self.end is None and (unseen := self.unseen):
            return with_unseen(found, unseen)
        return found

    def _issued(self) -> bool | None:
        """Whether a rank's watched groups have issued collectives since its first heartbeat; None if unknown."""
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
    def missing_steps(self) -> int | None:
        """Steps of all ranks that never came. None if the collector had been started again before this viewer came."""
        if self._restarts_before:
            return None
        return sum(rank.missing for rank in self.ranks.values())

    def newest_step(self) -> StepAcrossRanks | None:
        """The newest step that every rank has sent that is still watched; if there is none, the newest of all."""
        alive = {rank for rank, state in self.ranks.items() if state.watched} or set(self.ranks)
        for across in reversed(self.steps.values()):
            if alive <= across.members:
                return across
        return next(reversed(self.steps.values()), None)

    def recent(self, count: int = 50) -> list[StepAcrossRanks]:
        """The `newest` steps that count and that every rank has sent that was still watched then."""
        steps = reversed(self.steps.values())
        return newest(count, (across for across in steps if across.counted and self._is_whole(across)))

    def _is_whole(self, across: StepAcrossRanks) -> bool:
        """Whether no rank is missing that was still watched then."""
        if len(across) >= len(self.ranks):
            return True
        missing = (state for rank, state in self.ranks.items() if rank not in across.members)
        return all(not state.watched and state.newest < across.step for state in missing)


def newest(count: int, steps: Iterable[StepAcrossRanks]) -> list[StepAcrossRanks]:
    """The newest ``count`` steps, and enough older full ones that there are `FULL_STEPS` of these; oldest first.

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
        if len(found) >= count and full >= FULL_STEPS:
            break
    return found[::-1]
