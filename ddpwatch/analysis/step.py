"""One rank's step: its phases, its buckets, and how much of its communication was exposed.

The definitions are those of ``docs/metrics.md``. Overlap is |C ∩ K| / |C| as in HolisticTraceAnalysis, with C the union
of [launch, done] over the buckets ([start, done] where starts are known) and of the waits for DDP's buffers, and K the
forward and backward compute intervals. FSDP2 says when a rank waits: there, what is exposed is C ∩ W, with W the union
of the waits.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import chain, compress, pairwise, repeat
from operator import attrgetter
from typing import NamedTuple, cast

from msgspec.structs import replace

from ddpwatch.common.intervals import Intervals, intersect, subtract, total, union
from ddpwatch.sampling.levels import FULL, is_timed, is_watched
from ddpwatch.wire.messages import ALL_REDUCE, DEFAULT_GROUP, OWN_COLLECTIVES, TO_ONE, PhaseName, Step

MUCH_REST = 0.1  # of a step in no phase: then reports say where it lies
STALL_NS = 250_000_000  # by which a stall is longer than a usual step, at least
STALL_STEPS = 1.5  # the same, in usual steps
PHASES = ("data", "between", "forward", "backward", "exposed_comm", "optimizer", "other")

# module, bucket index, turn (which backward of the step it belongs to, from 0), group, use. For a collective of the
# job's own, the index is the place that issues it, and the turn counts those of its group.
BucketKey = tuple[int, int, int, int, str]
# What a collective is for: "" for a bucket's all-reduce, with FSDP2 an operation on a parameter group
BACKWARD_GATHER = "all_gather_backward"
USE_NAMES = {
    "all_gather": "all-gather",
    BACKWARD_GATHER: "all-gather in backward",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
}


class StepFigures(NamedTuple):
    """What one rank spent a step on. Times in ns.

    Attributes:
        step_ns: From the end of the previous step's optimizer to the end of this one's.
        phases_ns: The `PHASES`; they add up to ``step_ns`` without remainder. Without "data" where waits for data were
            not seen; empty for a bare or unresolved step.
        comm_ns: |C|; None if the completion of a bucket was not measured, 0 without communication.
        exposed_ns: |C| - |C ∩ K|; None if the completion of a bucket was not measured.
        overlap: |C ∩ K| / |C| from 0 to 1; None without communication, or if it was not measured.
        exposed: When communication was exposed, as offsets from the step's start. Without completions: when the rank
            only waited, for buckets or buffers.
        waited_ns: How long the rank only waited for collectives, whether their completions are known or not.
    """

    step_ns: int
    phases_ns: dict[str, int]
    comm_ns: int | None
    exposed_ns: int | None
    overlap: float | None
    exposed: Intervals
    waited_ns: int = 0


def missing_steps(before: Step | None, step: Step) -> int:
    """Returns how many steps of the rank never came between two that did, besides those that it dropped itself."""
    if before is None:
        return 0
    return max(0, step.step - before.step - 1 - max(0, step.dropped - before.dropped))


def figures(step: Step) -> StepFigures:
    """Computes the figures of one step."""
    comm = comm_of(step)
    inside = [] if comm is None else _within(comm, step)
    phases, exposed, waited_ns = _in_turn(step, None if comm is None else inside) or _in_any_order(step)
    if step.status != FULL and not is_watched(step.status):
        phases = {}
    if comm is None:
        return StepFigures(step.duration_ns, phases, None, None, None, exposed, waited_ns)
    comm_ns, exposed_ns = total(inside), total(exposed)
    overlap = (comm_ns - exposed_ns) / comm_ns if comm_ns else None
    return StepFigures(step.duration_ns, phases, comm_ns, exposed_ns, overlap, exposed, waited_ns)


_Split = tuple[dict[str, int], Intervals, int]  # phases (ns), when communication was exposed, how long the rank waited


def _in_turn(step: Step, comm: Intervals | None) -> _Split | None:
    """Splits a step whose spans come one after the other, as nearly all do, in one pass.

    None for any other step, and where two phases may claim the same time: waits for data are expected in the only gap,
    exposed communication between the last gap and the optimizer.
    """
    compute: Intervals = []
    sync: Intervals = []
    gaps: Intervals = []
    spent = {"forward": 0, "backward": 0, "sync": 0, "optimizer": 0}
    since, gap_ns, before = 0, 0, ""
    optimizer, ended, opened = step.duration_ns, 0, 0  # opened: the end of one that called the newest compute
    for span in step.spans:
        phase, start, end = span.phase, span.start, span.end
        if start < since or end < start:
            return None
        if since < start and (before, phase) in _GAPS:
            gaps.append((since, start))
            gap_ns += start - since
        if phase != "sync":
            before = phase
        spent[phase] += end - start
        since = end
        if start == end:
            continue
        if phase == "sync":
            sync.append((start, end))
        elif phase == "optimizer":
            optimizer, ended = min(optimizer, start), end
        else:
            compute.append((start, end))
            optimizer, opened = step.duration_ns, ended
    if since > step.duration_ns:
        return None
    if comm is None or _knows_waits(step):
        waits = sync if len(sync) < 2 else union(sync)
        exposed = waits if comm is None else intersect(comm, waits)
    else:
        exposed = subtract(comm, compute)
        if exposed and (exposed[-1][1] > optimizer or exposed[0][0] < max(opened, gaps[-1][1] if gaps else 0)):
            return None
    phases: dict[str, int] = {}
    if step.data is not None:
        data = _data_of(step)
        if data and not (len(gaps) == 1 and gaps[0][0] <= data[0][0] and data[-1][1] <= gaps[0][1]):
            return None
        phases["data"] = total(data)
        gap_ns -= phases["data"]
    phases["between"], phases["forward"], phases["backward"] = gap_ns, spent["forward"], spent["backward"]
    phases["exposed_comm"], phases["optimizer"] = total(exposed), spent["optimizer"]
    phases["other"] = step.duration_ns - sum(phases.values())
    return phases, exposed, spent["sync"]


def _in_any_order(step: Step) -> _Split:
    """Returns the same for any step."""
    claims = claims_of(step)
    return split(step.duration_ns, claims), claims["exposed_comm"], total(_spans_of(step).sync)


def claims_of(step: Step) -> dict[str, Intervals]:
    """Returns when the rank was in each of the `PHASES` but "other", from the step's start.

    They may overlap (see `split`).
    """
    comm = comm_of(step)
    return _claims(step, _spans_of(step), None if comm is None else _within(comm, step))


def _claims(step: Step, spans: _Spans, comm: Intervals | None) -> dict[str, Intervals]:
    claims = {
        "forward": spans.forward,
        "backward": spans.backward,
        "exposed_comm": _exposed(step, spans, comm),
        "optimizer": spans.optimizer,
    }
    if step.data is not None:
        claims["data"] = _data_of(step)
    claims["between"] = subtract(spans.gaps, claims["data"]) if step.data else spans.gaps
    return claims


def rest_after(step: Step) -> dict[str, int]:
    """Returns how long a step was in no phase (ns), by the phase before; "" is before the first."""
    claims = claims_of(step)
    begins = sorted((since, phase) for phase, stretches in claims.items() for since, _ in stretches)
    found: dict[str, int] = {}
    for since, until in subtract([(0, step.duration_ns)], union(list(chain.from_iterable(claims.values())))):
        phase = next((name for start, name in reversed(begins) if start < since and name != "exposed_comm"), "")
        found[phase] = found.get(phase, 0) + until - since
    return found


class _Spans(NamedTuple):
    """When the rank was in which kind of span, and in the gap before a forward, as far as the step goes."""

    forward: Intervals
    backward: Intervals
    sync: Intervals
    optimizer: Intervals
    gaps: Intervals


def _spans_of(step: Step) -> _Spans:
    """Reads the spans once. A gap starts at the end of the span before, or with the step."""
    found: dict[str, Intervals] = {"forward": [], "backward": [], "sync": [], "optimizer": [], "gap": []}
    since, before = 0, ""
    for span in sorted(step.spans, key=_start):
        phase, start, end = span.phase, span.start, span.end
        if since < start and (before, phase) in _GAPS:
            found["gap"].append((since, start))
        if phase != "sync":
            before = phase
        if start < end:
            found[phase].append((start, end))
        since = end
    return _Spans(*(_within(union(several), step) for several in found.values()))


# The spans between which a gap lies: before a forward, or a wait for it, or an optimizer that calls it. A step starts
# ("") with the end of an optimizer.
_GAPS = {(before, "forward") for before in ("", "forward", "backward", "optimizer")}
_GAPS |= {("", "sync"), ("optimizer", "sync"), ("", "optimizer")}


class BucketKeys(tuple[BucketKey, ...]):
    """The keys of a step's buckets, in launch order; one object for all ranks and steps that launch alike."""

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Their groups, in the order of the first bucket of each."""
        return tuple(dict.fromkeys(key[3] for key in self))

    @cached_property
    def repeated(self) -> bool:
        """Whether a bucket is in more than one backward."""
        return any(key[2] for key in self)

    @cached_property
    def mixed(self) -> bool:
        """True if the job's own collectives are among those of DDP or FSDP2."""
        return len({key[0] == OWN_COLLECTIVES for key in self}) > 1

    @cached_property
    def compared(self) -> tuple[BucketKey, ...]:
        """Those that are the same on all ranks of their group: no send and no receive."""
        return self if not TO_ONE.intersection(key[4] for key in self) else tuple(k for k in self if k[4] not in TO_ONE)


