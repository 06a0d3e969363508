"""RunState: everything a viewer knows of a run, built from its frames, bounded in memory.

Live and replay feed the same frames to the same `apply`. The state's clock is the receive time of its newest frame,
so a replayed run goes silent, waits and ends exactly as the live one did.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import Clock, clock_of
from ddpwatch.analysis.diagnosis.verdict import Presence
from ddpwatch.messages import Beat, Bye, Device, Hello, Layout, Mark, Message, Status, Step
from ddpwatch.sampling.cost import CostMeter

__all__ = ["KEEP_STEPS", "RankState", "RankStatus", "RunState", "StepAcrossRanks"]

KEEP_STEPS = 512
KEEP_RANK_STEPS = 65_536  # steps times ranks: what bounds memory in large jobs
KEEP_DECODED = 2_048  # likewise; older frames are kept encoded
FULL_STEPS = 3  # what is known only of steps recorded in full is not to rest on one of them
KEEP_FIGURES = 64  # steps; older figures are worked out again when somebody looks
KEEP_DEVICES = 600
KEEP_MARKS = 1000
KEEP_ENDS = 100
SILENT_NS = 3_000_000_000
WAITING_NS = 1_000_000_000


class RankStatus(str, Enum):
    """What a rank is doing, as far as one can tell."""

    RUNNING = "running"
    WAITING = "waiting"  # for other ranks, in a collective, for longer than a second
    SILENT = "silent"  # no sign of life for three seconds
    ENDED = "ended"


@dataclass(slots=True)
class RankState:
    """One rank. ``seen_ns`` is the receive time of its newest frame."""

    rank: int
    hello: Hello | None = None
    beat: Beat | None = None
    bye: Bye | None = None
    last_step: Step | None = None
    seen_ns: int = 0
    dropped: int = 0


@dataclass(slots=True)
class RunState:
    """Apply frames, read figures.

    Attributes:
        now_ns: Receive time of the newest frame (ns since the Unix epoch); 0 before the first.
        version: Grows with every frame: what is drawn from the state is stale once it differs.
        steps: The newest steps by number, oldest first.
        devices: Newest samples per (host, kind, index), oldest first.
        end: The collector's goodbye, once the run is over.
    """

    run_id: str = ""
    world_size: int = 0
    now_ns: int = 0
    first_ns: int = 0
    version: int = 0
    frames: int = 0
    ranks: dict[int, RankState] = field(default_factory=dict)
    steps: OrderedDict[int, StepAcrossRanks] = field(default_factory=OrderedDict)
    layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)
    devices: dict[tuple[str, str, int], deque[Device]] = field(default_factory=dict)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=KEEP_MARKS))
    ends: deque[Bye] = field(default_factory=lambda: deque(maxlen=KEEP_ENDS))
    status: Status | None = None
    end: Bye | None = None
    comparable: bool = True
    cost: CostMeter = field(default_factory=CostMeter)
    _clocks: set[Clock] = field(default_factory=set)

    def apply(self, message: Message, received_ns: int) -> None:
        """Takes one message. Never raises on a valid message, in whatever order they come."""
        self.now_ns = max(self.now_ns, received_ns)
        self.first_ns = self.first_ns or received_ns
        self.version += 1
        self.frames += 1
        if isinstance(message, Device):
            key = (message.host, message.kind, message.index)
            self.devices.setdefault(key, deque(maxlen=KEEP_DEVICES)).append(message)
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Mark):
            self.marks.append(message)
        elif isinstance(message, Bye) and message.rank is None:
            self.end = message
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
        if isinstance(message, Step):
            self._apply_step(rank, message)
        elif isinstance(message, Beat):
            rank.beat, rank.dropped = message, message.dropped
        elif isinstance(message, Hello):
            self._apply_hello(rank, message)
        elif isinstance(message, Layout):
            self.layouts[message.module, message.epoch] = message
        elif isinstance(message, Bye):
            rank.bye = message
            self.ends.append(message)

    def _apply_hello(self, rank: RankState, hello: Hello) -> None:
        rank.hello, rank.bye = hello, None
        self.run_id = hello.run_id or self.run_id
        self.world_size = max(self.world_size, hello.world_size)
        self._clocks.add(clock_of(hello))
        self.comparable = len(self._clocks) <= 1

    def _apply_step(self, rank: RankState, step: Step) -> None:
        rank.last_step, rank.dropped = step, max(rank.dropped, step.dropped)
        self.cost.add(step)
        view = self.steps.get(step.step)
        if view is None:
            if len(self.steps) >= self._room() and step.step < next(iter(self.steps)):
                return  # older than anything kept
            in_order = not self.steps or step.step > next(reversed(self.steps))
            view = self.steps[step.step] = StepAcrossRanks(step.step, self.comparable)
            if not in_order:
                self.steps = OrderedDict(sorted(self.steps.items()))
            self._tidy()
        view.add(step)
        if self.frames % KEEP_DECODED == 0:
            self._tidy()

    def _room(self) -> int:
        """How many steps are kept."""
        return max(min(KEEP_STEPS, KEEP_RANK_STEPS // max(len(self.ranks), 1)), 2)

    def _tidy(self) -> None:
        """Drops the oldest steps, but for the last few full ones, and packs those that are not new any more."""
        if (spare := len(self.steps) - self._room()) > 0:
            full = islice((view for view in reversed(self.steps.values()) if view.full), FULL_STEPS)
            kept = {view.step for view in full}
            for step in [step for step in islice(self.steps, spare) if step not in kept]:
                del self.steps[step]
        views = list(self.steps.values())
        for view in views[: -max(KEEP_DECODED // max(len(self.ranks), 1), 2)]:
            view.pack()
        for view in views[:-KEEP_FIGURES]:
            view.forget_facts()

    # -- reading ---------------------------------------------------------------------------------------------

    def status_of(self, rank: int) -> RankStatus:
        """What the rank is doing, judged at the state's own clock."""
        state = self.ranks[rank]
        if state.bye is not None:
            return RankStatus.ENDED
        if self.now_ns - state.seen_ns > SILENT_NS:
            return RankStatus.SILENT
        beat = state.beat
        if beat is not None and beat.phase == "sync" and beat.at_ns - beat.since_ns > WAITING_NS:
            return RankStatus.WAITING
        return RankStatus.RUNNING

    def presence(self) -> dict[int, Presence]:
        """How every rank stands, as the verdict wants it."""
        return {
            rank: Presence(
                beat=state.beat,
                bye=state.bye,
                silent_ns=self.now_ns - state.seen_ns,
                finished_steps=0 if state.last_step is None else state.last_step.step + 1,
            )
            for rank, state in self.ranks.items()
        }

    def newest_step(self) -> StepAcrossRanks | None:
        """The newest step that every rank still running has sent; the newest at all if there is none."""
        alive = {rank for rank, state in self.ranks.items() if state.bye is None} or set(self.ranks)
        for view in reversed(self.steps.values()):
            if alive <= view.members:
                return view
        return next(reversed(self.steps.values()), None)

    def layout_of(self, module: int, epoch: int) -> Layout | None:
        """The bucket layout of a module in force at an epoch."""
        epochs = [e for m, e in self.layouts if m == module and e <= epoch]
        return self.layouts[module, max(epochs)] if epochs else None

    def param_name(self, param: int, epoch: int) -> str:
        """Name of the parameter with that process-wide id; its number where the layout is not known."""
        for module in sorted({m for m, _ in self.layouts}, reverse=True):
            layout = self.layout_of(module, epoch)
            if layout is not None and 0 <= param - layout.param_base < len(layout.params):
                return layout.params[param - layout.param_base]
        return f"parameter {param}"

    def layer(self, param: int) -> str:
        """Name of a parameter in the newest layout; "" where none has it."""
        for layout in sorted(self.layouts.values(), key=lambda layout: layout.epoch, reverse=True):
            if 0 <= param - layout.param_base < len(layout.params):
                return layout.params[param - layout.param_base]
        return ""

    def bucket_layer(self, index: int) -> str:
        """The first parameter of the bucket of that index, in the newest layout that has it; "" if none is known."""
        return next(iter(self.bucket_params(index)), "")

    def bucket_params(self, index: int) -> list[str]:
        """The parameters of the bucket of that index, in the newest layout that has it; empty if none is known."""
        for layout in sorted(self.layouts.values(), key=lambda layout: layout.epoch, reverse=True):
            for bucket in layout.buckets:
                if bucket.index == index:
                    return [layout.params[param] for param in bucket.params if param < len(layout.params)]
        return []

    def recent(self, count: int = 50) -> list[StepAcrossRanks]:
        """The `newest` steps that belong into statistics and that every known rank has sent."""
        views = reversed(self.steps.values())
        return newest(count, (view for view in views if view.counted and len(view) >= len(self.ranks)))


def newest(count: int, views: Iterable[StepAcrossRanks]) -> list[StepAcrossRanks]:
    """The first ``count`` of steps that come newest first; oldest first.

    As many more, further back, as it takes to have a few among them that are recorded in full.
    """
    found: list[StepAcrossRanks] = []
    full = 0
    for view in views:
        if len(found) < count or view.full:
            found.append(view)
            full += view.full
        if len(found) >= count and full >= FULL_STEPS:
            break
    return found[::-1]
