"""The sender thread: everything that encodes, sends or waits happens here, never on the training thread.

It wakes about twice a second (waking costs more than sending), sends what is settled, and a heartbeat, so that a hang
shows while it lasts. It prefers the moment at which the training thread starts to wait for its buckets: nobody misses
the processor time that it uses then.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from functools import cached_property
from pathlib import Path
from queue import Empty
from typing import Protocol

import zmq

from ddpwatch.probe.guard import Guard
from ddpwatch.probe.heartbeat import Heartbeat
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.rendezvous import Rendezvous
from ddpwatch.probe.send_queue import SendQueue
from ddpwatch.probe.stack_sampling import StackSampling
from ddpwatch.probe.stacks import StackTaker
from ddpwatch.run import rundir
from ddpwatch.wire import transport
from ddpwatch.wire.control import RestFile
from ddpwatch.wire.messages import (
    STACK_SAMPLES,
    WATCHING,
    Beat,
    Bye,
    Group,
    Hello,
    Layout,
    Message,
    StackSamples,
    encode,
)

REST_S = 0.4
ASKED_REST_S = 0.1  # on rank 0, until the other ranks have found it
EXTRA_REST_S = 0.25  # how much longer it rests while the training thread does not wait: in long steps, or in a hang
FIRST_LOOK_S = 0.05  # pause before the second look for the collector
SETTLE_NS = 500_000_000
STOP_S = 0.6  # a little longer than a socket holds on to the last frames
STARTING_S = 3.0  # from the start; a job that ends earlier waits that long for a collector that is not there yet
ANSWER_S = STOP_S / 2  # at a job's end, for what ranks ask rank 0, and for samples under way
KEEP_LAYOUTS = 4  # per module, for a collector that was started again


class FrameSink(Protocol):
    """Where frames go: a socket, or the rank file."""

    def send(self, data: bytes, flags: int = 0) -> object:
        """Takes a frame or raises zmq.Again; never waits."""

    def close(self) -> None:
        """Takes no frame after this."""


class Sender(threading.Thread):
    """Sends one rank's frames to the collector, or into a rank file.

    Args:
        rank: Put into every frame.
        queue: Where the frames' contents come from.
        recorder: Read for the heartbeat.
        rendezvous: The way to the collector.
        guard: Takes the errors.
        heartbeat: What the heartbeats say; by default only what the recorder knows.

    Attributes:
        stacks: Takes them when the rank stands still.
    """

    def __init__(
        self,
        rank: int,
        queue: SendQueue,
        recorder: StepRecorder,
        rendezvous: Rendezvous,
        guard: Guard,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        super().__init__(name="ddpwatch-sender", daemon=True)
        self._rank = rank
        self._queue = queue
        self._recorder = recorder
        self._rendezvous = rendezvous
        self._guard = guard
        self._heartbeat = heartbeat or Heartbeat(rank, recorder)
        self.stacks = StackTaker(rank, threading.get_ident())  # it is made on the training thread
        self._sampling = StackSampling(rank, recorder, self._post_samples, guard, self._heartbeat.doing)
        self._starting_until_s = time.monotonic() + STARTING_S
        self._stopping = threading.Event()
        self._goodbye: Bye | None = None
        self._sink: FrameSink | None = None
        self._monitor: transport.ConnectionMonitor | None = None
        self._box: Path | None = None
        self._lease: Path | None = None
        self._connections = 0
        self._groups: dict[int, Group] = {}
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._introduction: deque[Message] = deque()  # still to be sent again
        self._refused = 0
        self._reported_cpu_ns = 0

    def _post_samples(self, samples: StackSamples) -> None:
        """Wakes this thread, too: somebody waits for them."""
        self._queue.post(samples)
        self._queue.wakes.put(None)

    @cached_property
    def _context(self) -> transport.Context:
        """Of its sockets, once it has any: a rank that cannot be watched leaves none."""
        return transport.Context()

    @property
    def dropped(self) -> int:
        """Frames lost since the start, because the collector was slow, dead or never came."""
        return self._queue.dropped + self._refused

    def stop(self, goodbye: Bye, most_s: float = math.inf) -> None:
        """Sends what is left and a goodbye, and waits a little for that, but not for longer than `most_s`."""
        self._goodbye = goodbye
        if self._sink is None:  # rank 0 may be about to answer: it has waited for the collector, too
            until_s = max(self._starting_until_s, time.monotonic() + ANSWER_S)
            self._starting_until_s = min(until_s, time.monotonic() + most_s / 2)
        self._stopping.set()
        self._sampling.stop()
        self._queue.wakes.put(None)
        starting_s = 0.0 if self._sink is not None else max(0.0, self._starting_until_s - time.monotonic())
        self.join(min(starting_s + STOP_S, most_s))

    def run(self) -> None:
        """Sends until stopped."""
        try:
            self._connect()
            while not self._rest():
                self._send_settled()
            self._send_rest()
        except Exception as error:
            self._guard.failed(error)
            self._refuse()
            self._say_no_more()
        finally:
            self._close()

    def _refuse(self) -> None:
        """Lets the other ranks know that there is nothing to find."""
        with contextlib.suppress(Exception):  # the store has gone, with the job
            while self._rendezvous.refuse() and not self._stopping.wait(REST_S):
                pass

    def _say_no_more(self) -> None:
        """Sends what can still be said: that this rank is no longer watched and, at the end, its goodbye."""
        with contextlib.suppress(Exception):
            self._send_messages()
            while self._sink is not None and not self._stopping.is_set():
                self._send(self._heartbeat.beat(time.monotonic_ns(), self.dropped))
                self._stopping.wait(REST_S)
            if self._goodbye is not None:
                self._send(self._goodbye)

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        if self._sink is not None:
            self._sink.close()
        self._rendezvous.leave()
        self._context.term()
        if self._goodbye is not None and self._box is not None:  # the goodbye says more; and the collector may be gone
            self._box.unlink(missing_ok=True)

    # -- where frames go -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Looks for where frames go, less and less often, until that is found or the job has ended."""
        directory, pause = os.environ.get("DDPWATCH_RECORD_DIR"), FIRST_LOOK_S
        while self._sink is None:
            self._sink = self._rank_file(directory) if directory else self._collector()
            if self._sink is None and self._stopping.wait(pause):
                if time.monotonic() > self._starting_until_s:
                    self._sink = self._rest_file()
                    return
                time.sleep(FIRST_LOOK_S)
            pause = min(2 * pause, ASKED_REST_S if time.monotonic() < self._starting_until_s else REST_S)

    def _collector(self) -> FrameSink | None:
        address = self._rendezvous.find()
        if address is None:
            return None
        if self._queue.hello is not None:
            self._name_run(self._queue.hello, address.run_id)
        if rundir.is_published(address.files):  # otherwise its collector has ended, and would not remove the box
            with contextlib.suppress(OSError):  # full memory: then the heartbeat has to do
                self._recorder.box.open(box := rundir.blackbox(address.files, self._rank))
                self._box = box
        self._lease = rundir.lease(address.files)
        self._recorder.lease.open(self._lease)
        socket = self._sink = transport.rank_push(self._context)
        self._monitor = transport.ConnectionMonitor(socket, zmq.EVENT_CONNECTED)
        socket.connect(transport.check_endpoint(address.endpoint))
        return socket

    def _rank_file(self, directory: str) -> FrameSink | None:
        """Returns the rank file, once the run has a name. No node has a collector then."""
        from ddpwatch.recording.rank_file import RankFile

        hello, address = self._queue.hello, self._rendezvous.find()
        if hello is None or address is None:
            return None
        self._name_run(hello, address.run_id)
        return RankFile(directory, hello)

    def _rest_file(self) -> FrameSink | None:
        """Returns a file for a collector that comes after this rank's end; None while the run is not known."""
        if self._queue.hello is None or not self._rendezvous.is_on_rank_0s_node:
            return None
        self._name_run(self._queue.hello, self._rendezvous.run_id)
        return RestFile(rundir.rest(self._rendezvous.run_id, self._rank))

    def _name_run(self, hello: Hello, run_id: str) -> None:
        """Adds what a rank does not know when it introduces itself."""
        hello.run_id, hello.previous = run_id, self._rendezvous.previous

    def _introduce_again(self) -> None:
        """Introduces itself to a collector that was started again. Frames queued for its predecessor come first."""
        if self._monitor is None:
            return
        before = self._connections
        self._connections += len(list(self._monitor.events()))
        if self._connections > max(before, 1):
            self._recorder.lease.open(self._lease)
            self._introduction = deque([*self._groups.values(), *self._layouts.values()])
            if self._queue.hello is not None:
                self._introduction.appendleft(self._queue.hello)
        while self._introduction and self._send(self._introduction[0]):
            self._introduction.popleft()

    # -- what is sent, and when ------------------------------------------------------------------------------

    def _rest(self) -> bool:
        """Sleeps until there is something to do. Whether that is to stop."""
        rest_s, extra_s = (ASKED_REST_S, 0.0) if self._rendezvous.is_awaited else (REST_S, EXTRA_REST_S)
        self._queue.due_s = time.monotonic() + rest_s
        with contextlib.suppress(Empty):
            self._queue.wakes.get(timeout=rest_s + extra_s)
        self._queue.due_s = math.inf
        return self._stopping.is_set()

    def _send_settled(self) -> None:
        """Sends messages, settled steps and a heartbeat. On rank 0, looks after the collector."""
        self._rendezvous.tend()
        self._introduce_again()
        self._guard.run(WATCHING, self._queue.make_steps)
        self._guard.run(STACK_SAMPLES, self._sampling.follow_order)
        self._send_messages()
        now, records = time.monotonic_ns(), self._queue.records
        while records and self._may_go(records[0], now):
            self._send_steps(records.popleft())
        self._send_finished(now)
        beat = self._guard.run("heartbeats", self._heartbeat.beat, now, self.dropped)
        beat = beat or Beat(rank=self._rank, at_ns=now, step=self._recorder.step, phase="", since_ns=now)
        self._send(beat)
        if (stack := self._guard.run("stacks", self.stacks.take_beat, beat)) is not None:
            self._send(stack)
        self._queue.sender_cpu_ns = time.thread_time_ns()

    def _send_finished(self, now: int) -> None:
        """Sends what is finished of a stretch: its record leaves when the next step starts, which may never happen.

        The training thread only appends to the ends, until it moves the last one to `end` and lets the record go.
        """
        record = self._recorder.current  # read first: if it has gone since, it is among the records
        if record is None or self._queue.records or record.steps == 1 or self._recorder.gpu is not None:
            return
        last = record.ends[-1:]
        if last and now - last[0] > SETTLE_NS:
            self._send_steps(record, is_open=True)

    @staticmethod
    def _may_go(record: StepRecord, now: int) -> bool:
        """Returns whether a record is complete, or overdue. One that waits for the GPU is still being written to."""
        return record.settled() or (record.resolved and now - record.end > SETTLE_NS)

    def _send_rest(self) -> None:
        """Sends all that is left, settled or not, what was sampled until now, and the goodbye."""
        self._guard.run(WATCHING, self._queue.make_steps, True)
        self._send_messages()
        while self._queue.records:
            self._send_steps(self._queue.records.popleft())
        self._guard.run(STACK_SAMPLES, self._sampling.finish, ANSWER_S)
        self._send_messages()
        if self._goodbye is not None:
            self._send(self._goodbye)
        self._answer_the_last()

    def _answer_the_last(self) -> None:
        """Answers, on rank 0, the ranks that are about to ask: the job was very short."""
        until_s = time.monotonic() + ANSWER_S
        self._rendezvous.answer()
        while self._rendezvous.is_awaited and time.monotonic() < until_s:
            time.sleep(FIRST_LOOK_S)
            self._rendezvous.answer()

    def _send_messages(self) -> None:
        while self._queue.messages:
            message = self._queue.messages.popleft()
            if isinstance(message, Layout):
                message.rank = self._rank
                self._layouts[message.module, message.epoch] = message
                self._layouts.pop((message.module, message.epoch - KEEP_LAYOUTS), None)
            elif isinstance(message, Group):
                message.rank = self._rank
                self._groups[message.id] = message
            self._send(message)

    def _send(self, message: Message) -> bool:
        """Returns whether there was room for it."""
        if self._sink is None:
            return False
        try:
            self._sink.send(encode(message), zmq.DONTWAIT)
        except zmq.Again:
            self._refused += not isinstance(message, Beat)
            return False
        return True

    def _send_steps(self, record: StepRecord, is_open: bool = False) -> None:
        """Sends a record's steps. The first has the CPU time of this thread since the one before."""
        if not record.steps:  # all were sent while it was open
            return
        before, self._reported_cpu_ns = self._reported_cpu_ns, time.thread_time_ns()
        sender_ns = self._reported_cpu_ns - before
        for message in record.messages(self._rank, self.dropped, is_open):
            record.sent += 1
            message.sender_ns, sender_ns = sender_ns, 0
            self._guard.run("stacks", self.stacks.add_step, message)
            self._sampling.profiling.add_step(message)
            self._send(message)
        if record.last_hook is not None:
            self._heartbeat.last_hook = record.last_hook
