"""One rank's step: what it consists of, and how much of its communication was exposed.

The definitions are those of ``docs/metrics.md``. Overlap is |C ∩ K| / |C| as in HolisticTraceAnalysis, with C the union
of [launch, done] over the buckets and K the forward and backward compute intervals.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpwatch.analysis.intervals import Intervals, intersect, subtract, total, union
from ddpwatch.messages import Step

PARTS = ("input", "forward", "backward", "exposed_comm", "optimizer", "other")
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step of one rank. Times in ns.

    Attributes:
        step_ns: From the end of the previous step's optimizer to the end of this one's.
        parts_ns: The six PARTS; they add up to ``step_ns`` without remainder.
        comm_ns: |C|, None if the completion of a bucket was not measured, 0 if nothing was communicated.
        exposed_ns: |C| - |C ∩ K|, None likewise.
        overlap: |C ∩ K| / |C| from 0 to 1; None if there was no communication, or it was not measured.
        exposed: Where the exposed communication lies, as offsets from the step's start.
    """

    step_ns: int
    parts_ns: dict[str, int]
    comm_ns: int | None
    exposed_ns: int | None
    overlap: float | None
    exposed: Intervals


def figures(step: Step) -> StepFigures:
    """Works out the figures of one step."""
    whole = [(0, step.duration_ns)] if step.duration_ns else []
    forward, backward, optimizer = (_within(spans_of(step, phase), step) for phase in _COMPUTE_AND_OPTIMIZER)
    compute = union([*forward, *backward])
    comm = comm_of(step)
    measured = comm is not None
    inside = _within(comm or [], step)
    exposed = subtract(inside, compute)
    parts = _parts(step, whole, forward, backward, exposed, optimizer)
    comm_ns, exposed_ns = total(inside), total(exposed)
    return StepFigures(
        step_ns=step.duration_ns,
        parts_ns=parts,
        comm_ns=comm_ns if measured else None,
        exposed_ns=exposed_ns if measured else None,
        overlap=(comm_ns - exposed_ns) / comm_ns if measured and comm_ns else None,
        exposed=exposed,
    )


_COMPUTE_AND_OPTIMIZER = ("forward", "backward", "optimizer")


def _within(intervals: Intervals, step: Step) -> Intervals:
    """What of the intervals lies in the step; nearly always all of it."""
    if not intervals or (intervals[0][0] >= 0 and intervals[-1][1] <= step.duration_ns):
        return intervals
    return intersect(intervals, [(0, step.duration_ns)] if step.duration_ns else [])


def spans_of(step: Step, phase: str) -> Intervals:
    """The stretches of a phase, as offsets from the step's start."""
    return union((span.start, span.end) for span in step.spans if span.phase == phase)


def comm_of(step: Step) -> Intervals | None:
    """C: when at least one bucket was on its way. None if a completion was not measured."""
    pairs = []
    for launch, done in zip(step.bucket_launch, step.bucket_done, strict=True):
        if done is None:
            return None
        pairs.append((launch, done))
    return union(pairs)


def _parts(
    step: Step, whole: Intervals, forward: Intervals, backward: Intervals, exposed: Intervals, optimizer: Intervals
) -> dict[str, int]:
    """Splits the step. What two parts could claim goes to the first of forward, backward, exposed, optimizer, input."""
    left = whole
    parts = {}
    claims = {
        "forward": forward,
        "backward": backward,
        "exposed_comm": exposed,
        "optimizer": optimizer,
        "input": _input_gaps(step),
    }
    before = total(left)
    for name, claim in claims.items():
        left = subtract(left, claim) if claim else left
        after = total(left)
        parts[name], before = before - after, after
    parts["other"] = before
    return {name: parts[name] for name in PARTS}


def _input_gaps(step: Step) -> Intervals:
    """The time before each forward since the step's start, or since the backward of the micro-batch before it."""
    gaps, since = [], 0
    for span in sorted(step.spans, key=lambda span: span.start):
        if span.phase == "forward":
            gaps.append((since, span.start))
        since = span.end
    return union(gaps)
