"""The sender thread: everything that encodes, sends or waits happens here, never on the training thread.

The training thread appends finished records to a deque (atomic, no lock) and goes on. This thread wakes about twice a
second (a wake costs more than what it sends), sends what is settled, and a heartbeat, so that a hang is visible while
it lasts. It prefers the moment at which the training thread begins to wait for its buckets: what it then takes from
that thread's core is not missed.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

import zmq

from ddpwatch import rundir, transport
from ddpwatch.errors import DdpwatchError
from ddpwatch.messages import Beat, Bye, Hello, Layout, Mark, Message, Step, encode
from ddpwatch.probe.recorder import StepRecord, StepRecorder

REST_S = 0.4
LULL_S = 0.25  # how much longer it rests if the training thread does not begin to wait: in long steps, or in a hang
FIRST_LOOK_S = 0.05  # for where to send
SETTLE_NS = 500_000_000
BACKLOG = 4096
STOP_S = 0.6  # a little longer than a socket holds on to the last frames


class Outlet(Protocol):
    """Where frames go: a socket, or a file of the rank's own."""

    def send(self, data: bytes, flags: int = 0) -> object:
        """Takes a frame or raises zmq.Again; never waits."""

    def close(self) -> None:
        """No frame follows."""


class Sender(threading.Thread):
    """Sends one rank's frames to the collector.

    Args:
        rank: Put into every frame.
        find_endpoint: Asked again and again until it returns the collector's endpoint; may raise to give up.
        on_error: Told once, if watching has to end.

    Attributes:
        recorder: Where the heartbeat looks; set before the thread starts.
        issued: Tells how many collectives this rank has issued, for the heartbeat.
        dropped: Frames lost since the start, because the collector was slow, dead or never came.
    """

    def __init__(
        self, rank: int, find_endpoint: Callable[[], str | None], on_error: Callable[[Exception], None]
    ) -> None:
        super().__init__(name="ddpwatch-sender", daemon=True)
        self._rank = rank
        self._find_endpoint = find_endpoint
        self._on_error = on_error
        self._records: deque[StepRecord] = deque(maxlen=BACKLOG)
        self._outbox: deque[Message] = deque(maxlen=BACKLOG)
        self._stopping = threading.Event()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._due = math.inf  # from when on the training thread may wake this one
        self._context = transport.Context()
        self._socket: Outlet | None = None
        self._hello: Hello | None = None
        self._farewell: Bye | None = None
        self._cpu_ns = 0
        self._told_ns = 0
        self.recorder = StepRecorder(self.take)
        self.recorder.cpu = self._job_cpu_ns
        self.recorder.lull = self._lull
        self.issued: Callable[[], int | None] = lambda: None
        self.dropped = 0

    # -- called by the training thread -----------------------------------------------------------------------

    def take(self, record: StepRecord) -> None:
        """Accepts a closed step. Never blocks; over a full backlog the oldest goes, counted."""
        self.dropped += len(self._records) == BACKLOG
        self._records.append(record)

    def post(self, message: Hello | Layout | Mark) -> None:
        """Accepts any other message, to go out before the steps that follow it."""
        if isinstance(message, Hello):
            self._hello = message
        self.dropped += len(self._outbox) == BACKLOG
        self._outbox.append(message)

    def stop(self, farewell: Bye, timeout_s: float = STOP_S) -> None:
        """Sends what is left and a farewell, and waits for that at most ``timeout_s``."""
        self._farewell = farewell
        self._stopping.set()
        self._wakes.put(None)
        self.join(timeout_s)

    def _lull(self) -> None:
        """The training thread is about to wait. Never blocks."""
        if time.monotonic() >= self._due:
            self._due = math.inf
            self._wakes.put(None)

    def _job_cpu_ns(self) -> int:
        """CPU time of the process, without what this thread had taken when it last went to sleep."""
        return time.process_time_ns() - self._cpu_ns

    # -- the thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Ticks until stopped."""
        try:
            self._connect()
            while not self._rest():
                self._tick()
            self._flush_all()
        except Exception as error:
            self._on_error(error)
        finally:
            if self._socket is not None:
                self._socket.close()
            self._context.term()

    def _connect(self) -> None:
        """Looks for where frames go, less and less often, until there is such a place or nothing to send any more."""
        directory, pause = os.environ.get("DDPWATCH_RECORD_DIR"), FIRST_LOOK_S
        while self._socket is None:
            self._socket = self._own_file(directory) if directory else self._collector()
            if self._socket is None and self._stopping.wait(pause):
                return
            pause = min(2 * pause, REST_S)

    def _collector(self) -> Outlet | None:
        endpoint = self._find_endpoint()
        return None if endpoint is None else transport.rank_push(self._context, endpoint)

    def _own_file(self, directory: str) -> Outlet | None:
        """The rank's own file, once it knows what the run is called. There is no collector, on no host."""
        from ddpwatch.recording.rank_file import RankFile

        hello = self._hello
        if hello is None:
            return None
        try:
            if self._find_endpoint() is None:
                return None
            rundir.blackbox(hello.run_id, self._rank).unlink(missing_ok=True)  # no collector will read it, or clean up
        except DdpwatchError:  # rank 0 is on another host, or else was not found at all: then the run has no name
            if not hello.run_id:
                raise
        return RankFile(directory, hello)

    def _rest(self) -> bool:
        """Sleeps until there is something to do. True if that is to stop."""
        self._due = time.monotonic() + REST_S
        with contextlib.suppress(Empty):
            self._wakes.get(timeout=REST_S + LULL_S)
        self._due = math.inf
        return self._stopping.is_set()

    def _tick(self) -> None:
        self._send_outbox()
        now = time.monotonic_ns()
        while self._records and self._ready(self._records[0], now):
            self._send(self._step(self._records.popleft()))
        self._send(self._beat(now))
        self._cpu_ns = time.thread_time_ns()

    @staticmethod
    def _ready(record: StepRecord, now: int) -> bool:
        """Whether a record may go: complete, or overdue. One that waits for the GPU is still being written to."""
        return record.settled() or (record.resolved and now - record.end > SETTLE_NS)

    def _flush_all(self) -> None:
        self._send_outbox()
        while self._records:
            self._send(self._step(self._records.popleft()))
        if self._farewell is not None:
            self._send(self._farewell)

    def _send_outbox(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, Layout):
                message.rank = self._rank
            self._send(message)

    def _send(self, message: Message) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            self.dropped += not isinstance(message, Beat)

    def _step(self, record: StepRecord) -> Step:
        """The frame of a record, with what this thread has taken since the last one."""
        message = record.message(self._rank, self.dropped)
        before, self._told_ns = self._told_ns, time.thread_time_ns()
        message.sender_ns = self._told_ns - before
        return message

    def _beat(self, now: int) -> Beat:
        recorder = self.recorder
        record = recorder.current
        waiting = [] if record is None or record.untimed else [b.index for b in list(record.buckets) if b.done is None]
        return Beat(
            rank=self._rank,
            at_ns=now,
            step=recorder.steps,
            phase=recorder.phase,
            since_ns=recorder.since,
            last_hook=recorder.last_hook,
            in_flight=waiting,
            issued=self.issued(),
            dropped=self.dropped,
        )
