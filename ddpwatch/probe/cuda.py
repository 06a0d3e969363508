"""GPU times from CUDA events, without ever waiting for the GPU.

On CUDA the host only enqueues: its stamps show when it asked, not when the GPU did it. So a stamp there is a host time
*and* an event on the current stream. Once a step is closed, its events are queried now and then, and never waited for.
When the GPU has passed them all, the GPU's times replace every stamp of the record.

CUDA gives differences between events only. The host time of a step's first event is bounded from below: the GPU cannot
reach an event before the host has enqueued it. `CudaClock` uses the tightest such bound of all events, carried over
from step to step. It is exact to some microseconds if the GPU catches up with the host once in a while. A collective
that the host carries out (as Gloo does) has a host time, which fits in as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ddpwatch.probe.record import BucketRecord, StepRecord
from ddpwatch.sampling.levels import UNRESOLVED

BACKLOG = 8  # steps that wait for their events; beyond that the oldest is given up
LEAK_NS = 20_000  # by which a carried-over bound loosens per step, in case the GPU's clock runs fast


class CudaEvent(Protocol):
    """The used part of ``torch.cuda.Event``."""

    def record(self, stream: Any) -> None:
        """Enqueues the event on a stream."""

    def query(self) -> bool:
        """Whether the GPU has passed it."""

    def elapsed_time(self, end_event: CudaEvent) -> float:
        """Milliseconds from this event to another."""


class GpuStamp(int):
    """A host time in ns, with the event that was enqueued at that moment."""

    event: CudaEvent


class CudaClock:
    """Takes stamps on the GPU, and resolves records.

    Args:
        make_event: Makes an event with timing.
        stream: The current stream of the device that the model is on. Not of the current device: a script that never
            calls ``set_device`` computes on one GPU while another is current, and an event there would claim memory
            on a GPU that the job does not use.
        capturing: Whether a CUDA graph is being captured: then nothing may be enqueued, and stamps are the host's.
        host: Host time in ns.
    """

    def __init__(
        self,
        make_event: Callable[[], CudaEvent],
        stream: Callable[[], Any],
        capturing: Callable[[], bool],
        host: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._make_event = make_event
        self._stream = stream
        self._capturing = capturing
        self._host = host
        self._pool: list[CudaEvent] = []
        self._waiting: deque[StepRecord] = deque()
        self._next_base: int | None = None

    def __call__(self) -> int:
        """A stamp: the host's time, and an event on the current stream."""
        if self._capturing():
            return self._host()
        event = self._pool.pop() if self._pool else self._make_event()
        stamp = GpuStamp(self._host())
        stamp.event = event
        event.record(self._stream())
        return stamp

    def follow(self, record: StepRecord) -> None:
        """Queries the events of a closed step from now on. Call it on the training thread, like all methods here."""
        record.resolved = False
        self._waiting.append(record)
        if len(self._waiting) > BACKLOG:
            self._give_up(self._waiting.popleft())
        self.poll()

    def poll(self) -> None:
        """Resolves the records whose events the GPU has passed. Never waits.

        Raises:
            RuntimeError: CUDA has failed, and will for the rest of the process. All records that wait are given up.
        """
        try:
            self._poll()
        except Exception:
            self._give_up_all()
            raise

    def finish(self) -> None:
        """Ends the queries: steps that the GPU has not passed by now are given up. Raises as `poll` does."""
        self.poll()
        self._give_up_all()

    # -- inside ----------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        while self._waiting and not self._capturing():  # querying an event would break the capture
            record = self._waiting[0]
            stamps = list(_stamps(record))
            events = [stamp for stamp in stamps if isinstance(stamp, GpuStamp)]
            if len(events) < len(stamps) or not _launched(record):
                self._give_up(self._waiting.popleft())
            elif all(stamp.event.query() for stamp in events):
                self._resolve(record, events)
                self._waiting.popleft()
            else:
                return

    def _resolve(self, record: StepRecord, stamps: list[GpuStamp]) -> None:
        anchor = stamps[0].event
        offset = {id(stamp): round(anchor.elapsed_time(stamp.event) * 1e6) for stamp in stamps}
        base = max(int(stamp) - offset[id(stamp)] for stamp in stamps)
        if self._next_base is not None:
            base = max(base, self._next_base - LEAK_NS)
        _replace(record, lambda stamp: base + offset[id(stamp)])
        self._next_base = record.end
        record.resolved = True
        # The step's last event is the next step's first, and one stamp may end a phase and start the next.
        last = stamps[-1].event
        self._pool.extend({id(s.event): s.event for s in stamps if s.event is not last}.values())

    def _give_up_all(self) -> None:
        while self._waiting:
            self._give_up(self._waiting.popleft())

    def _give_up(self, record: StepRecord) -> None:
        """Removes all times from a record: its stamps show only when the host enqueued the work."""
        record.status = record.status if record.status == "aborted" else UNRESOLVED
        record.end = record.start
        record.spans, record.buckets, record.hooks, record.later = [], [], [], []
        record.untimed = record.resolved = True  # last: the sender thread may take the record now
        self._next_base = None


def _stamps(record: StepRecord) -> Iterator[int]:
    """All stamps of a record that need a GPU time, its start first and its end last."""
    yield record.start
    for _, start, end in record.spans:
        yield start
        yield end
    for bucket in record.buckets:
        yield bucket.launch
        if isinstance(bucket.done, GpuStamp):
            yield bucket.done
    yield record.end


def _launched(record: StepRecord) -> bool:
    """Whether every bucket's completion has a stamp."""
    return all(bucket.done is not None for bucket in record.buckets)


def _replace(record: StepRecord, gpu: Callable[[int], int]) -> None:
    record.spans = [(phase, gpu(start), gpu(end)) for phase, start, end in record.spans]
    for bucket in record.buckets:
        bucket.ready = bucket.launch = gpu(bucket.launch)
    in_order = [bucket for bucket in record.buckets if isinstance(bucket.done, GpuStamp)]
    for bucket in in_order:
        bucket.done = gpu(bucket.done or 0)
    _queue_launches(in_order)
    record.start, record.end = gpu(record.start), gpu(record.end)


def _queue_launches(buckets: Iterable[BucketRecord]) -> None:
    """A module's collectives run in order on one stream: each starts once the one before it is done."""
    done: dict[int, int] = {}
    for bucket in buckets:
        bucket.launch = max(bucket.launch, done.get(bucket.module, 0))
        done[bucket.module] = bucket.done or bucket.launch
