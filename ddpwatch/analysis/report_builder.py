"""The report of a run: figures over all its steps, in one pass over the frames.

Pass every message to `ReportBuilder.apply_message`, then call `ReportBuilder.report`. Memory grows with ranks and
buckets: of runs with more steps than `MOST_SAMPLED`, or many ranks, percentiles are those of a random sample of the
steps.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import cast

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.buckets import (
    MOST_NAMED,
    Bucket,
    BucketColumns,
    bucket_columns,
    cost_order,
    epoch_of,
    most_often_last,
    newest_layouts,
)
from ddpwatch.analysis.diagnosis.incident import end_of
from ddpwatch.analysis.diagnosis.words.turned_off import Off, TurnedOff
from ddpwatch.analysis.diagnosis.words.why_unwatched import forwards_known
from ddpwatch.analysis.estimate import Estimate
from ddpwatch.analysis.figures import (
    CollectiveFigures,
    CostFigures,
    GroupFigures,
    OffFigures,
    RankFigures,
    Report,
    RunFigures,
    RunTime,
    StepCounts,
    VerdictFigures,
    overlap_figures,
    phases_figures,
)
from ddpwatch.analysis.groups import OtherCollectives
from ddpwatch.analysis.launch_skew import LaunchSkew, RankFacts, the_only
from ddpwatch.analysis.means import Known, MeanBuilder, Means, merged, share_of_run
from ddpwatch.analysis.run import Run
from ddpwatch.analysis.step import MUCH_REST, missing_steps, rest_after
from ddpwatch.analysis.step_sample import StepSample
from ddpwatch.analysis.window import RankSummary, Summary
from ddpwatch.common.statistics import quantile
from ddpwatch.common.units import NS_PER_MS, to_ms
from ddpwatch.sampling.cost import CostMeter
from ddpwatch.sampling.lease import FULL_PPM
from ddpwatch.sampling.levels import ORDINARY
from ddpwatch.wire.messages import Beat, Bye, Hello, Mark, Message, Status, Step, StepStatus, run_before

MOST_SAMPLED = 16_384  # steps of which percentiles are
MOST_SAMPLED_OF_RANKS = 524_288  # steps times ranks
LEAST_SAMPLED = 64
_IN_STEP = ("ready", "launch", "done")  # when, of a bucket
_FIGURES = ("per_step", *_IN_STEP, "transfer", "wait", "exposed", "busbw")  # of a bucket
_figures_of = attrgetter(*_FIGURES)
# A step counts as the first of these that any rank reports.
_NOTABLE: tuple[StepStatus, ...] = ("warmup", "aborted", "profiled", "unresolved", "unwatched", "shadow")


class Samples:
    """A growing sample of a figure, 8 bytes per value, with its quantiles."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = array("d")

    def add_value(self, value: float | None) -> None:
        """Adds one value; ignores None."""
        if value is not None:
            self.values.append(value)

    def __len__(self) -> int:
        return len(self.values)

    def p50(self, scale: float = 1.0) -> float | None:
        """Returns the median divided by ``scale``; None without samples."""
        known = [value for value in self.values if value == value]
        return median(known) / scale if known else None

    def quantile(self, q: float, scale: float = 1.0) -> float | None:
        """Returns the ``q`` quantile (nearest rank) divided by ``scale``; None without samples."""
        known = sorted([value for value in self.values if value == value])
        return quantile(known, q) / scale if known else None


@dataclass(slots=True)
class RankSamples:
    """Counts of one rank; its times and ``taken`` are of all steps but warm-up and aborted ones.

    Attributes:
        alone_ns: How long it paused alone before these.
    """

    steps: int = 0
    taken: int = 0
    total_ns: int = 0
    alone_ns: int = 0
    clock_error_ns: int | None = None
    dropped: int = 0
    missing: int = 0
    last_step: Step | None = None
    hello: Hello | None = None
    bye: Bye | None = None


