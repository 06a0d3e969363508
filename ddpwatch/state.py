"""RunState: everything a viewer knows of a run, built from its frames, bounded in memory.

Live and replay feed the same frames to the same `apply`. The state's clock is the receive time of its newest frame,
so a replayed run goes silent, waits and ends exactly as the live one did.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from ddpwatch.analysis.ranks import BucketFigures, bucket_figures, lateness, same_clock, waiting
from ddpwatch.analysis.steps import StepFigures, figures
from ddpwatch.analysis.verdict import Presence
from ddpwatch.messages import Beat, Bye, Device, Hello, Layout, Mark, Message, Status, Step

KEEP_STEPS = 512
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


class StepView:
    """One step over all ranks that have sent it: the rows of the timeline and the figures behind them."""

    def __init__(self, step: int, comparable: bool) -> None:
        self.step = step
        self.ranks: dict[int, Step] = {}
        self.comparable = comparable

    def add(self, step: Step) -> None:
        """Takes one rank's step; what was worked out before is forgotten."""
        self.ranks[step.rank] = step
        for name in ("figures", "buckets"):
            self.__dict__.pop(name, None)

    @cached_property
    def figures(self) -> dict[int, StepFigures]:
        """Figures per rank."""
        return {rank: figures(step) for rank, step in self.ranks.items()}

    @cached_property
    def buckets(self) -> list[BucketFigures]:
        """Buckets compared over all ranks here; empty where their clocks are not comparable."""
        return bucket_figures(self.ranks) if self.comparable and len(self.ranks) > 1 else []

    def late_ns(self, rank: int) -> int | None:
        """How late the rank was at worst, None if there is nothing to compare."""
        return lateness(self.buckets, rank) if rank in self.ranks else None

    def wait_ns(self, rank: int) -> int | None:
        """How long the rank waited for others at worst, None if there is nothing to compare."""
        return waiting(self.buckets, rank) if rank in self.ranks else None

    @property
    def counted(self) -> bool:
        """Whether the step belongs into statistics: neither warm-up nor aborted on any rank."""
        return all(step.status in ("ok", "shadow") for step in self.ranks.values())


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
    steps: OrderedDict[int, StepView] = field(default_factory=OrderedDict)
    layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)
    devices: dict[tuple[str, str, int], deque[Device]] = field(default_factory=dict)
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=KEEP_MARKS))
    ends: deque[Bye] = field(default_factory=lambda: deque(maxlen=KEEP_ENDS))
    status: Status | None = None
    end: Bye | None = None
    comparable: bool = True

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
            self.ranks[rank] = RankState(rank)
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
        self.comparable = same_clock(r.hello for r in self.ranks.values() if r.hello is not None)

    def _apply_step(self, rank: RankState, step: Step) -> None:
        rank.last_step, rank.dropped = step, max(rank.dropped, step.dropped)
        view = self.steps.get(step.step)
        if view is None:
            if len(self.steps) >= KEEP_STEPS and step.step < next(iter(self.steps)):
                return  # older than anything kept
            in_order = not self.steps or step.step > next(reversed(self.steps))
            view = self.steps[step.step] = StepView(step.step, self.comparable)
            if not in_order:
                self.steps = OrderedDict(sorted(self.steps.items()))
            while len(self.steps) > KEEP_STEPS:
                self.steps.popitem(last=False)
        view.add(step)

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

    def newest_step(self) -> StepView | None:
        """The newest step that every rank still running has sent; the newest at all if there is none."""
        alive = {rank for rank, state in self.ranks.items() if state.bye is None} or set(self.ranks)
        for view in reversed(self.steps.values()):
            if alive <= view.ranks.keys():
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

    def recent(self, count: int = 50) -> list[StepView]:
        """The newest ``count`` steps that belong into statistics and that every known rank has sent, oldest first."""
        found = []
        for view in reversed(self.steps.values()):
            if view.counted and len(view.ranks) >= len(self.ranks):
                found.append(view)
                if len(found) == count:
                    break
        return found[::-1]
