"""The collector process: sockets, timers and the orderly end around a Hub.

One thread does everything but sampling devices (NVML can take its time). It never waits for a rank, a viewer or a
disk longer than a write takes, and it ends by itself once the job has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Container
from dataclasses import dataclass

import zmq

from ddpwatch import blackbox, clock, rundir, transport
from ddpwatch.collector.devices import DeviceSampler
from ddpwatch.collector.hub import Hub
from ddpwatch.collector.liveness import Liveness
from ddpwatch.collector.recording_thread import RecordingState, RecordingThread
from ddpwatch.errors import DdpwatchError
from ddpwatch.messages import Bye, Device, EndReason, Hello, Message, Status, decode, encode, type_name
from ddpwatch.recording.rotation import limits_from_environment
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.transport import LIVE, SNAPSHOT, Envelope

TICK_S = 0.5
SAMPLE_S = 1.0
GOODBYE_GRACE_S = 0.5  # between a process's end and the arrival of the goodbye it may have sent
STRAGGLER_GRACE_S = 5.0  # for ranks that never said hello, once all others have ended
LINGER_S = 3.0  # after the end, for viewers that come late
NOBODY_S = 120.0
DRAIN = 2000
_SAMPLES = "inproc://devices"
_log = logging.getLogger("ddpwatch.collector")


@dataclass(frozen=True, slots=True)
class Options:
    """What the collector is started with. ``watch_pid`` is the process that started it."""

    run_id: str
    world_size: int
    watch_pid: int
    script: str = ""
    record: str = ""


class Collector:
    """One run's collector. `run` returns when the job is over."""

    def __init__(self, options: Options, sampler: DeviceSampler | None = None) -> None:
        self._options = options
        self._hub = Hub()
        self._liveness = Liveness()
        self._sampler = sampler
        self._context = transport.Context()
        ingest, publish = rundir.endpoints(options.run_id)
        self._pull = transport.collector_pull(self._context, ingest)
        self._publish = transport.collector_publish(self._context, publish)
        self._samples = self._context.socket(zmq.PULL)
        self._samples.bind(_SAMPLES)
        self._poller = zmq.Poller()
        for socket in (self._pull, self._publish, self._samples):
            self._poller.register(socket, zmq.POLLIN)
        self._recorder: RecordingThread | None = None
        self._recording = RecordingState()
        self._departed: dict[int, tuple[int, EndReason, str, int | None]] = {}
        self._ended: dict[int, Bye] = {}
        self._started = time.monotonic()
        self._last_end = self._started
        self._next_tick = self._started
        self._stop_sampling = threading.Event()
        rundir.write(
            rundir.RunInfo(
                run_id=options.run_id,
                ingest=ingest,
                publish=publish,
                pid=os.getpid(),
                world_size=options.world_size,
                started=time.time(),
                script=options.script,
                recording=options.record,
            )
        )

    def run(self) -> None:
        """Serves until the job has ended and late viewers had their chance."""
        sampling = threading.Thread(target=self._sample_devices, name="ddpwatch-devices", daemon=True)
        sampling.start()
        try:
            self._open_recording()
            while not self._over():
                self._turn()
            self._end_run()
            self._serve_until(time.monotonic() + LINGER_S)
        finally:
            self._stop_sampling.set()
            sampling.join(SAMPLE_S)
            self._close()

    # -- one turn of the loop --------------------------------------------------------------------------------

    def _turn(self) -> None:
        left = self._next_tick - time.monotonic()
        ready = {socket for socket, _ in self._poller.poll(max(0, int(left * 1000) + 1))}
        self._ingest()
        if self._samples in ready:
            self._take_samples()
        self._answer_viewers()
        now = time.monotonic()
        if ready & self._liveness.fds.keys() or now >= self._next_tick:
            self._notice_departures(ready)
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick()

    def _ingest(self) -> None:
        for _ in range(DRAIN):
            try:
                parts = self._pull.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            accepted = self._hub.accept(parts, time.time_ns())
            if accepted is not None:
                self._spread(*accepted)

    def _spread(self, message: Message, envelope: Envelope) -> None:
        """Publishes and records a frame, and notes what it says about a rank's life."""
        self._publish.send_multipart(envelope.parts(LIVE))
        if self._recorder is not None:
            self._recorder.take(message, envelope)
        if isinstance(message, Hello):
            self._meet(message)
        elif isinstance(message, Bye) and message.rank is not None:
            self._ended[message.rank] = message
            self._last_end = time.monotonic()
            self._departed.pop(message.rank, None)
            self._unfollow(message.rank)

    def _tell(self, message: Device | Bye | Status) -> None:
        self._spread(message, self._hub.tell(message, time.time_ns()))

    def _answer_viewers(self) -> None:
        while True:
            try:
                request = self._publish.recv(zmq.DONTWAIT)
            except zmq.Again:
                return
            if request[:1] == b"\x01" and request[1:].startswith(SNAPSHOT):
                self._send_snapshot(request[1:])

    def _send_snapshot(self, topic: bytes) -> None:
        for envelope in self._hub.snapshot():
            self._publish.send_multipart(envelope.parts(topic))
        self._publish.send_multipart(Envelope(self._hub.newest, time.time_ns(), b"").parts(topic))

    def _tick(self) -> None:
        if self._recorder is not None:
            self._recording = self._recorder.state
        self._tell(
            Status(
                at_ns=time.monotonic_ns(),
                frames=self._hub.frames,
                bytes=self._hub.bytes,
                refused=dict(self._hub.refused),
                recording=self._options.record,
                recording_bytes=self._recording.nbytes,
                recording_error=self._recording.error,
            )
        )

    # -- ranks that come and go ------------------------------------------------------------------------------

    def _meet(self, hello: Hello) -> None:
        if hello.boot_id != clock.boot_id():
            return
        fd = self._liveness.follow(hello.rank, hello.pid)
        if fd is not None:
            self._poller.register(fd, zmq.POLLIN)

    def _unfollow(self, rank: int) -> None:
        for fd in [fd for fd, owner in self._liveness.fds.items() if owner == rank]:
            self._poller.unregister(fd)
        self._liveness.forget(rank)

    def _notice_departures(self, ready: Container[object]) -> None:
        """Finds processes that have ended; those that do not say goodbye within the grace get it said for them."""
        fds = dict(self._liveness.fds)
        for rank, end in self._liveness.gone(ready).items():
            for fd in [fd for fd, owner in fds.items() if owner == rank]:
                self._poller.unregister(fd)
            self._departed[rank] = (time.monotonic_ns(), *end)
        for rank, (at_ns, reason, detail, signal) in list(self._departed.items()):
            if time.monotonic_ns() - at_ns > GOODBYE_GRACE_S * 1e9:
                self._tell(self._obituary(rank, at_ns, reason, detail, signal))

    def _obituary(self, rank: int, at_ns: int, reason: EndReason, detail: str, signal: int | None) -> Bye:
        """A goodbye for a rank that can say none: its black box tells where it was, or its last heartbeat the step."""
        beat = self._hub.ranks[rank].last_beat
        last = blackbox.read(rundir.blackbox(self._options.run_id, rank))
        if last is None and beat is not None:
            last = blackbox.LastState(beat.step, "", [])  # a beat is old, and comes mostly when a backward waits
        return Bye(
            rank=rank,
            by="collector",
            reason=reason,
            detail=detail,
            signal=signal,
            at_ns=at_ns,
            step=None if last is None else last.step,
            phase="" if last is None else last.phase,
            in_flight=[] if last is None else last.in_flight,
        )

    def _over(self) -> bool:
        now = time.monotonic()
        met = self._hub.ranks.keys()
        if not met:
            alone = not clock.pid_alive(self._options.watch_pid) and now - self._started > STRAGGLER_GRACE_S
            return alone or now - self._started > NOBODY_S
        if not all(rank in self._ended for rank in met):
            return False
        return len(met) >= self._options.world_size or now - self._last_end > STRAGGLER_GRACE_S

    def _cause(self) -> EndReason:
        """Why the run ended: how the first rank ended that did not finish. What follows it is a consequence."""
        if not self._ended:
            return "lost"
        bad = [bye for bye in self._ended.values() if bye.reason != "finished"]
        return min(bad, key=lambda bye: bye.at_ns).reason if bad else "finished"

    def _end_run(self) -> None:
        self._ingest()
        self._tell(Bye(rank=None, by="collector", reason=self._cause(), at_ns=time.monotonic_ns()))
        self._tick()
        if self._recorder is not None:
            self._recorder.finish()
            self._recording, self._recorder = self._recorder.state, None
            if self._recording.error:
                self._tick()  # the last word on what the disk did not take: for viewers only
        self._leave_last_view()

    def _leave_last_view(self) -> None:
        """Keeps what is retained as a small recording, for a viewer that comes after the collector has gone."""
        try:
            writer = RecordingWriter(rundir.last_view(self._options.run_id), self._about())
            for envelope in self._hub.snapshot():
                writer.write(envelope, type_name(decode(envelope.frame)))
            writer.close()
            rundir.last_views()
        except (DdpwatchError, OSError) as error:
            _log.warning("no last view: %s", error)

    def _about(self) -> dict[str, str]:
        return {"run_id": self._options.run_id, "script": self._options.script}

    def _serve_until(self, deadline: float) -> None:
        """Only answers viewers from here on: the recording is closed, nothing new is told."""
        while (left := deadline - time.monotonic()) > 0:
            self._publish.poll(int(left * 1000) + 1)
            self._answer_viewers()

    def _close(self) -> None:
        rundir.remove(self._options.run_id)
        self._liveness.close()
        for socket in (self._pull, self._publish, self._samples):
            socket.close()
        self._context.term()

    # -- recording -------------------------------------------------------------------------------------------

    def _open_recording(self) -> None:
        if not self._options.record:
            return
        try:
            limits = limits_from_environment(os.environ)
        except DdpwatchError as error:
            self._recording = RecordingState(error=str(error))
            _log.error("not recording: %s", error)
            return
        self._recorder = RecordingThread(self._options.record, self._about(), limits)
        self._recorder.start()

    # -- devices ---------------------------------------------------------------------------------------------

    def _sample_devices(self) -> None:
        sampler = self._sampler or DeviceSampler()
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(_SAMPLES)
        while not self._stop_sampling.wait(SAMPLE_S):
            with contextlib.suppress(zmq.Again):
                for device in sampler.sample():
                    socket.send(encode(device), zmq.DONTWAIT)
        socket.close()

    def _take_samples(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                message = decode(self._samples.recv(zmq.DONTWAIT))
                if isinstance(message, Device):
                    self._tell(message)