class RankRows:
    """Figures of each rank in a sample of steps, of which each is a row per figure.

    Args:
        most: How many steps are kept.
    """

    def __init__(self, most: int) -> None:
        self._sample = StepSample(most)
        self._rows: list[tuple[tuple[int, ...], list[array[float]]]] = []

    def place(self) -> int | None:
        """Returns the place of the next step; None to leave it out."""
        return self._sample.place()

    def put(self, place: int, ranks: Iterable[int], rows: Iterable[Iterable[float | None]]) -> None:
        """Puts a step's ranks, and per figure a value per rank, into a place."""
        known = [array("d", [math.nan if value is None else value for value in row]) for row in rows]
        self._rows[place : place + 1] = [(tuple(ranks), known)]

    def p50s(self, figure: int, scale: float = 1.0) -> dict[int, float]:
        """Returns by rank the median of a figure, by its place, divided by ``scale``; nothing of ranks without one."""
        values: defaultdict[int, list[float]] = defaultdict(list)
        for ranks, rows in self._rows:
            for rank, value in zip(ranks, rows[figure], strict=True):
                if value == value:
                    values[rank].append(value)
        return {rank: median(known) / scale for rank, known in values.items()}


@dataclass(slots=True)
class BucketSamples:
    """The samples of one bucket of one layout; ``ready``, ``launch`` and ``done`` step by step, NaN if not known."""

    nbytes: int | None = None
    steps: int = 0
    per_step: Samples = field(default_factory=Samples)
    ready: Samples = field(default_factory=Samples)
    launch: Samples = field(default_factory=Samples)
    done: Samples = field(default_factory=Samples)
    transfer: Samples = field(default_factory=Samples)
    wait: Samples = field(default_factory=Samples)
    exposed: Samples = field(default_factory=Samples)
    busbw: Samples = field(default_factory=Samples)
    last: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def extend(self, steps: BucketsTogether, position: int) -> None:
        """Adds the bucket at that position in the steps of its layout."""
        count = len(steps.nbytes)
        self.nbytes = steps.nbytes[position]
        self.steps += steps.steps
        self.last.update(steps.last[position])
        for number, figure in enumerate(_FIGURES):
            own = steps.values[number * count + position :: len(_FIGURES) * count]
            partly = steps.unknown and figure not in _IN_STEP
            getattr(self, figure).values.extend([value for value in own if value == value] if partly else own)

    def in_step_ms(self) -> list[float | None]:
        """Returns when it was ready, launched and done (ms): of the steps that know when it was done, if some do."""
        rows = list(zip(self.ready.values, self.launch.values, self.done.values, strict=True))
        placed = [row for row in rows if row[2] == row[2]] or rows
        known = [[row[place] for row in placed if row[place] == row[place]] for place in range(len(_IN_STEP))]
        return [median(column) / NS_PER_MS if column else None for column in known]


@dataclass(slots=True)
class BucketsTogether:
    """The samples of buckets that are always launched together.

    Attributes:
        nbytes: Of each bucket.
        values: Step by step, of each of the `_FIGURES` a value per bucket: NaN where it is not known.
        unknown: Whether some are not.
        last: Per bucket, which ranks launched it last.
    """

    nbytes: Sequence[int | None] = ()
    steps: int = 0
    values: array[float] = field(default_factory=lambda: array("d"))
    unknown: bool = False
    last: list[Counter[tuple[int, ...]]] = field(default_factory=list)
    sample: StepSample = field(default_factory=lambda: StepSample(MOST_SAMPLED))

    def add_buckets(self, found: BucketColumns) -> None:
        """Adds the buckets of one step."""
        self.nbytes = found.nbytes
        self.steps += 1
        if (place := self.sample.place()) is not None:
            values = list(chain.from_iterable(_figures_of(found)))
            if None in values:
                self.unknown = True
                values = [math.nan if value is None else value for value in values]
            at = place * len(values)
            self.values[at : at + len(values)] = array("d", cast("list[float]", values))
        self.last = self.last or [Counter() for _ in found.buckets]
        for last, ranks in zip(self.last, found.last_ranks, strict=True):
            if ranks:
                last[ranks if len(ranks) <= MOST_NAMED else ()] += 1


