"""GPU times from CUDA events, without ever waiting for the GPU.

On CUDA the host only enqueues: its stamps show when it asked, not when the GPU did it. So a stamp there is a host time
*and* an event on the current stream. At each stamp the oldest events are queried, up to the first that the GPU has not
passed: no event is queried again once it is passed, and none is waited for. When the GPU has passed all events of a
closed step, the GPU's times replace every stamp of its record.

CUDA gives differences between events only. `ddpwatch.probe.gpu_clock` finds the host times that they belong to. The
last event of the newest resolved step stays as an anchor: a difference to it joins the next step that is resolved to
the same time line, whatever became of the steps between them. A collective that the host carries out (as Gloo does) has
a host time, which fits in as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from ddpwatch.probe.gpu_clock import GpuClockMap, Passage
from ddpwatch.probe.record import BucketRecord, StepRecord
from ddpwatch.sampling.levels import BARE, UNRESOLVED

# Events that the GPU has not passed yet, some 200 bytes each: of more, the oldest is lost, and its step with it. A job
# hardly gets there: a queue of the driver's holds 1,021 launches (on an H100), then the host waits.
MAX_AHEAD = 16_384
TOGETHER_NS = 100_000_000  # for so long, bare steps wait to be resolved together: with cold caches, one took 40 µs


class CudaEvent(Protocol):
    """The used part of ``torch.cuda.Event``."""

    def record(self, stream: Any) -> None:
        """Enqueues the event on a stream."""

    def query(self) -> bool:
        """Returns whether the GPU has passed it."""

    def elapsed_time(self, end_event: CudaEvent) -> float:
        """Returns milliseconds from this event to another."""


class GpuStamp(int):
    """A host time in ns, with the event that was enqueued then, and when the host knew that the GPU had passed it.

    Attributes:
        lost: Whether nobody will know that, as the GPU was too far behind.
    """

    event: CudaEvent
    passed_ns: int | None
    lost: bool


class CudaClock:
    """Takes stamps on the GPU, and resolves records. All on the training thread.

    Args:
        make_event: Makes an event with timing.
        stream: The current stream of the device that the model is on. Not of the current device: a script that never
            calls ``set_device`` computes on one GPU while another is current, and an event there would claim memory
            on a GPU that the job does not use.
        capturing: Whether this thread captures a CUDA graph: then nothing may be enqueued, and stamps are the host's.
        host: Host time in ns.
        beside_captures: A context in which this thread may query events while another one captures a graph.

    Attributes:
        captured_ns: When a graph was captured, if no step has ended since: its replays run no hook.
    """

    def __init__(
        self,
        make_event: Callable[[], CudaEvent],
        stream: Callable[[], Any],
        capturing: Callable[[], bool],
        host: Callable[[], int] = time.monotonic_ns,
        beside_captures: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._make_event = make_event
        self._stream = stream
        self._capturing = capturing
        self._beside_captures = beside_captures
        self._host = host
        self._pool: list[CudaEvent] = []
        self._ahead: deque[GpuStamp] = deque()
        self._waiting: deque[StepRecord] = deque()
        self._map = GpuClockMap()
        self._anchor: CudaEvent | None = None
        self._anchor_ns = 0  # GPU time of the anchor; the first event is at 0
        self.captured_ns: int | None = None

    def __call__(self) -> int:
        """Returns a stamp: the host's time, and an event on the current stream."""
        if self._capturing():
            self.captured_ns = self._host()
            return self.captured_ns
        self._query()
        event = self._pool.pop() if self._pool else self._make_event()
        stamp = GpuStamp(self._host())
        stamp.event, stamp.passed_ns, stamp.lost = event, None, False
        event.record(self._stream())
        if len(self._ahead) >= MAX_AHEAD:
            self._ahead.popleft().lost = True
        self._ahead.append(stamp)
        return stamp

    def follow(self, record: StepRecord) -> None:
        """Takes a closed step, to resolve it once the GPU has passed its events."""
        record.resolved = False
        self.captured_ns = None
        self._waiting.append(record)
        if record.status != BARE or record.end - self._waiting[0].start >= TOGETHER_NS:
            self.poll()

    def poll(self) -> None:
        """Queries the events, and resolves the steps whose events the GPU has passed. Never waits.

        Raises:
            RuntimeError: CUDA has failed, and will for the rest of the process. All records that wait are given up.
        """
        try:
            if not self._capturing():  # querying an event would break the capture
                self._query()
                with self._beside_captures():
                    self._resolve_passed()
        except Exception:
            self._give_up_all()
            raise

    def finish(self) -> None:
        """Ends the queries: steps that the GPU has not passed by now are given up. Raises as `poll` does."""
        self.poll()
        self._give_up_all()

    # -- inside ----------------------------------------------------------------------------------------------

    def _query(self) -> None:
        """Notes which events the GPU has passed: each is seen to be passed once, and one is not, at most."""
        ahead = self._ahead
        if ahead:
            with self._beside_captures():
                while ahead and ahead[0].event.query():
                    ahead.popleft().passed_ns = self._host()

    def _resolve_passed(self) -> None:
        while self._waiting:
            record = self._waiting[0]
            stamps = list(_stamps(record))
            events = [stamp for stamp in stamps if isinstance(stamp, GpuStamp)]
            lost = any(stamp.lost for stamp in events) or (record.status == "aborted" and not _completed(record))
            if lost or len(events) < len(stamps):
                self._give_up(record)
            elif _completed(record) and all(stamp.passed_ns is not None for stamp in events):
                self._resolve(record, events)
            else:
                return
            self._waiting.popleft()

    def _resolve(self, record: StepRecord, stamps: list[GpuStamp]) -> None:
        _note_what_the_host_saw(record)
        first, last = stamps[0].event, stamps[-1].event
        start_ns = self._anchor_ns + (0 if self._anchor is None else _ns_between(self._anchor, first))
        gpu_ns = {id(stamp): start_ns + _ns_between(first, stamp.event) for stamp in stamps}
        self._map.observe([Passage(gpu_ns[id(stamp)], int(stamp), stamp.passed_ns or 0) for stamp in stamps])
        record.clock_error_ns = self._map.error_ns(start_ns)
        self._anchor, self._anchor_ns = last, gpu_ns[id(stamps[-1])]
        _replace(record, lambda stamp: self._map.host_ns(gpu_ns[id(stamp)]))
        record.resolved = True
        # The step's last event is the next step's first, and one stamp may end a phase and start the next.
        self._pool.extend({id(s.event): s.event for s in stamps if s.event is not last}.values())

    def _give_up_all(self) -> None:
        while self._waiting:
            self._give_up(self._waiting.popleft())

    def _give_up(self, record: StepRecord) -> None:
        """Removes all times from a record: its stamps show only when the host enqueued the work."""
        record.status = record.status if record.status == "aborted" else UNRESOLVED
        record.start = record.end = start = int(record.start)  # a `GpuStamp` cannot be sent
        record.ends = [start] * len(record.ends)
        record.spans, record.buckets, record.hooks, record.later = [], [], [], []
        record.untimed = record.resolved = True  # last: the sender thread may take the record now


