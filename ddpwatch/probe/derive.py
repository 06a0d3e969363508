"""What the sender thread works out of DDP's own ready times: hook fires, ready times, launches that nobody stamped.

Pure functions, without torch, clock or thread. All that they need is handed to them, and they write into two things
only: the record of a closed step and the lags of its layout. The sender thread owns both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpwatch.probe.record import BucketRecord, RecordedBucket, StepRecord
from ddpwatch.sampling.schedule import is_sampled
from ddpwatch.wire.messages import DEFAULT_GROUP, BucketLayout

HOOKS_PERIOD = 8  # of the steps whose collectives are not seen, one in so many has hook fires


@dataclass(slots=True)
class ModuleLayout:
    """The buckets of one module for as long as they stay the same. A change makes a new object.

    Attributes:
        module: Number of the module in this process.
        param_base: Id of its first parameter in this process.
        param_count: Number of its parameters with gradients.
        buckets: In index order. Empty before the first layout.
        group: Id of the process group that reduces them.
        lag_ns: By bucket index, the newest time from a bucket's last gradient to its launch. The training thread
            never looks at it.
    """

    module: int
    param_base: int
    param_count: int
    buckets: list[BucketLayout] = field(default_factory=list)
    group: int = DEFAULT_GROUP
    lag_ns: dict[int, int] = field(default_factory=dict)


def derive_ready(
    layout: ModuleLayout, stats: list[int] | None, forward_end_ns: int, launched: list[BucketRecord], record: StepRecord
) -> None:
    """Adds hook fires and the buckets' ready times to a step whose launches were stamped.

    DDP's clock starts shortly before the probe's stamp of the forward's end. No bucket is ready after its launch, so
    whatever seems to be shows that difference, which is subtracted.

    Args:
        layout: The layout in force at the end of this backward.
        stats: When DDP counted each gradient as ready, ns from the forward's end, 0 where unknown; None without DDP's
            statistics: then the record's hook fires serve instead.
        forward_end_ns: When the forward returned (absolute).
        launched: The buckets of this backward, in launch order.
        record: The step.
    """
    offsets = _ready_offsets(layout, stats, forward_end_ns, record)
    last = {bucket.index: _last(offsets, bucket) for bucket in layout.buckets}
    ready = [forward_end_ns + at if (at := last.get(bucket.index, 0)) else 0 for bucket in launched]
    shift = max([0, *(at - bucket.launch for at, bucket in zip(ready, launched, strict=True))])
    previous = 0
    for at, bucket in zip(ready, launched, strict=True):
        bucket.ready = at - shift if at else None
        if at and at - shift >= previous:  # it did not have to wait for the bucket before it
            layout.lag_ns[bucket.index] = bucket.launch - at
        previous = bucket.launch
    if stats is not None:
        _add_hook_fires(layout, stats, forward_end_ns - shift, record)
    if newest := max(offsets, default=0):
        record.last_hook = layout.param_base + offsets.index(newest)


def derive_launches(
    layout: ModuleLayout,
    stats: list[int] | None,
    forward_end_ns: int,
    issued: tuple[int | None, int | None],
    record: StepRecord,
) -> None:
    """Adds the launches of a step whose collectives were not seen. DDP launches in index order, each bucket when ready.

    Between the last gradient and the launch DDP copies that gradient into the bucket. The time this took when it was
    last seen is added. One in `HOOKS_PERIOD` of these steps gets hook fires: the straggler is judged by the newest
    sixteen, and the place in the bucket where it falls behind.

    Args:
        layout: The layout in force at the end of this backward.
        stats: As for `derive_ready`.
        forward_end_ns: When the forward returned (absolute).
        issued: How many collectives the group had issued before this backward, and after it; None if not known.
        record: The step.
    """
    offsets = _ready_offsets(layout, stats, forward_end_ns, record)
    seqs = _sequence(issued, len(layout.buckets))
    readies = [_last(offsets, bucket) for bucket in layout.buckets]
    latest = min(filter(None, readies if any(readies) else offsets), default=0)
    base = forward_end_ns - record.start
    for bucket, ready, seq in zip(layout.buckets, readies, seqs, strict=True) if latest else ():
        latest = max(latest, ready + layout.lag_ns.get(bucket.index, 0))
        known = base + min(ready, latest) if ready else None
        row = base + latest, layout.module, bucket.index, bucket.nbytes, known, None, None, layout.group, seq
        record.derived.append(RecordedBucket(*row))
    if stats is not None and is_sampled(record.slot, HOOKS_PERIOD):
        _add_hook_fires(layout, stats, forward_end_ns, record)


def _sequence(issued: tuple[int | None, int | None], count: int) -> list[int | None]:
    """Returns the sequence numbers of the buckets' collectives. After them DDP may reduce which parameters were used.

    With more collectives than that, a comm hook issues several per bucket, and only the first one's number is known.
    """
    before, after = issued
    if before is None or after is None or after - before < count:
        return [None] * count
    if after - before > count + 1:
        return [before + 1, *[None] * (count - 1)][:count]
    return [before + 1 + index for index in range(count)]


def _ready_offsets(
    layout: ModuleLayout, stats: list[int] | None, forward_end_ns: int, record: StepRecord
) -> Sequence[int]:
    """Returns when each gradient was accumulated, ns from the forward's end, 0 where unknown.

    For a parameter that is not used this time, DDP notes when it counts it as ready.
    """
    if stats is not None:
        return stats
    fired = dict(record.hooks)
    ids = range(layout.param_base, layout.param_base + layout.param_count)
    return [fired.get(param, forward_end_ns) - forward_end_ns for param in ids]


def _last(offsets: Sequence[int], bucket: BucketLayout) -> int:
    """Returns when the last gradient of a bucket was accumulated, 0 where unknown."""
    return max(map(offsets.__getitem__, bucket.params), default=0)


def _add_hook_fires(layout: ModuleLayout, offsets: list[int], start_ns: int, record: StepRecord) -> None:
    record.hooks.extend((layout.param_base + i, start_ns + at) for i, at in enumerate(offsets) if at)
