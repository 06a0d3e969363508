"""The newest steps of a run summed up: means of time, medians of lateness.

The definitions are those of ``docs/metrics.md``. Times in ns; what was not measured, or cannot be compared, is None.
With a thousand ranks this has to be cheap: each step is digested once, and a rank's figures wait until they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from statistics import fmean

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.digest import StepDigest
from ddpwatch.analysis.estimate import NOT_KNOWN, Estimate, Estimator
from ddpwatch.analysis.means import Known, chosen, share_of_run
from ddpwatch.common.statistics import p50


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank: means over the same steps as those of the `Summary`; of ``late_ns`` and ``wait_ns`` medians.

    ``phases_ns`` has the phases of a step that are known; ``clock_error_ns`` is the largest of any step, None if the
    ranks share one host's clock.
    """

    rank: int
    step_ns: float | None = None
    late_ns: float | None = None
    wait_ns: float | None = None
    overlap: float | None = None
    exposed_ns: float | None = None
    clock_error_ns: int | None = None
    phases_ns: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summary:
    """The newest steps: figures of all of them (`ddpwatch.analysis.estimate`), and ``rate`` in steps/s.

    ``count`` is of watched steps, ``step_p50_ns`` the median of all.
    """

    count: int = 0
    rate: float | None = None
    step_p50_ns: float | None = None
    communicates: bool = False
    estimate: Estimate = NOT_KNOWN
    ranks: Mapping[int, RankSummary] = field(default_factory=dict)

    @property
    def step_ns(self) -> float | None:
        """The mean step."""
        return self.estimate.step_ns

    def with_lateness_since(self, step: int) -> Summary:
        """Returns it with how late ranks have been since that step only, if it has such steps."""
        return replace(self, ranks=self.ranks.late_since(step)) if isinstance(self.ranks, RankSummaries) else self

    @property
    def exposed_ns(self) -> float | None:
        """What communication adds to a mean step."""
        return self.estimate.exposed_ns


class RankSummaries(Mapping[int, RankSummary]):
    """The figures of every rank in the newest watched step, each computed on its first access."""

    def __init__(self, steps: Sequence[StepDigest], watched: Sequence[StepDigest], run: Estimate) -> None:
        self._steps = steps
        self._watched = watched
        self._chosen = _known(watched)
        self._run = run.means
        every = Known()
        for timed, step in self._chosen:
            every.watched.merge(step.sums)
            if timed:
                every.full.merge(step.sums)
        self._every = every.means()
        self._ranks = sorted(watched[-1].ranks)
        self._since: Sequence[StepDigest] = watched  # of which lateness is
        self._known: dict[int, RankSummary] = {}

    def late_since(self, step: int) -> RankSummaries:
        """Returns the same figures, but for how late the ranks have been: that of steps from then on, if any are."""
        found = copy(self)
        found._since, found._known = [one for one in self._watched if one.across.step >= step] or self._watched, {}
        return found

    def __getitem__(self, rank: int) -> RankSummary:
        if rank not in self._watched[-1].ranks:
            raise KeyError(rank)
        if rank not in self._known:
            self._known[rank] = self._summary(rank)
        return self._known[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def _summary(self, rank: int) -> RankSummary:
        steps, late = self._watched, self._since
        known = Known()
        for timed, step in self._chosen:
            if rank in step.ranks:
                known.watched.add_figures(step.ranks[rank].figures)
                if timed:
                    known.full.add_figures(step.ranks[rank].figures)
        taken = [
            (step.durations[rank], step.share.alone.get(rank, 0)) for step in self._steps if rank in step.durations
        ]
        step_ns, alone_ns = map(fmean, zip(*taken, strict=True))
        means = share_of_run(step_ns, known.means(), self._every, self._run, alone_ns)
        return RankSummary(
            rank=rank,
            step_ns=means.step_ns,
            late_ns=p50(step.skew.late.get(rank) for step in late),
            wait_ns=p50(step.skew.wait.get(rank) for step in late),
            clock_error_ns=max((step.skew.errors[rank] for step in steps if rank in step.skew.errors), default=None),
            overlap=means.overlap,
            exposed_ns=means.exposed_ns,
            phases_ns=dict(means.phases_ns),
        )


class Summariser:
    """Sums up a moving window: a step is digested when it comes in, and again once what it adds is another."""

    def __init__(self) -> None:
        self._digests: dict[int, StepDigest] = {}

    def summarise(self, steps: Sequence[StepAcrossRanks]) -> Summary:
        """Sums up the given steps (oldest first)."""
        known, self._digests = self._digests, {}
        for across in steps:
            digest = known.get(across.step)
            if digest is None or digest.share is not across.share:
                digest = StepDigest(across)
            self._digests[across.step] = digest
        return _summary(list(self._digests.values()))


def summarise(steps: Sequence[StepAcrossRanks]) -> Summary:
    """Sums up the given steps (oldest first)."""
    return Summariser().summarise(steps)


def _summary(steps: Sequence[StepDigest]) -> Summary:
    watched = [step for step in steps if step.ranks]
    if not watched:
        return Summary()
    estimator = Estimator()
    for step in steps:
        estimator.add_share(step.share)
    found = estimator.estimate()
    return Summary(
        count=len(watched),
        rate=1e9 / found.step_ns if found.step_ns else None,
        step_p50_ns=p50(step.share.mean_ns for step in steps),
        communicates=any(rank.keys for step in watched for rank in step.ranks.values()),
        estimate=found,
        ranks=RankSummaries(steps, watched, found),
    )


def _known(steps: Sequence[StepDigest]) -> list[tuple[bool, StepDigest]]:
    """Returns the steps that show how ranks differ, and whether their communication was timed."""
    kinds = chosen(Counter(step.kind for step in steps))
    return [(step.kind.measured, step) for step in steps if step.kind in kinds]
