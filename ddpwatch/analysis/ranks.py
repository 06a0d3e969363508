"""Across ranks: who launched a bucket last, how long the others waited, and how long the transfer itself took.

A raw collective duration is never called network time: on the rank that comes first most of it is waiting for the
rank that comes last. Only steps whose ranks stamp with one clock can be compared (see `same_clock`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddpwatch.messages import Hello, Step

BucketKey = tuple[int, int, int]  # module, bucket index, which backward of the step (from 0)


@dataclass(frozen=True, slots=True)
class BucketFigures:
    """One bucket of one step over all ranks. Times in ns, ``launch`` and ``done`` absolute per rank.

    Attributes:
        late: launch[r] - min launch, per rank.
        wait: max launch - launch[r], per rank.
        transfer: max done - max launch; None if a completion was not measured.
        last_rank: The rank that launched last.
        busbw: Bus bandwidth in bytes/s after nccl-tests: bytes / transfer * 2(n-1)/n; None without a transfer.
    """

    key: BucketKey
    nbytes: int
    launch: dict[int, int]
    late: dict[int, int]
    wait: dict[int, int]
    transfer: int | None
    last_rank: int
    busbw: float | None


def same_clock(hellos: Iterable[Hello]) -> bool:
    """Whether all ranks stamp with the same clock: same boot of the same host, same time namespace."""
    return len({(hello.boot_id or hello.host, hello.time_ns) for hello in hellos}) <= 1


def bucket_figures(steps: Mapping[int, Step]) -> list[BucketFigures]:
    """Figures of every bucket that all the given ranks launched, in launch order of the lowest rank."""
    if not steps:
        return []
    launches: dict[BucketKey, dict[int, int]] = {}
    dones: dict[BucketKey, list[int | None]] = {}
    sizes: dict[BucketKey, int] = {}
    for rank in sorted(steps):
        step = steps[rank]
        for key, nbytes, launch, done in _buckets(step):
            launches.setdefault(key, {})[rank] = step.start_ns + launch
            dones.setdefault(key, []).append(None if done is None else step.start_ns + done)
            sizes.setdefault(key, nbytes)
    return [
        _figures(key, sizes[key], launch, dones[key]) for key, launch in launches.items() if len(launch) == len(steps)
    ]


def lateness(buckets: Iterable[BucketFigures], rank: int) -> int | None:
    """A rank's lateness in a step: its largest over the buckets; None if there is no bucket to compare."""
    return max((bucket.late[rank] for bucket in buckets), default=None)


def waiting(buckets: Iterable[BucketFigures], rank: int) -> int | None:
    """A rank's wait in a step: its largest over the buckets; None if there is no bucket to compare."""
    return max((bucket.wait[rank] for bucket in buckets), default=None)


def _buckets(step: Step) -> list[tuple[BucketKey, int, int, int | None]]:
    """The bucket columns as rows, with the count of earlier launches of the same bucket in the key."""
    seen: dict[tuple[int, int], int] = {}
    rows = []
    for module, index, nbytes, launch, done in zip(
        step.bucket_module, step.bucket_index, step.bucket_bytes, step.bucket_launch, step.bucket_done, strict=True
    ):
        occurrence = seen.get((module, index), 0)
        seen[module, index] = occurrence + 1
        rows.append(((module, index, occurrence), nbytes, launch, done))
    return rows


def _figures(key: BucketKey, nbytes: int, launch: dict[int, int], done: list[int | None]) -> BucketFigures:
    first, last = min(launch.values()), max(launch.values())
    ends = [end for end in done if end is not None]
    transfer = max(ends) - last if len(ends) == len(done) else None
    n = len(launch)
    return BucketFigures(
        key=key,
        nbytes=nbytes,
        launch=launch,
        late={rank: at - first for rank, at in launch.items()},
        wait={rank: last - at for rank, at in launch.items()},
        transfer=transfer,
        last_rank=max(launch, key=launch.__getitem__),
        busbw=nbytes / transfer * 1e9 * 2 * (n - 1) / n if transfer and transfer > 0 and n > 1 else None,
    )