class ReportBuilder:
    """Collects the figures of a run.

    Args:
        expected: How many ranks will send a step, where that is fewer than the run has.
        source: The recording, for commands that read it.
    """

    def __init__(self, expected: int | None = None, source: str = "") -> None:
        self.ranks: dict[int, RankSamples] = {}
        self.end: Bye | None = None
        self.collector_restarts = 0
        self._budget: float | None = None  # the greatest
        self._run = Run(expected, source=source)
        self._statuses: Counter[str] = Counter()
        self._cost = CostMeter()
        self._off = TurnedOff()
        self._rest: Counter[str] = Counter()  # what no phase explains (ns), by the phase before
        self._others = OtherCollectives()
        self._step_ns = Samples()
        self._means = MeanBuilder()
        self._counted = self._timed = RankRows(0)  # until it is known how many ranks there are
        self._forwards: bool | None = False
        self._buckets: defaultdict[tuple[int, tuple[Bucket, ...]], BucketsTogether] = defaultdict(BucketsTogether)

    def apply_message(self, message: Message, received_ns: int = 0, frame: bytes = b"") -> list[StepAcrossRanks]:
        """Takes a message, when it was received (ns since the Unix epoch), and the frame that it came in, if known.

        Returns the steps that it completes.
        """
        completed = self._run.apply_message(message, received_ns, frame)
        for across in completed:
            self._close(across)
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, Hello):
            self._rank(message.rank).hello = message
        elif isinstance(message, Beat):
            self._forwards = forwards_known(self._forwards, message)
        elif isinstance(message, Bye):
            if message.rank is None:
                self.end = message
            else:
                self._rank(message.rank).bye = message
                self._forwards = forwards_known(self._forwards, message)
        elif isinstance(message, Status):
            self.collector_restarts = max(self.collector_restarts, message.restarts)
            self._budget = max(self._budget or 0.0, (message.lease_ppm or 0) / FULL_PPM)
            self._cost.add_status(message)
        elif isinstance(message, Mark):
            self._off.apply_message(message)
        return completed

    @property
    def missing_steps(self) -> int:
        """Steps of all ranks that never came, besides those that the ranks dropped."""
        return sum(rank.missing for rank in self.ranks.values())

    def rest(self) -> list[StepAcrossRanks]:
        """Closes the steps that still lack a rank, and returns them."""
        completed = list(self._run.rest())
        for across in completed:
            self._close(across)
        return completed

    def report(self) -> Report:
        """Returns the report so far. Closes the steps that still lack a rank."""
        self.rest()
        found = self._run.estimate()
        return Report(
            run=self._run_row(),
            steps=self._step_counts(found),
            phases_ms=phases_figures(found),
            cost=self._cost_row(),
            overlap=overlap_figures(found),
            groups=[
                GroupFigures(
                    group.id,
                    group.ranks,
                    group.kind,
                    self._run.groups.role(group.id).name,
                    group.backend,
                    self._others.per_step(group.id),
                )
                for group in self._run.groups.known()
            ],
            ranks=self._rank_rows(found),
            collectives=sorted(
                [self._bucket_row(key, found) for key, found in self._current_buckets()], key=_costliest
            ),
            off=[_off_row(off) for off in self._off.found()],
            lost=self._run.lost(),
            incidents=self._run.incidents(),
            verdict=self._verdict(found),
            throughput=self._run.throughput.figures(found.step_ns),
            explained=self._run.explanations.all(),
            rest_after=self._rest_after(found),
        )

    def _rest_after(self, found: Estimate) -> dict[str, float]:
        """Returns which share of the rest lies after which phase; where it lies in steps not watched is not known."""
        rest = found.phases_ns.get("other", 0.0)
        seen = max(0.0, 1 - found.unseen_ns / rest) if rest > 0 else 0.0
        return {phase: seen * ns / self._rest.total() for phase, ns in self._rest.most_common()}

    def time(self) -> RunTime | None:
        """Returns where the rank-time went so far."""
        return self._run.time()

    # -- collecting ------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> RankSamples:
        if rank not in self.ranks:
            self.ranks[rank] = RankSamples()
        return self.ranks[rank]

    def _step(self, step: Step) -> None:
        rank = self.ranks.get(step.rank) or self._rank(step.rank)
        before, rank.last_step = rank.last_step, step
        rank.steps += 1
        if step.status in ORDINARY:
            rank.taken += 1
            rank.total_ns += step.duration_ns
        if before is not None and step.step != before.step + 1:
            rank.missing += missing_steps(before, step)
        if step.dropped > rank.dropped:
            rank.dropped = step.dropped
        self._cost.add_step(step)
        self._others.add_step(step)

    def _close(self, across: StepAcrossRanks) -> None:
        """Counts one step, with all the ranks that have sent it."""
        steps = list(across.ranks.values())
        found = {step.status for step in steps}
        self._statuses[next((status for status in _NOTABLE if status in found), "ok")] += 1
        if not across.reduced:
            self._statuses["unreduced"] += 1
        if across.ordinary and across.share is not None:
            self._step_ns.add_value(across.share.mean_ns)
            for rank, ns in across.share.alone.items():
                self._rank(rank).alone_ns += ns
        if not across.counted:
            return
        facts = across.all_facts()
        self._means.add_step(across.step, {rank: fact.figures for rank, fact in facts.items()})
        self._count_ranks(facts, across.skew)
        for rank, fact in facts.items():
            if fact.figures.phases_ns.get("other", 0) > MUCH_REST * fact.figures.step_ns:
                self._rest.update(rest_after(across.ranks[rank]))
        columns = bucket_columns(across)
        self._buckets[epoch_of(across), columns.buckets].add_buckets(columns)

    def _count_ranks(self, facts: Mapping[int, RankFacts], skew: LaunchSkew) -> None:
        if self._counted is self._timed:
            most = max(min(MOST_SAMPLED, MOST_SAMPLED_OF_RANKS // max(len(self.ranks), 1)), LEAST_SAMPLED)
            self._counted, self._timed = RankRows(most), RankRows(most)
        of_ranks = [fact.figures for fact in facts.values()]
        if (place := self._counted.place()) is not None:
            lateness = (map(skew.late.get, facts), map(skew.wait.get, facts))
            steps, costs = [figures.step_ns for figures in of_ranks], [fact.cost for fact in facts.values()]
            self._counted.put(place, facts, (steps, costs, *lateness))
        exposed = [figures.exposed_ns for figures in of_ranks]
        if any(ns is not None for ns in exposed) and (place := self._timed.place()) is not None:
            self._timed.put(place, facts, ([figures.overlap for figures in of_ranks], exposed))
        for rank, error in skew.errors.items():
            samples = self._rank(rank)
            samples.clock_error_ns = max(error, samples.clock_error_ns or 0)

    def _verdict(self, found: Estimate) -> VerdictFigures:
        """Returns the verdict on all steps: by the rules of the one on a live run's newest."""
        summary = Summary(
            count=found.watched,
            estimate=found,
            communicates=any(buckets for _, buckets in self._buckets),
            ranks={rank: RankSummary(rank) for rank in self.ranks},
        )
        steps = max((rank.steps for rank in self.ranks.values()), default=0)
        verdict = self._run.verdict(summary, self.end, steps, self._forwards)
        return VerdictFigures(verdict.kind, verdict.severity, verdict.with_others(), verdict.next_step)

    # -- rows ------------------------------------------------------------------------------------------------

    def _step_counts(self, found: Estimate) -> StepCounts:
        return StepCounts(
            count=max((rank.steps for rank in self.ranks.values()), default=0),
            warmup=self._statuses["warmup"],
            aborted=self._statuses["aborted"],
            shadow=self._statuses["shadow"],
            unwatched=self._statuses["unwatched"],
            unresolved=self._statuses["unresolved"],
            profiled=self._statuses["profiled"],
            unreduced=self._statuses["unreduced"],
            averaged=found.steps,
            watched=found.watched,
            full=found.full,
            step_ms=to_ms(found.step_ns),
            step_ms_p50=self._step_ns.p50(NS_PER_MS),
            step_ms_p90=self._step_ns.quantile(0.9, NS_PER_MS),
        )

    def _run_row(self) -> RunFigures:
        hellos = [rank.hello for _, rank in sorted(self.ranks.items()) if rank.hello is not None]
        first = hellos[0] if hellos else None
        return RunFigures(
            id=first.run_id if first else None,
            previous=run_before({hello.rank: hello.previous for hello in hellos}) or None,
            world_size=first.world_size if first else None,
            parallelism=self._run.groups.parallelism() or None,
            backend=first.backend if first else None,
            hosts=sorted({hello.host for hello in hellos}),
            model=first.module if first else None,
            torch=first.torch if first else None,
            timing_source=first.timing_source if first else None,
        )

    def _cost_row(self) -> CostFigures:
        cost = self._cost.cost()
        if cost is None:
            return CostFigures(None, None, None, 0, None, self._budget)
        return CostFigures(cost.ratio, cost.low, cost.high, cost.pairs, cost.collector, self._budget)

    def _rank_rows(self, found: Estimate) -> list[RankFigures]:
        step, late, wait = (self._counted.p50s(figure, NS_PER_MS) for figure in (0, 2, 3))
        cost, overlap, exposed = self._counted.p50s(1), self._timed.p50s(0), self._timed.p50s(1, NS_PER_MS)
        known = self._means.ranks()
        every = merged(known.values()).means()
        rows = []
        for rank, samples in sorted(self.ranks.items()):
            hello, bye = samples.hello, samples.bye
            means = _rank_means(samples, known.get(rank, Known()), every, found)
            rows.append(
                RankFigures(
                    rank=rank,
                    host=hello.host if hello else None,
                    groups=list(self._run.groups.of_rank(rank)),
                    steps=samples.steps,
                    step_ms=to_ms(means.step_ns),
                    step_ms_p50=step.get(rank),
                    late_ms_p50=late.get(rank),
                    wait_ms_p50=wait.get(rank),
                    overlap=means.overlap,
                    overlap_p50=overlap.get(rank),
                    exposed_ms=to_ms(means.exposed_ns),
                    exposed_ms_p50=exposed.get(rank),
                    clock_error_ms=to_ms(samples.clock_error_ns),
                    dropped=samples.dropped,
                    own_cost_ratio=cost.get(rank),
                    memory=self._run.memory.of_rank(rank),
                    end=end_of(bye) if bye else None,
                )
            )
        return rows

    def _current_buckets(self) -> list[tuple[Bucket, BucketSamples]]:
        """Returns the buckets of the newest layout of each module."""
        newest = newest_layouts(self._buckets)
        found: defaultdict[Bucket, BucketSamples] = defaultdict(BucketSamples)
        for (epoch, buckets), steps in self._buckets.items():
            for position, bucket in enumerate(buckets):
                if newest[bucket[0]] == epoch:
                    found[bucket].extend(steps, position)
        return sorted(found.items())

    def _bucket_row(self, key: Bucket, samples: BucketSamples) -> CollectiveFigures:
        module, index, use, role = key
        last_ranks, last_share = most_often_last(samples.last)
        busbw = samples.busbw.p50()
        ready_ms, launch_ms, done_ms = samples.in_step_ms()
        return CollectiveFigures(
            kind=self._run.layouts.kind(module, use),
            module=module,
            index=index,
            use=use,
            name=self._run.layouts.bucket_layer(index, module=module),
            role=role.name,
            group_size=role.size or None,
            steps=samples.steps,
            per_step=samples.per_step.p50(),
            nbytes=samples.nbytes,
            params=self._run.layouts.bucket_params(index, module=module),
            ready_ms_p50=ready_ms,
            launch_ms_p50=launch_ms,
            done_ms_p50=done_ms,
            transfer_ms_p50=samples.transfer.p50(NS_PER_MS),
            wait_ms_p50=samples.wait.p50(NS_PER_MS),
            exposed_ms_p50=samples.exposed.p50(NS_PER_MS),
            busbw_gbps_p50=None if busbw is None else busbw / 1e9,
            last_rank=the_only(last_ranks),
            last_ranks=list(last_ranks),
            last_share=last_share,
        )


def _costliest(row: CollectiveFigures) -> tuple[int, float]:
    return row.module, cost_order(row.kind, row.exposed_ms_p50, row.wait_ms_p50)


def _rank_means(samples: RankSamples, known: Known, every: Means, run: Estimate) -> Means:
    if not samples.taken:
        return Means()
    step_ns, alone_ns = samples.total_ns / samples.taken, samples.alone_ns / samples.taken
    return share_of_run(step_ns, known.means(), every, run.means, alone_ns)


def _off_row(off: Off) -> OffFigures:
    return OffFigures(off.feature, list(off.ranks), off.step, off.reason, off.message)
