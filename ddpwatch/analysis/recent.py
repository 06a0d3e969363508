"""The newest steps of a run summed up: medians per rank, the exposed part per bucket, and the slowest rank.

The definitions are those of ``docs/metrics.md``. Times in ns; what was not measured, or cannot be compared, is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low, quantiles
from typing import Protocol

from ddpwatch.analysis.intervals import intersect, total
from ddpwatch.analysis.ranks import BucketFigures
from ddpwatch.analysis.steps import PARTS, StepFigures
from ddpwatch.messages import Step

NOISE_NS = 1_000_000
NOISE_SHARE = 0.03
ENOUGH_STEPS = 8


class StepOfRanks(Protocol):
    """One step over its ranks, with the figures worked out (`ddpwatch.state.StepView`)."""

    step: int

    @property
    def ranks(self) -> Mapping[int, Step]:
        """The ranks' frames."""

    @property
    def figures(self) -> Mapping[int, StepFigures]:
        """Figures per rank."""

    @property
    def buckets(self) -> Sequence[BucketFigures]:
        """Buckets compared over the ranks; empty where they are not comparable."""


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Medians of one rank. ``parts_ns`` are the six parts of a step, ``late_low_ns`` the lower quartile of lateness."""

    rank: int
    step_ns: float | None = None
    late_ns: float | None = None
    late_low_ns: float | None = None
    wait_ns: float | None = None
    overlap: float | None = None
    exposed_ns: float | None = None
    cost: float | None = None
    parts_ns: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank that is late beyond noise.

    Attributes:
        late_ns: Its median lateness.
        bucket: Index of the first bucket that it launches late.
        part: The part of the step (`PARTS`) in which it needs more time than the others; empty if none stands out.
        excess_ns: How much more, median against median.
    """

    rank: int
    late_ns: float
    bucket: int | None
    part: str
    excess_ns: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the newest steps and all ranks. ``bucket_exposed_ns`` is by bucket index, ``rate`` in steps/s."""

    count: int = 0
    rate: float | None = None
    step_ns: float | None = None
    comm_ns: float | None = None
    overlap: float | None = None
    exposed_ns: float | None = None
    measured: bool = True
    communicates: bool = False
    cost: float | None = None
    ranks: dict[int, RankSummary] = field(default_factory=dict)
    bucket_exposed_ns: dict[int, float] = field(default_factory=dict)
    slowest: Slowest | None = None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one step contributes, worked out once.

    Attributes:
        steps: The ranks' frames.
        figures: Figures per rank.
        buckets: Buckets compared over the ranks; empty where they are not comparable.
        late: Lateness per rank, its largest over the buckets; empty likewise.
        wait: Likewise how long each rank waited.
        exposed: Per bucket index, how much of its [launch, done] was exposed, one value per rank.
    """

    steps: Mapping[int, Step]
    figures: Mapping[int, StepFigures]
    buckets: Sequence[BucketFigures]
    late: dict[int, int]
    wait: dict[int, int]
    exposed: dict[int, list[int]]


def step_facts(view: StepOfRanks) -> StepFacts:
    """Works out one step."""
    ranks = view.ranks if view.buckets else ()
    return StepFacts(
        steps=view.ranks,
        figures=view.figures,
        buckets=view.buckets,
        late={rank: max(bucket.late[rank] for bucket in view.buckets) for rank in ranks},
        wait={rank: max(bucket.wait[rank] for bucket in view.buckets) for rank in ranks},
        exposed=_bucket_exposed(view),
    )


def _bucket_exposed(view: StepOfRanks) -> dict[int, list[int]]:
    samples: dict[int, list[int]] = {}
    for rank, step in view.ranks.items():
        exposed = view.figures[rank].exposed
        for index, launch, done in zip(step.bucket_index, step.bucket_launch, step.bucket_done, strict=True):
            if done is not None:
                samples.setdefault(index, []).append(total(intersect(exposed, [(launch, done)])))
    return samples


class Summariser:
    """Sums up a window that moves on: a step is worked out when it comes in, and kept until it leaves."""

    def __init__(self) -> None:
        self._facts: dict[int, StepFacts] = {}

    def summarise(self, views: Sequence[StepOfRanks]) -> Summary:
        """Sums up the given steps (oldest first)."""
        known = self._facts
        self._facts = {}
        for view in views:
            facts = known.get(view.step)
            if facts is None or len(facts.figures) != len(view.ranks):
                facts = step_facts(view)
            self._facts[view.step] = facts
        return _summary(list(self._facts.values()))


def summarise(views: Sequence[StepOfRanks]) -> Summary:
    """Sums up the given steps (oldest first)."""
    return Summariser().summarise(views)