_Columns = tuple[list[int], list[int], list[int]]
_newest: tuple[_Columns, BucketKeys] = (([], [], []), BucketKeys())


def bucket_keys(step: Step) -> BucketKeys:
    """Returns the keys of the step's buckets.

    Mostly all ranks, and all steps, launch the same: those are compared first.
    """
    global _newest
    known, keys = _newest
    columns = step.comm_module, step.comm_label, step.comm_group
    if step.comm_op or columns != known:
        keys = _keys(*map(tuple, columns), _uses(step))
        if not step.comm_op:
            _newest = (([*columns[0]], [*columns[1]], [*columns[2]]), keys)
    return keys


@lru_cache(maxsize=256)
def _keys(
    modules: tuple[int, ...], indices: tuple[int, ...], groups: tuple[int, ...], uses: tuple[str, ...]
) -> BucketKeys:
    seen: dict[tuple[int, int, str, int], int] = {}
    keys = []
    rows = zip(modules, indices, groups or [DEFAULT_GROUP] * len(indices), uses or [""] * len(indices), strict=True)
    for module, index, group, use in rows:
        use = use or (ALL_REDUCE if module == OWN_COLLECTIVES else "")
        turn = seen[module, index, use, group] = seen.get((module, index, use, group), -1) + 1
        keys.append((module, index, turn, group, use))
    return BucketKeys(keys)


