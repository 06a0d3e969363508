"""The newest steps of a run summed up: means of time, medians of lateness.

The definitions are those of ``docs/metrics.md``. Times in ns; what was not measured, or cannot be compared, is None.
With a thousand ranks this has to be cheap: each step is digested once, and a rank's figures wait until they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.digest import StepDigest
from ddpwatch.analysis.means import Sums, chosen, merged
from ddpwatch.common.statistics import p50


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank: means over the same steps as those of the `Summary`; of ``late_ns``, ``wait_ns`` and ``cost`` medians.

    ``phases_ns`` has the phases of a step that are known; ``clock_error_ns`` is the largest of any step, None if the
    ranks share one host's clock.
    """

    rank: int
    step_ns: float | None = None
    late_ns: float | None = None
    wait_ns: float | None = None
    overlap: float | None = None
    exposed_ns: float | None = None
    cost: float | None = None
    clock_error_ns: int | None = None
    phases_ns: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summary:
    """The newest steps: means over steps and ranks (`ddpwatch.analysis.means`); ``rate`` is in steps/s.

    ``step_p50_ns`` and ``cost`` are medians over every watched step.
    """

    count: int = 0
    rate: float | None = None
    step_ns: float | None = None
    step_p50_ns: float | None = None
    comm_ns: float | None = None
    overlap: float | None = None
    exposed_ns: float | None = None
    phases_ns: dict[str, float] = field(default_factory=dict)
    communicates: bool = False
    cost: float | None = None
    ranks: Mapping[int, RankSummary] = field(default_factory=dict)


class RankSummaries(Mapping[int, RankSummary]):
    """The figures of every rank in the newest step, each computed on its first access."""

    def __init__(self, steps: Sequence[StepDigest], averaged: Sequence[StepDigest]) -> None:
        self._steps = steps
        self._averaged = averaged
        self._ranks = sorted(steps[-1].ranks)
        self._known: dict[int, RankSummary] = {}

    def __getitem__(self, rank: int) -> RankSummary:
        if rank not in self._steps[-1].ranks:
            raise KeyError(rank)
        if rank not in self._known:
            self._known[rank] = _rank_summary(rank, self._steps, self._averaged)
        return self._known[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class Summariser:
    """Sums up a moving window: a step is digested when it comes in, and again when another rank has sent it."""

    def __init__(self) -> None:
        self._digests: dict[int, StepDigest] = {}

    def summarise(self, steps: Sequence[StepAcrossRanks]) -> Summary:
        """Sums up the given steps (oldest first)."""
        known, self._digests = self._digests, {}
        for across in steps:
            digest = known.get(across.step)
            if digest is None or len(digest.ranks) != len(across):
                digest = StepDigest(across)
            self._digests[across.step] = digest
        return _summary(list(self._digests.values()))


def summarise(steps: Sequence[StepAcrossRanks]) -> Summary:
    """Sums up the given steps (oldest first)."""
    return Summariser().summarise(steps)


def _summary(steps: Sequence[StepDigest]) -> Summary:
    if not steps:
        return Summary()
    kinds = chosen(Counter(step.kind for step in steps))
    averaged = [step for step in steps if step.kind in kinds]
    sums = merged(step.sums for step in averaged)
    return Summary(
        count=len(steps),
        rate=_rate(steps),
        step_ns=sums.step_ns,
        step_p50_ns=p50(step.sums.step_ns for step in steps),
        comm_ns=sums.comm_ns,
        overlap=sums.overlap,
        exposed_ns=sums.exposed_ns,
        phases_ns=sums.known_phases_ns,
        communicates=any(rank.keys for step in steps for rank in step.ranks.values()),
        cost=p50(chain.from_iterable(step.cost for step in steps)),
        ranks=RankSummaries(steps, averaged),
    )


def _rate(steps: Sequence[StepDigest]) -> float | None:
    """Returns the lowest rank's steps per second, from the durations of its watched steps: steps leave no gap."""
    rank = min(steps[-1].ranks, default=None)
    if rank is None:
        return None
    durations = [step.ranks[rank].figures.step_ns for step in steps if rank in step.ranks]
    return len(durations) / sum(durations) * 1e9 if sum(durations) else None


def _rank_summary(rank: int, steps: Sequence[StepDigest], averaged: Sequence[StepDigest]) -> RankSummary:
    own = [step.ranks[rank] for step in steps if rank in step.ranks]
    sums = Sums(step.ranks[rank].figures for step in averaged if rank in step.ranks)
    return RankSummary(
        rank=rank,
        step_ns=sums.step_ns,
        late_ns=p50(step.skew.late.get(rank) for step in steps),
        wait_ns=p50(step.skew.wait.get(rank) for step in steps),
        clock_error_ns=max((step.skew.errors[rank] for step in steps if rank in step.skew.errors), default=None),
        overlap=sums.overlap,
        exposed_ns=sums.exposed_ns,
        cost=p50(fact.cost for fact in own),
        phases_ns=sums.known_phases_ns,
    )