def _summary(facts: Sequence[StepFacts]) -> Summary:
    if not facts:
        return Summary()
    rows = [figures for fact in facts for figures in fact.figures.values()]
    ranks = {rank: _rank_summary(rank, facts) for rank in sorted(facts[-1].steps)}
    return Summary(
        count=len(facts),
        rate=_rate(facts),
        step_ns=_p50(row.step_ns for row in rows),
        comm_ns=_p50(row.comm_ns for row in rows),
        overlap=_p50(row.overlap for row in rows),
        exposed_ns=_p50(row.exposed_ns for row in rows if row.comm_ns),
        measured=any(row.comm_ns is not None for row in rows),
        communicates=any(step.bucket_index for fact in facts for step in fact.steps.values()),
        cost=_p50(summary.cost for summary in ranks.values()),
        ranks=ranks,
        bucket_exposed_ns=_exposed_p50(facts),
        slowest=_slowest(facts, ranks),
    )


def _p50(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _quartile(values: Sequence[float], which: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=4, method="inclusive")[which - 1]


def _rate(facts: Sequence[StepFacts]) -> float | None:
    """Steps per second of the lowest rank; the durations leave no gap, so their sum is the time that passed."""
    rank = min(facts[-1].steps, default=None)
    durations = [fact.steps[rank].duration_ns for fact in facts if rank in fact.steps] if rank is not None else []
    return len(durations) / sum(durations) * 1e9 if sum(durations) else None


def _rank_summary(rank: int, facts: Sequence[StepFacts]) -> RankSummary:
    rows = [fact.figures[rank] for fact in facts if rank in fact.figures]
    late = [fact.late[rank] for fact in facts if rank in fact.late]
    return RankSummary(
        rank=rank,
        step_ns=_p50(row.step_ns for row in rows),
        late_ns=_p50(late),
        late_low_ns=_quartile(late, 1),
        wait_ns=_p50(fact.wait.get(rank) for fact in facts),
        overlap=_p50(row.overlap for row in rows),
        exposed_ns=_p50(row.exposed_ns if row.comm_ns else None for row in rows),
        cost=_p50(_cost(fact.steps[rank]) for fact in facts if rank in fact.steps),
        parts_ns={part: median(row.parts_ns[part] for row in rows) for part in PARTS},
    )


def _cost(step: Step) -> float | None:
    return step.own_ns / step.duration_ns if step.duration_ns else None


def _exposed_p50(facts: Sequence[StepFacts]) -> dict[int, float]:
    """Median exposed time per bucket index, over steps and ranks."""
    indices = sorted({index for fact in facts for index in fact.exposed})
    return {index: median(value for fact in facts for value in fact.exposed.get(index, ())) for index in indices}


def _slowest(facts: Sequence[StepFacts], ranks: Mapping[int, RankSummary]) -> Slowest | None:
    """The latest rank, if its lateness stands clear of what is usual.

    That is: its lower quartile lies above the upper one of a typical rank, by more than `NOISE_NS` and by more than
    `NOISE_SHARE` of a step.
    """
    late = {rank: summary.late_ns for rank, summary in ranks.items() if summary.late_ns is not None}
    if len(late) < 2 or len(facts) < ENOUGH_STEPS:
        return None
    rank = max(late, key=late.__getitem__)
    usual = [float(median_low(fact.late.values())) for fact in facts if fact.late]
    low, high, step_ns = ranks[rank].late_low_ns, _quartile(usual, 3), ranks[rank].step_ns
    if low is None or high is None or step_ns is None or low - high < max(NOISE_NS, NOISE_SHARE * step_ns):
        return None
    part, excess = _cause(rank, ranks)
    return Slowest(rank, late[rank], _first_late_bucket(rank, late[rank], facts), part, excess)


def _first_late_bucket(rank: int, late_ns: float, facts: Sequence[StepFacts]) -> int | None:
    """The first bucket, in launch order, that the rank launches at least half of its lateness late."""
    samples: dict[int, list[int]] = {}
    for fact in facts:
        for bucket in fact.buckets:
            if rank in bucket.late:
                samples.setdefault(bucket.key[1], []).append(bucket.late[rank])
    return next((index for index, values in samples.items() if 2 * median(values) >= late_ns), None)


def _cause(rank: int, ranks: Mapping[int, RankSummary]) -> tuple[str, float]:
    """The part of the step that explains at least half of the rank's lateness, and its excess over the others."""
    own = ranks[rank]
    excess = {}
    for part in ("input", "forward", "backward"):
        others = [other.parts_ns[part] for other in ranks.values() if other.rank != rank]
        excess[part] = own.parts_ns[part] - median(others)
    part = max(excess, key=excess.__getitem__)
    return (part, excess[part]) if own.late_ns and 2 * excess[part] >= own.late_ns else ("", 0.0)
