"""Across ranks: who launched a bucket last, how long the others waited, and how long the transfer itself took.

A raw collective duration is never called network time: on the rank that comes first most of it is waiting for the
rank that comes last. Only steps whose ranks stamp with one clock can be compared (see `same_clock`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

from ddpwatch.messages import Hello, Step

BucketKey = tuple[int, int, int]  # module, bucket index, which backward of the step (from 0)


class BucketFigures(NamedTuple):
    """One bucket of one step over all ranks. Times in ns, ``launch`` and ``done`` absolute per rank.

    Attributes:
        first, last: The first and the last launch.
        transfer: max done - max launch; None if a completion was not measured.
        last_rank: The rank that launched last.
        busbw: Bus bandwidth in bytes/s after nccl-tests: bytes / transfer * 2(n-1)/n; None without a transfer.
    """

    key: BucketKey
    nbytes: int
    launch: dict[int, int]
    first: int
    last: int
    transfer: int | None
    last_rank: int
    busbw: float | None

    def late(self, rank: int) -> int:
        """How long after the first launch this rank's was."""
        return self.launch[rank] - self.first

    def wait(self, rank: int) -> int:
        """How long before the last launch this rank's was."""
        return self.last - self.launch[rank]


def same_clock(hellos: Iterable[Hello]) -> bool:
    """Whether all ranks stamp with the same clock: same boot of the same host, same time namespace."""
    return len({(hello.boot_id or hello.host, hello.time_ns) for hello in hellos}) <= 1


def bucket_figures(steps: Mapping[int, Step]) -> list[BucketFigures]:
    """Figures of every bucket that all the given ranks launched, in launch order of the lowest rank."""
    if not steps:
        return []
    found: dict[BucketKey, tuple[int, dict[int, int], list[int | None]]] = {}
    for rank in sorted(steps):
        step = steps[rank]
        begin = step.start_ns
        columns = zip(bucket_keys(step), step.bucket_bytes, step.bucket_launch, step.bucket_done, strict=True)
        for key, nbytes, launch, done in columns:
            if key not in found:
                found[key] = (nbytes, {}, [])
            _, launches, dones = found[key]
            launches[rank] = begin + launch
            dones.append(None if done is None else begin + done)
    return [_figures(key, *bucket) for key, bucket in found.items() if len(bucket[1]) == len(steps)]


def lateness(buckets: Iterable[BucketFigures], rank: int) -> int | None:
    """A rank's lateness in a step: its largest over the buckets; None if there is no bucket to compare."""
    return max([bucket.late(rank) for bucket in buckets], default=None)


def waiting(buckets: Iterable[BucketFigures], rank: int) -> int | None:
    """A rank's wait in a step: its largest over the buckets; None if there is no bucket to compare."""
    return max([bucket.wait(rank) for bucket in buckets], default=None)


def bucket_keys(step: Step) -> list[BucketKey]:
    """The key of each of the step's buckets; the last part counts earlier launches of the same bucket."""
    keys = [(module, index, 0) for module, index in zip(step.bucket_module, step.bucket_index, strict=True)]
    if len(set(keys)) == len(keys):
        return keys
    seen: Counter[BucketKey] = Counter()
    for place, key in enumerate(keys):
        keys[place] = (key[0], key[1], seen[key])
        seen[key] += 1
    return keys


def _figures(key: BucketKey, nbytes: int, launch: dict[int, int], done: list[int | None]) -> BucketFigures:
    last_rank = max(launch, key=launch.__getitem__)
    first, last = min(launch.values()), launch[last_rank]
    transfer = None if None in done else max(cast("list[int]", done)) - last
    n = len(launch)
    return BucketFigures(
        key=key,
        nbytes=nbytes,
        launch=launch,
        first=first,
        last=last,
        transfer=transfer,
        last_rank=last_rank,
        busbw=nbytes / transfer * 1e9 * 2 * (n - 1) / n if transfer and transfer > 0 and n > 1 else None,
    )
