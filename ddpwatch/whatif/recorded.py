"""What a run shows: its full steps as plain numbers, its parameters, its buckets; or one line why that is not enough.

Every rank's stamps become absolute times in ns, as floats, of one backward per step: the last one, whose gradients are
reduced.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, cast

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.kept_steps import StepLimit
from ddpwatch.analysis.means import STARTING_STEPS
from ddpwatch.analysis.run import Run
from ddpwatch.analysis.step import backward_starts, starts_of, without_own
from ddpwatch.common.intervals import total, union
from ddpwatch.errors import UsageError
from ddpwatch.whatif.assignment import Parameter
from ddpwatch.wire.messages import ALL_REDUCE, DEFAULT_GROUP, OWN_COLLECTIVES, Hello, Layout, Message, Step

FEWEST_STEPS = 5
ANOTHER_LEVEL = 0.1  # of the step: from here on, steps before an incident show another run than those since
FULL = StepLimit(512, 4096, FEWEST_STEPS + 3)  # full steps, the newest: what bounds memory; more change no answer

RECORD_MORE = "record more steps in full: --detail high"
CHANGED = "buckets were others than now: DDP has rebuilt them since"
NO_MORE = "more of the same steps would not help"


class RankStep(NamedTuple):
    """One rank in one full step. Times in ns, absolute where nothing else is said.

    Attributes:
        start, end: Of the step.
        backward: Start of the backward whose gradients are reduced.
        computed: End of its computing.
        synced: When it had waited for all buckets and copied them back.
        data: How long the rank waited for data; None if that is not known.
        optimizer: How long its optimizer took.
        fires: Per unit, when its gradient was there; None where that is not known.
        ready, launch, start_of, done: Per bucket, in launch order.
    """

    start: float
    end: float
    backward: float
    computed: float
    synced: float
    data: float | None
    optimizer: float
    fires: list[float | None]
    ready: list[float | None]
    launch: list[float]
    start_of: list[float]
    done: list[float]


@dataclass(frozen=True)
class Recorded:
    """A run, as far as what-if needs it.

    Attributes:
        steps: Its newest full steps, oldest first; per step the ranks in ascending order.
        left_out: How many older full steps there are: they would take too much memory, or are of another level.
        ranks: Their numbers.
        backend, torch, flags: What the lowest rank said about itself; the backend that its device has.
        gpu: Whether GPUs stamp.
        units: What is ready at one time: gradients in the order in which they come, or else whole buckets.
        registered: The units in the order in which the model has them.
        buckets: The units of each bucket, in launch order.
        by_parameter: Whether the units are gradients.
        why_not: Why they are not; empty if they are.
        comm_hook: DDP's name of the job's comm hook; empty without one.
        micro_steps: Backwards per step.
        measured_ns: The mean step.
        since_step: From which step on, in the verdict's incident, steps are longer or shorter; None if none is.
        before: How many of the steps are older: of newer ones there are too few.
    """

    steps: list[list[RankStep]]
    left_out: int
    ranks: list[int]
    backend: str
    torch: str
    flags: dict[str, bool | int | float | str | None]
    gpu: bool
    units: list[Parameter]
    registered: list[int]
    buckets: list[list[int]]
    by_parameter: bool
    why_not: str
    comm_hook: str
    micro_steps: int
    measured_ns: float
    since_step: int | None = None
    before: int = 0

    @property
    def durations(self) -> list[float]:
        """Per step, the mean of its ranks (ns)."""
        return [fmean(row.end - row.start for row in step) for step in self.steps]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each bucket."""
        return [sum(self.units[unit].nbytes for unit in bucket) for bucket in self.buckets]

    def flag(self, name: str) -> bool:
        """Returns whether an option of DDP is set."""
        return bool(self.flags.get(name))