def _uses(step: Step) -> tuple[str, ...]:
    """Returns what each collective is for.

    Empty if all are all-reduces. An all-gather of the backward starts in there. A bucket is for nothing else.
    """
    if not step.comm_op:
        return ()
    if has_buckets(step):
        rows = zip(step.comm_module, step.comm_op, strict=True)
        return tuple(op if module == OWN_COLLECTIVES else "" for module, op in rows)
    starts = [(span.start, span.phase == "backward") for span in step.spans if span.phase != "sync"]
    return tuple(
        BACKWARD_GATHER
        if op == "all_gather" and max(((s, b) for s, b in starts if s <= at), default=(0, False))[1]
        else op
        for op, at in zip(step.comm_op, step.comm_launch, strict=False)
    )


def has_buckets(step: Step) -> bool:
    """Returns whether DDP's buckets are among its collectives: nobody knows when a rank waits for one of them."""
    began = step.comm_wait_begin or repeat(None)
    rows = zip(step.comm_module, step.comm_op or repeat(ALL_REDUCE), began, strict=False)
    by_wrapper = [(op, wait) for module, op, wait in rows if module != OWN_COLLECTIVES]
    return bool(by_wrapper) and all(op == ALL_REDUCE and wait is None for op, wait in by_wrapper)


def without_own(step: Step) -> Step:
    """Returns the step without the collectives of the job's own."""
    if OWN_COLLECTIVES not in step.comm_module:
        return step
    kept = [module != OWN_COLLECTIVES for module in step.comm_module]
    columns = {name: list(compress(getattr(step, name), kept)) for name in _COLUMNS}
    if has_buckets(step):
        columns |= {"comm_op": [], "comm_wait_begin": [], "comm_wait_end": []}
    return replace(step, **columns)


_COLUMNS = [name for name in Step.__struct_fields__ if name.startswith("comm_") and name != "comm_first_seq"]


def _knows_waits(step: Step) -> bool:
    """Returns whether it is known when the rank waited for its collectives."""
    return bool(step.comm_wait_begin) and not has_buckets(step)


def first_compute(step: Step, own: bool = False) -> int:
    """Returns from when on stamps count: those of DDP's buckets from the step's first backward, else its first forward.

    0 without one.

    Args:
        step: The step.
        own: Whether it is about collectives of the job's own.
    """
    phase = "backward" if not step.comm_op or (has_buckets(step) and not own) else "forward"
    for span in step.spans:
        if span.phase == phase:
            return span.start
    return 0


def backward_starts(step: Step) -> list[int]:
    """Returns when each backward started."""
    return phase_starts(step, "backward")


def phase_starts(step: Step, phase: PhaseName) -> list[int]:
    """Returns when each forward, or backward, started. One goes on right after a wait within it."""
    spans = [(span.start, span.end) for span in step.spans if span.phase == phase and span.end > span.start]
    if len(spans) < 2:
        return [start for start, _ in spans]
    reached = {end for _, end in spans}
    waited: set[int] = set()
    for span in step.spans:
        if span.phase == "sync" and (span.start in reached or span.start in waited):
            waited.add(span.end)
    return [start for start, _ in spans if start not in waited]