def _stamps(record: StepRecord) -> Iterator[int]:
    """Yields all stamps of a record that need a GPU time, its start first and its end last."""
    yield record.start
    for _, start, end in record.spans:
        yield start
        yield end
    for bucket in record.buckets:
        yield bucket.launch
        yield from (at for at in (bucket.done, bucket.wait_begin) if isinstance(at, GpuStamp))
    yield from record.ends
    yield record.end


def _completed(record: StepRecord) -> bool:
    """Returns whether every bucket's completion has its stamp, or never gets one."""
    return record.untimed or all(bucket.done is not None for bucket in record.buckets)


def _ns_between(start: CudaEvent, end: CudaEvent) -> int:
    return round(start.elapsed_time(end) * 1e6)


def _note_what_the_host_saw(record: StepRecord) -> None:
    """Counts that where the host has carried out a collective, the GPU had passed its launch by then."""
    for bucket in record.buckets:
        if isinstance(bucket.launch, GpuStamp) and bucket.done is not None and not isinstance(bucket.done, GpuStamp):
            bucket.launch.passed_ns = min(bucket.launch.passed_ns or bucket.done, bucket.done)


def _replace(record: StepRecord, host: Callable[[int], int]) -> None:
    record.spans = [(phase, host(start), host(end)) for phase, start, end in record.spans]
    for bucket in record.buckets:
        bucket.ready = bucket.launch = host(bucket.launch)
        if isinstance(bucket.wait_begin, GpuStamp):
            bucket.wait_begin = host(bucket.wait_begin)
    in_order = [bucket for bucket in record.buckets if isinstance(bucket.done, GpuStamp)]
    for bucket in in_order:
        bucket.done = host(bucket.done or 0)
    _queue(in_order)
    record.start, record.end = host(record.start), host(record.end)
    record.ends = [host(end) for end in record.ends]


def _queue(buckets: Iterable[BucketRecord]) -> None:
    """Starts each of a group's collectives once the one before it is done: they run in order on one stream."""
    done: dict[int, int] = {}
    for bucket in buckets:
        bucket.start = max(bucket.launch, done.get(bucket.group, 0))
        done[bucket.group] = bucket.done or bucket.start