class RecordedBuilder:
    """Takes a run's hellos, layouts and steps; `build` says what they show."""

    def __init__(self) -> None:
        self._hellos: dict[int, Hello] = {}
        self._layouts: dict[int, Layout] = {}  # the newest, by module, of the lowest rank
        self._full: deque[StepAcrossRanks] = deque()
        self._left_out = 0  # older full steps
        self._steps = 0
        self._groups: set[int] = set()
        self._sharded = self._own = self._uncomparable = False
        self._first_order: list[int] = []

    def apply_message(self, message: Message) -> None:
        """Takes a hello or a layout; ignores all else."""
        if isinstance(message, Hello):
            self._hellos[message.rank] = message
        elif isinstance(message, Layout) and message.rank == min(self._hellos, default=message.rank):
            if message.kind == "call":
                self._own = True
                return
            self._layouts[message.module] = message
            self._sharded = self._sharded or message.kind == "group"

    def add_step(self, across: StepAcrossRanks) -> None:
        """Takes the next step of all its ranks."""
        across = _without_own(across)
        for step in across.ranks.values():
            self._look_at(step)
        if not across.full or len(across) < max(1, len(self._hellos)):
            return
        if not across.comparable:
            self._uncomparable = True
            return
        if len(across) * FULL.least > FULL.rank_steps:
            across.pack()  # the fewest steps take more than that: encoded, a fifth of it
        self._full.append(across)
        if len(self._full) > FULL.of(len(across)):
            self._full.popleft()
            self._left_out += 1

    def _look_at(self, step: Step) -> None:
        self._steps += 1
        if step.status == "warmup" and step.rank == min(self._hellos, default=step.rank) and not self._first_order:
            self._first_order = list(step.hook_param)
        if step.comm_label:
            self._groups |= set(step.comm_group or [DEFAULT_GROUP])
        self._sharded = self._sharded or any(op != ALL_REDUCE for op in step.comm_op)

    def build(self, incident_since: int | None = None) -> Recorded:
        """Returns what the messages so far show.

        Args:
            incident_since: The step since which the verdict's incident lasts; None without one.

        Raises:
            UsageError: They do not carry any prediction.
        """
        self._check_job()
        hello, layout = self._hellos[min(self._hellos)], next(iter(self._layouts.values()))
        older, steps = _levels(self._comparable_steps(layout), incident_since)
        mixed = len(steps) < FEWEST_STEPS
        steps = [*older, *steps] if mixed else steps
        why_not = _why_no_parameters(layout, steps)
        units, buckets, ids = _units(layout, steps, self._first_order, _is_rebuilt(hello), not why_not)
        rows = [
            [_rank_step(across.ranks[rank], across.start_of(rank), ids) for rank in sorted(across.ranks)]
            for across in steps
        ]
        return Recorded(
            steps=rows,
            left_out=self._left_out + (0 if mixed else len(older)),
            ranks=sorted(self._hellos),
            backend=hello.backend,
            torch=hello.torch,
            flags=dict(hello.ddp),
            gpu=hello.timing_source != "host",
            units=units,
            registered=sorted(range(len(ids)), key=ids.__getitem__),
            buckets=buckets,
            by_parameter=not why_not,
            why_not=why_not,
            comm_hook=layout.comm_hook,
            micro_steps=max(step.micro_steps for across in steps for step in across.ranks.values()),
            measured_ns=fmean(row.end - row.start for step in rows for row in step),
            since_step=incident_since if older else None,
            before=len(older) if mixed else 0,
        )

    def _check_job(self) -> None:
        """Refuses what is no DDP job of one module on one clock."""
        if self._own and not self._layouts:
            raise UsageError(
                "what-if predicts DDP's buckets, and this job issues its collectives itself",
                "two scenarios apply, and its report has them: a rank as fast as the others, and nothing exposed",
            )
        if self._sharded:
            raise UsageError("what-if supports DDP only, and this job uses FSDP2")
        if not self._steps or not self._hellos:
            raise UsageError("no step is readable", "record a longer stretch of the job")
        world_size = max(hello.world_size for hello in self._hellos.values())
        if world_size < 2:
            raise UsageError("one rank alone has nothing to reduce")
        if len(self._hellos) < world_size:
            missing = f"{len(self._hellos)} of {world_size} ranks are in it, and what-if needs all"
            raise UsageError(missing, "give the recording of all ranks")
        if not any(layout.buckets for layout in self._layouts.values()):
            raise UsageError("the bucket layout is missing", "record from the start of the job, or at its end")
        if len(self._layouts) > 1:
            raise UsageError(f"what-if supports jobs with one DDP module, and this one has {len(self._layouts)}")
        if len(self._groups) > 1:
            raise UsageError(
                f"what-if supports jobs that reduce in one process group, and this one has {len(self._groups)}"
            )
        if self._uncomparable and not self._full:
            raise UsageError("the ranks have different clocks, so that their times cannot be compared")

    def _comparable_steps(self, layout: Layout) -> list[StepAcrossRanks]:
        """Returns the full steps with the newest buckets, without the first ones if there are enough others."""
        why_not = [self._unfit(across.detached(), layout) for across in self._full]  # what it works out takes memory
        found = [across for across, reason in zip(self._full, why_not, strict=True) if not reason]
        settled = [across for across in found if across.step >= STARTING_STEPS]
        found = settled if len(settled) >= FEWEST_STEPS else found
        hooked = [across for across in found if all(step.hook_param for step in across.ranks.values())]
        found = hooked if len(hooked) >= FEWEST_STEPS else found
        if len(found) < FEWEST_STEPS:
            reasons = Counter(filter(None, why_not))
            most = reasons.most_common(1)
            others = f"; in {most[0][1]} others, {most[0][0]}" if most else ""
            raise UsageError(
                f"{len(found)} steps timed in full on all ranks, and {FEWEST_STEPS} are needed{others}",
                RECORD_MORE if found or not most or most[0][0] == CHANGED else NO_MORE,
            )
        return found

    def _unfit(self, across: StepAcrossRanks, layout: Layout) -> str:
        """Returns why a full step does not show the newest buckets; empty if it does."""
        if across.members != self._hellos.keys():
            return "other ranks took part"
        reasons = (_unfit(step, layout) for step in across.ranks.values())
        found = next(filter(None, reasons), "")
        if not found and len(across.skew.buckets) != len(layout.buckets):
            return "ranks launched other buckets than each other"
        return found