def _exposed(step: Step, spans: _Spans, comm: Intervals | None) -> Intervals:
    """Returns the exposed time; without completions, when the rank only waited for collectives."""
    if comm is None:
        return spans.sync
    if _knows_waits(step):
        return intersect(comm, spans.sync)
    return subtract(comm, union(spans.forward + spans.backward))


def _data_of(step: Step) -> Intervals:
    """Returns when the rank waited for data, as far as the step goes."""
    return _within(union(step.data), step) if step.data else []


def _within(intervals: Intervals, step: Step) -> Intervals:
    """Returns the part of the intervals inside the step; nearly always all of it."""
    if not intervals or (intervals[0][0] >= 0 and intervals[-1][1] <= step.duration_ns):
        return intervals
    return intersect(intervals, [(0, step.duration_ns)] if step.duration_ns else [])


def buffer_waits(step: Step) -> Intervals:
    """Returns when a forward waited for DDP's broadcast of buffers, at its start.

    The first one of a step does, if any.
    """
    spans = step.spans
    if len(spans) < 2 or (spans[1].phase != "sync" and not step.comm_wait_begin) or _knows_waits(step):
        return []
    found = [(before, wait) for before, wait in pairwise(spans) if (before.phase, wait.phase) == _BUFFERS]
    if step.comm_wait_begin:  # others are waits for own collectives
        found = [(before, wait) for before, wait in found if before.start == before.end]
    return [(wait.start, wait.end) for _, wait in found if wait.start <= wait.end]


_BUFFERS = ("forward", "sync")  # every other wait follows a backward


def named_stretches(step: Step) -> list[tuple[str, int, int]]:
    """Returns what the training thread did, as (name, start, end) from the step's start.

    Waits for data, then the spans.
    """
    spans: list[tuple[str, int, int]] = [(span.phase, span.start, span.end) for span in step.spans]
    if waits := buffer_waits(step):
        spans = [("buffers" if span[1:] in waits else span[0], *span[1:]) for span in spans if span[1] < span[2]]
    return [*(("data", start, end) for start, end in _data_of(step)), *spans]


def comm_of(step: Step) -> Intervals | None:
    """Returns C: when a bucket was in flight, or the rank waited for buffers.

    None if a completion is unknown, or when the job waited for a collective that its own code issued. Beside buckets or
    parameter groups, such a one is left out.
    """
    if step.status != FULL and not is_timed(step.status):
        return None
    if OWN_COLLECTIVES in step.comm_module:
        return _comm_with_own(step)
    if None in step.comm_done:
        return None
    buckets = zip(starts_of(step), cast("list[int]", step.comm_done), strict=True)
    waits = buffer_waits(step)
    return union(chain(waits, buckets) if waits else buckets)


def _comm_with_own(step: Step) -> Intervals | None:
    began = step.comm_wait_begin or [None] * len(step.comm_module)
    rows = list(zip(step.comm_module, starts_of(step), step.comm_done, began, strict=True))
    if all(module == OWN_COLLECTIVES for module, *_ in rows):
        flights = [(start, None if wait is None else done) for _, start, done, wait in rows]
    else:
        flights = [(start, done) for module, start, done, _ in rows if module != OWN_COLLECTIVES or done is not None]
    if any(done is None for _, done in flights):
        return None
    return union(chain(buffer_waits(step), cast("Intervals", flights)))


def starts_of(step: Step) -> list[int]:
    """Returns when the wire was free for each collective; its launch where that is not known."""
    if not step.comm_start:
        return step.comm_launch
    return [launch if at is None else at for launch, at in zip(step.comm_launch, step.comm_start, strict=True)]


def split(duration_ns: int, claims: dict[str, Intervals]) -> dict[str, int]:
    """Splits the step. The first of several phases gets what they all claim; "other" gets what none of them claims."""
    sizes = {name: total(claim) for name, claim in claims.items()}
    claimed = sum(sizes.values())
    if not _disjoint(sorted(chain.from_iterable(claims.values()))):
        claimed = total(union(chain.from_iterable(claims.values())))
        taken: Intervals = []
        for name, claim in claims.items():
            sizes[name] = total(subtract(claim, taken))
            taken = union(taken + claim)
    sizes["other"] = duration_ns - claimed
    return {name: sizes[name] for name in _in_order(tuple(sizes))}


def _disjoint(ordered: Intervals) -> bool:
    """Returns whether no two of these share a point."""
    reach = 0
    for start, end in ordered:
        if start < reach:
            return False
        reach = end
    return True


@lru_cache(maxsize=256)
def _in_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what is no phase, then the phases in their order."""
    return (*(name for name in names if name not in PHASES), *(phase for phase in PHASES if phase in names))


_start = attrgetter("start")
