"""The newest steps bucket by bucket: when each was ready, launched and done, who came last, and what was exposed.

Times in ns. ready, launch and done count from the start of the rank's first backward; they, and exposed, are medians
over the ranks of a step, and then over the steps. transfer, wait and busbw are those of ``docs/metrics.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.messages import Step

Bucket = tuple[int, int]  # module, index
WORK_OF_A_CALL = 1024  # steps times ranks worked out at once, so that a large job does not stop the screen


@dataclass(frozen=True, slots=True)
class BucketStep:
    """One bucket in one step, over its ranks. ``wait`` is the longest of them; ``busbw`` in bytes/s."""

    nbytes: int
    ready: float | None
    launch: float
    done: float | None
    transfer: float | None
    wait: float | None
    exposed: float | None
    busbw: float | None
    last_rank: int | None


@dataclass(frozen=True, slots=True)
class BucketSummary:
    """One bucket over the newest steps. ``last_share`` says how often ``last_rank`` launched last (0 to 1)."""

    module: int
    index: int
    nbytes: int
    ready: float | None
    launch: float | None
    done: float | None
    transfer: float | None
    wait: float | None
    exposed: float | None
    busbw: float | None
    last_rank: int | None
    last_share: float | None
    steps: int


class BucketTable:
    """Keeps what was worked out per step; further calls work out what is missing, newest first."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[Bucket, BucketStep]] = {}
        self._ranks: dict[int, int] = {}

    def update(self, views: Sequence[StepAcrossRanks]) -> bool:
        """Takes the newest steps (oldest first); returns whether all of them are worked out now."""
        wanted = {view.step: view for view in views}
        self.steps = {step: rows for step, rows in self.steps.items() if step in wanted}
        budget = WORK_OF_A_CALL
        for view in reversed(views):
            if view.step in self.steps and self._ranks.get(view.step) == len(view):
                continue
            if budget <= 0:
                return False
            self.steps[view.step], self._ranks[view.step] = bucket_steps(view), len(view)
            budget -= len(view)
        self._ranks = {step: count for step, count in self._ranks.items() if step in wanted}
        return True

    def rows(self) -> list[BucketSummary]:
        """Every bucket of the newest step, over all steps that have it, by module and index."""
        if not self.steps:
            return []
        return [self._row(bucket) for bucket in sorted(self.steps[max(self.steps)])]

    def history(self, bucket: Bucket) -> list[tuple[int, BucketStep]]:
        """One bucket step by step, oldest first."""
        return [(step, rows[bucket]) for step, rows in sorted(self.steps.items()) if bucket in rows]

    def _row(self, bucket: Bucket) -> BucketSummary:
        found = [step for _, step in self.history(bucket)]
        last = Counter(step.last_rank for step in found if step.last_rank is not None).most_common(1)
        known = sum(step.last_rank is not None for step in found)
        return BucketSummary(
            *bucket,
            nbytes=found[-1].nbytes,
            ready=_p50(found, lambda step: step.ready),
            launch=_p50(found, lambda step: step.launch),
            done=_p50(found, lambda step: step.done),
            transfer=_p50(found, lambda step: step.transfer),
            wait=_p50(found, lambda step: step.wait),
            exposed=_p50(found, lambda step: step.exposed),
            busbw=_p50(found, lambda step: step.busbw),
            last_rank=last[0][0] if last else None,
            last_share=last[0][1] / known if last else None,
            steps=len(found),
        )


def _p50(steps: Iterable[BucketStep], read: Callable[[BucketStep], float | None]) -> float | None:
    values = [value for step in steps if (value := read(step)) is not None]
    return median(values) if values else None


def bucket_steps(view: StepAcrossRanks) -> dict[Bucket, BucketStep]:
    """Works out the buckets of one step."""
    columns: dict[Bucket, list[tuple[float | None, float, float | None, float | None]]] = {}
    sizes: dict[Bucket, int] = {}
    for rank in view.members:
        step = view.ranks[rank]
        exposed = view.facts_of(rank).exposed or [None] * len(step.bucket_index)
        for position, bucket in enumerate(zip(step.bucket_module, step.bucket_index, strict=True)):
            columns.setdefault(bucket, []).append((*_stamps(step, position), exposed[position]))
            sizes[bucket] = step.bucket_bytes[position]
    return {bucket: _bucket_step(bucket, sizes[bucket], rows, view) for bucket, rows in columns.items()}


def _stamps(step: Step, position: int) -> tuple[float | None, float, float | None]:
    origin = next((span.start for span in step.spans if span.phase == "backward"), 0)
    ready, done = step.bucket_ready[position], step.bucket_done[position]
    return (
        None if ready is None else ready - origin,
        step.bucket_launch[position] - origin,
        None if done is None else done - origin,
    )


def _bucket_step(
    bucket: Bucket,
    nbytes: int,
    rows: Sequence[tuple[float | None, float, float | None, float | None]],
    view: StepAcrossRanks,
) -> BucketStep:
    ready, launch, done, exposed = (_median(column) for column in zip(*rows, strict=True))
    arrivals, n = view.arrivals, len(view)
    place = next((i for i, key in enumerate(arrivals.keys) if key[:2] == bucket), None)
    transfer = None if place is None else arrivals.transfer[place]
    return BucketStep(
        nbytes=nbytes,
        ready=ready,
        launch=launch or 0.0,
        done=done,
        transfer=transfer,
        wait=None if place is None else arrivals.last[place] - arrivals.first[place],
        exposed=exposed,
        busbw=nbytes / transfer * 1e9 * 2 * (n - 1) / n if transfer and transfer > 0 and n > 1 else None,
        last_rank=None if place is None else arrivals.last_rank[place],
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