def recorded_of(messages: Iterable[Message]) -> Recorded:
    """Returns what all messages of a run show.

    Raises:
        UsageError: They do not carry any prediction.
    """
    run, builder = Run(), RecordedBuilder()
    for message in messages:
        for across in run.apply_message(message):
            builder.add_step(across)
        builder.apply_message(message)
    for across in run.rest():
        builder.add_step(across)
    return builder.build(since_of(run.diagnosis.incidents()))


def since_of(incidents: Iterable[Incident]) -> int | None:
    """Returns since which step the verdict's incident lasts: the worst that is not over. None without one."""
    return next((one.since_step for one in incidents if one.open), None)


def _levels(steps: list[StepAcrossRanks], since: int | None) -> tuple[list[StepAcrossRanks], list[StepAcrossRanks]]:
    """Returns the steps before an incident and those since; all as the latter if they take as long."""
    older = [across for across in steps if since is not None and across.step < since]
    newer = steps[len(older) :]
    alike = not older or not newer or abs(_mean_ns(newer) / _mean_ns(older) - 1) < ANOTHER_LEVEL
    return ([], steps) if alike else (older, newer)


def _mean_ns(steps: Iterable[StepAcrossRanks]) -> float:
    return fmean(step.duration_ns for across in steps for step in across.ranks.values())


def _without_own(across: StepAcrossRanks) -> StepAcrossRanks:
    """Returns the step without the collectives of the job's own."""
    if not any(OWN_COLLECTIVES in step.comm_module for step in across.ranks.values()):
        return across
    found = StepAcrossRanks(across.step, across.comparable, across.members_of, across.role_of)
    for step in across.ranks.values():
        found.add_step(without_own(step))
    if across.shifts:
        found.align(across.shifts)
    return found


def _is_rebuilt(hello: Hello) -> bool:
    """Returns whether DDP rebuilds the buckets after the first step."""
    return not hello.ddp.get("find_unused_parameters") or bool(hello.ddp.get("static_graph"))


def _unfit(step: Step, layout: Layout) -> str:
    """Returns why a rank's step does not have what a schedule needs; empty if it does."""
    sizes = sorted(bucket.nbytes for bucket in layout.buckets)
    if None in step.comm_done:
        return "completions were not measured"
    if not step.synced or not step.reduced:
        return "gradients were not reduced"
    if "backward" not in {span.phase for span in step.spans} or step.duration_ns <= 0:
        return "no backward was seen"
    if min(sizes, default=0) <= 0:
        return "a bucket was empty"
    if sorted(step.comm_bytes) == sizes:
        return ""
    if step.epoch != layout.epoch:
        return CHANGED
    if len(step.comm_label) == len(sizes):
        return "buckets had other sizes"
    again = len(step.comm_label) > len(sizes)
    return "a bucket was reduced more than once" if again else "not all buckets were reduced"


