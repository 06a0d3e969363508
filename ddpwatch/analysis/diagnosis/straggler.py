"""Finds the straggler: which rank launches its buckets late beyond noise, from which bucket on, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.thresholds import (
    ENOUGH_STEPS,
    LATE_NS,
    LATE_SHARE,
    STRAGGLER_CERTAINTY,
    STRAGGLER_STEPS,
)
from ddpwatch.analysis.digest import StepDigest, p50
from ddpwatch.sampling.bounds import median_bounds

_COMPARED_PHASES = ("data", "between", "forward", "backward")
_FEW_RANKS = 16
_REFERENCE_RANKS = 8  # whose gradients are compared with the straggler's


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that is late beyond noise.

    Attributes:
        late_ns: Its median lateness.
        bucket: Index of the first bucket that it launches late.
        phase: The phase of the step in which it needs more time than the others; empty if none stands out.
        excess_ns: How much more, median against median.
        param: The first parameter whose gradient comes that late, if the phase is the backward.
        steps: How many steps this rests on.
        peers: The ranks of its group, if these are not all of the job.
    """

    rank: int
    late_ns: float
    bucket: int | None
    phase: str
    excess_ns: float
    param: int | None = None
    steps: int = 0
    peers: tuple[int, ...] = ()


def find_straggler(steps: Sequence[StepDigest]) -> Straggler | None:
    """The latest rank of the newest steps (oldest first), if its lateness stands clear of what is typical.

    Its median must lie above that of a typical rank with `STRAGGLER_CERTAINTY`, by more than `LATE_NS` and by more than
    `LATE_SHARE` of a step. Of 16 steps 12 have to show it, of 8 all but one.
    """
    steps = _newest(steps)
    if len(steps) < ENOUGH_STEPS:
        return None
    late = {rank: values for rank in steps[-1].ranks if (values := lateness(rank, steps))}
    if len(late) < 2:
        return None
    rank = max(late, key=lambda rank: median(late[rank]))
    peers = _peers(rank, steps)
    typical = [float(value) for step in steps if (value := step.typical_late(rank)) is not None]
    (low, _), (_, high) = median_bounds(late[rank], STRAGGLER_CERTAINTY), median_bounds(typical, STRAGGLER_CERTAINTY)
    step_ns = median(step.ranks[rank].figures.step_ns for step in steps if rank in step.ranks)
    if low - high < max(LATE_NS, LATE_SHARE * step_ns):
        return None
    p50 = median(late[rank])
    phase, excess = _cause(rank, p50, steps)
    param = _late_param(rank, p50, _with_hooks(rank, steps), peers) if phase == "backward" else None
    bucket = _first_late_bucket(rank, p50, steps)
    subset = peers if len(peers) < len(steps[-1].ranks) else ()
    return Straggler(rank, p50, bucket, phase, excess, param, len(steps), subset)


def _peers(rank: int, steps: Sequence[StepDigest]) -> tuple[int, ...]:
    """The ranks that it was compared with last, and itself."""
    return next(step.skew.peers[rank] for step in reversed(steps) if rank in step.skew.peers)


def lateness(rank: int, steps: Sequence[StepDigest]) -> list[int]:
    """How late the rank was in each step in which it can be compared (ns)."""
    return [step.skew.late[rank] for step in steps if rank in step.skew.late]


def _newest(steps: Sequence[StepDigest]) -> Sequence[StepDigest]:
    """The newest steps in which ranks can be compared, and some older ones where few of the newest can."""
    judged = [step for step in steps if step.skew.late]
    newest = [step for step in judged if step.across.step > steps[-1].across.step - STRAGGLER_STEPS]
    return newest if len(newest) >= ENOUGH_STEPS else judged[-ENOUGH_STEPS:]


def _first_late_bucket(rank: int, late_ns: float, steps: Sequence[StepDigest]) -> int | None:
    """The first bucket, in launch order, that shows at least half of the rank's lateness."""
    samples: dict[int, list[int]] = {}
    for step in steps:
        own = step.ranks.get(rank)
        launches = dict(zip(own.keys, own.launch, strict=True)) if own is not None else {}
        for key, bucket in step.skew.buckets.items():
            if key in launches:
                samples.setdefault(key[1], []).append(launches[key] - bucket.first)
    return next((index for index, values in samples.items() if 2 * median(values) >= late_ns), None)


def _cause(rank: int, late_ns: float, steps: Sequence[StepDigest]) -> tuple[str, float]:
    """The phase of the step that explains at least half of the rank's lateness, and its excess over the others."""
    excess = {}
    for phase in _COMPARED_PHASES:
        own = p50(step.ranks[rank].figures.phases_ns.get(phase) for step in steps if rank in step.ranks)
        others = p50(_others(rank, phase, step) for step in steps)
        if own is not None and others is not None:
            excess[phase] = own - others
    phase = max(excess, key=excess.__getitem__)
    return (phase, excess[phase]) if late_ns and 2 * excess[phase] >= late_ns else ("", 0.0)


def _others(rank: int, phase: str, step: StepDigest) -> float | None:
    """The median over the other ranks of its group; among many ranks, one more or less does not change it."""
    peers = step.skew.peers.get(rank, tuple(step.ranks))
    if len(peers) == len(step.ranks) > _FEW_RANKS:
        return step.phase_p50(phase)
    return p50(step.ranks[other].figures.phases_ns.get(phase) for other in peers if other != rank)


def _with_hooks(rank: int, steps: Sequence[StepDigest]) -> StepAcrossRanks:
    """The newest step with hook fires of the rank, which not every shadow step has; else simply the newest."""
    newest_first = (step.across for step in reversed(steps))
    hooked = (across for across in newest_first if rank in across.members and across.ranks[rank].hook_param)
    return next(hooked, steps[-1].across)


def _late_param(rank: int, late_ns: float, across: StepAcrossRanks, peers: Sequence[int]) -> int | None:
    """The first parameter, in firing order, whose gradient shows at least half of the rank's lateness."""
    others = [other for other in peers if other != rank and other in across.members][:_REFERENCE_RANKS]
    if rank not in across.members or not others:
        return None
    references = [_fires(across, number) for number in others]
    for param, at in _fires(across, rank).items():
        seen = [fires[param] for fires in references if param in fires]
        if seen and 2 * (at - median(seen)) >= late_ns:
            return param
    return None


def _fires(across: StepAcrossRanks, rank: int) -> dict[int, int]:
    """When each parameter's hook fired (ns, absolute), in firing order."""
    step = across.ranks[rank]
    return {param: step.start_ns + at for param, at in zip(step.hook_param, step.hook_ns, strict=True)}
