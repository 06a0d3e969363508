"""One rank's step: what it consists of, and how much of its communication was exposed.

The definitions are those of ``docs/metrics.md``. Overlap is |C ∩ K| / |C| as in HolisticTraceAnalysis, with C the union
of [launch, done] over the buckets and K the forward and backward compute intervals.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter
from typing import NamedTuple, cast

from ddpwatch.analysis.intervals import Intervals, intersect, subtract, total, union
from ddpwatch.messages import Step

PHASES = ("input", "forward", "backward", "exposed_comm", "optimizer", "other")
NS_PER_MS = 1e6


class StepFigures(NamedTuple):
    """Figures of one step of one rank. Times in ns.

    Attributes:
        step_ns: From the end of the previous step's optimizer to the end of this one's.
        phases_ns: The six PHASES; they add up to ``step_ns`` without remainder. Empty for an unwatched step.
        comm_ns: |C|, None if the completion of a bucket was not measured, 0 if nothing was communicated.
        exposed_ns: |C| - |C ∩ K|, None likewise.
        overlap: |C ∩ K| / |C| from 0 to 1; None if there was no communication, or it was not measured.
        exposed: Where the exposed communication lies, as offsets from the step's start. Where completions were not
            measured, the time in which the backward waited for its buckets.
    """

    step_ns: int
    phases_ns: dict[str, int]
    comm_ns: int | None
    exposed_ns: int | None
    overlap: float | None
    exposed: Intervals


def figures(step: Step) -> StepFigures:
    """Works out the figures of one step."""
    phases = spans_of(step)
    forward, backward, optimizer = (_within(phases[name], step) for name in ("forward", "backward", "optimizer"))
    comm = comm_of(step)
    measured = comm is not None
    inside = _within(comm or [], step)
    exposed = subtract(inside, union(forward + backward)) if measured else _waits(step)
    comm_ns, exposed_ns = total(inside), total(exposed)
    claims = {
        "forward": forward,
        "backward": backward,
        "exposed_comm": exposed,
        "optimizer": optimizer,
        "input": _within(_input_gaps(step), step),
    }
    return StepFigures(
        step_ns=step.duration_ns,
        phases_ns={} if step.status == "unwatched" else _split(step.duration_ns, claims),
        comm_ns=comm_ns if measured else None,
        exposed_ns=exposed_ns if measured else None,
        overlap=(comm_ns - exposed_ns) / comm_ns if measured and comm_ns else None,
        exposed=exposed,
    )


def _waits(step: Step) -> Intervals:
    """When the backward did nothing but wait for its buckets: what is known of the exposed time without completions."""
    return _within(union((span.start, span.end) for span in step.spans if span.phase == "sync"), step)


def _within(intervals: Intervals, step: Step) -> Intervals:
    """What of the intervals lies in the step; nearly always all of it."""
    if not intervals or (intervals[0][0] >= 0 and intervals[-1][1] <= step.duration_ns):
        return intervals
    return intersect(intervals, [(0, step.duration_ns)] if step.duration_ns else [])


def spans_of(step: Step) -> dict[str, Intervals]:
    """The stretches of the phases that do something, as offsets from the step's start."""
    found: dict[str, Intervals] = {"forward": [], "backward": [], "optimizer": []}
    for span in step.spans:
        if span.phase != "sync":
            found[span.phase].append((span.start, span.end))
    return {phase: union(stretches) for phase, stretches in found.items()}


def comm_of(step: Step) -> Intervals | None:
    """C: when at least one bucket was on its way. None if a completion was not measured."""
    if None in step.bucket_done or step.status == "unwatched":
        return None
    return union(zip(step.bucket_launch, cast("list[int]", step.bucket_done), strict=True))


def _split(duration_ns: int, claims: dict[str, Intervals]) -> dict[str, int]:
    """Splits the step. What several phases could claim goes to the first of them; what none does is "other"."""
    sizes = {name: total(claim) for name, claim in claims.items()}
    claimed = total(union(chain.from_iterable(claims.values())))
    if claimed != sum(sizes.values()):
        taken: Intervals = []
        for name, claim in claims.items():
            sizes[name] = total(subtract(claim, taken))
            taken = union(taken + claim)
    sizes["other"] = duration_ns - claimed
    return {name: sizes[name] for name in PHASES}


def _input_gaps(step: Step) -> Intervals:
    """The time before each forward since the step's start, or since the backward of the micro-batch before it."""
    gaps, since = [], 0
    for span in sorted(step.spans, key=_start):
        if span.phase == "forward":
            gaps.append((since, span.start))
        since = span.end
    return union(gaps)


_start = attrgetter("start")