def _why_no_parameters(layout: Layout, steps: Sequence[StepAcrossRanks]) -> str:
    """Returns why gradients cannot be moved to other buckets; empty if they can."""
    if not layout.param_bytes:
        return "the recording does not hold the sizes of the parameters"
    held = [position for bucket in layout.buckets for position in bucket.params]
    known = len(set(held)) == len(held) and max(held, default=-1) < len(layout.params)
    if not known or not all(bucket.params for bucket in layout.buckets):
        return "the recording does not say which parameters are in which bucket"
    fired = all(len(step.hook_param) for across in steps for step in across.ranks.values())
    return "" if fired else "the times of single gradients are missing (on a GPU, or recorded with --every)"


def _units(
    layout: Layout, steps: Sequence[StepAcrossRanks], first_order: list[int], is_rebuilt: bool, by_parameter: bool
) -> tuple[list[Parameter], list[list[int]], list[int]]:
    """Returns the units in the order in which they come, those of each bucket, and the parameter ids of the units."""
    if not by_parameter:
        whole = [Parameter(bucket.nbytes, _kind_of(layout, bucket.params)) for bucket in layout.buckets]
        return whole, [[i] for i in range(len(layout.buckets))], []
    order = _ready_order(layout, steps, first_order, is_rebuilt)
    place = {position: unit for unit, position in enumerate(order)}
    buckets = [sorted(place[position] for position in bucket.params) for bucket in layout.buckets]
    return [_parameter(layout, p) for p in order], buckets, [layout.param_base + p for p in order]


def _kind_of(layout: Layout, positions: Sequence[int]) -> str:
    """Returns the type and device of a bucket's gradients; empty if they are not known."""
    known = positions and max(positions) < len(layout.param_kind)
    return layout.param_kind[positions[0]].partition(" sparse")[0] if known else ""


def _parameter(layout: Layout, position: int) -> Parameter:
    kind, sparse, _ = layout.param_kind[position].partition(" sparse")
    return Parameter(layout.param_bytes[position], kind, bool(sparse), layout.param_rows[position])


def _ready_order(
    layout: Layout, steps: Sequence[StepAcrossRanks], first_order: list[int], is_rebuilt: bool
) -> list[int]:
    """Returns the positions of the parameters in the order by which DDP rebuilds buckets: that of rank 0's first step.

    Several rebuilt buckets show it. A single one does not, nor do buckets of several kinds: then the first step does,
    if it was recorded, or else the lowest rank's mean times.
    """
    reduced = [position for bucket in layout.buckets for position in bucket.params]
    if is_rebuilt and len(layout.buckets) > 1 and len(set(layout.param_kind)) <= 1:
        return reduced
    first = [param - layout.param_base for param in first_order]
    if sorted(first) == sorted(reduced):
        return first
    sums = dict.fromkeys(reduced, 0.0)
    for across in steps:
        step = across.ranks[min(across.ranks)]
        for param, at in zip(step.hook_param, step.hook_ns, strict=True):
            if param - layout.param_base in sums:
                sums[param - layout.param_base] += at
    return sorted(reduced, key=sums.__getitem__)


def _rank_step(step: Step, start_ns: int, ids: Sequence[int]) -> RankStep:
    """Returns one rank's stamps, as absolute times from the step's start on the common time line."""
    base = float(start_ns)
    ends = {span.phase: span for span in step.spans}  # the last of each phase
    computed = ends["backward"].end
    waits = [span.end for span in step.spans if span.phase == "sync" and span.start >= computed]  # its own come later
    synced = max(computed, waits[0] if waits else max(cast("list[int]", step.comm_done)))
    fired = dict(zip(step.hook_param, step.hook_ns, strict=True))
    order = sorted(range(len(step.comm_label)), key=step.comm_label.__getitem__)
    starts, done = starts_of(step), cast("list[int]", step.comm_done)
    return RankStep(
        start=base,
        end=base + step.duration_ns,
        backward=base + max(backward_starts(step), default=ends["backward"].start),
        computed=base + computed,
        synced=base + synced,
        data=None if step.data is None else float(total(union(step.data))),
        optimizer=float(sum(span.end - span.start for span in step.spans if span.phase == "optimizer")),
        fires=[None if (at := fired.get(param)) is None else base + at for param in ids],
        ready=[None if (at := step.comm_ready[i]) is None else base + at for i in order],
        launch=[base + step.comm_launch[i] for i in order],
        start_of=[base + starts[i] for i in order],
        done=[base + done[i] for i in order],
    )
