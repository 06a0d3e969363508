"""The collector process: sockets, timers and the orderly end around a `Hub`.

One thread does everything but sample devices and write the recording. It never waits for a rank, a viewer or a disk,
and it ends by itself once the job has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from ddpwatch.collector.attention import Attention
from ddpwatch.collector.devices import DeviceThread
from ddpwatch.collector.hub import Hub
from ddpwatch.collector.node_links import NodeLinks
from ddpwatch.collector.process_ends import Connections, Departure, ProcessLiveness, corrected
from ddpwatch.collector.recording_thread import CLOSE_S, RecordingState, RecordingThread
from ddpwatch.collector.snapshots import RETRY_S, Snapshots
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.recording.limits import limits_from_environment
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.run import blackbox, clock, rundir, startup
from ddpwatch.run.commit import commit_of
from ddpwatch.run.subprocesses import module_command
from ddpwatch.sampling.lease import detail_of_job
from ddpwatch.sampling.stack_order import EXPLAIN, FIRST_INCIDENT
from ddpwatch.wire import transport
from ddpwatch.wire.control import Ready, take_rest
from ddpwatch.wire.messages import (
    INTERRUPTED_LAUNCHER,
    Bye,
    Hello,
    Message,
    RankSample,
    Status,
    decode,
    encode,
    run_before,
    sends_no_more,
    type_name,
)
from ddpwatch.wire.transport import Envelope, ReceiveClock

TICK_S = 0.5
GOODBYE_GRACE_S = 0.5  # between a process's end and the arrival of the goodbye it may have sent
EXIT_S = 1.0  # between the last goodbye and the exit code; a job that only stops watching goes on
FAILED_EXIT_S = 5.0  # the same if a rank failed: maybe because of one that is still taking its interpreter apart
ORPHANED_S = 1.0  # for what a rank may have sent before it ended, without another rank
MISSING_RANK_GRACE_S = 5.0  # for ranks that never said hello, once all others have ended
NO_RANK_TIMEOUT_S = 120.0  # for the first hello
SIGNALLED_S = 0.3  # from a signal to the end: what sends a second one, kills, leaves little time
SIGNALLED_CLOSE_S = 3.0  # for the recording, after a signal; only a busy machine or a bad disk takes so long
SILENT_S = 5.0  # without a frame and without a connection, a rank whose process cannot be seen is gone
GONE = f"no connection, and no frame for {SILENT_S:.0f} s"
LINGER_S = 3.0  # after the end, for viewers that attach late
RENEW_S = 3600.0
RECEIVE_LIMIT = 2000  # frames per turn of the loop
_log = logging.getLogger("ddpwatch.collector")


@dataclass(frozen=True, slots=True)
class Options:
    """The collector's arguments.

    Attributes:
        watch_pid: The process that started it.
        claim: The claim on the run (`rundir.claim`), inherited; without one, the collector makes it.
        control: A socket to the rank that has started it (`ddpwatch.wire.control`), or -1.
        node: Of the agent of another node than rank 0's: its name.
        restarts: How many collectors of this run have died.
    """

    run_id: str
    world_size: int
    watch_pid: int
    script: str = ""
    record: str = ""
    claim: int = -1
    control: int = -1
    node: str = ""
    restarts: int = 0


class Collector:
    """One run's collector. `run` returns when the job is over."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._hub = Hub(options.world_size, options.restarts, (clock.boot_id(), clock.time_namespace()))
        self._clock = ReceiveClock()
        self._context = transport.Context()
        ingest, publish = rundir.endpoints(options.run_id)
        # The claim comes first: binding takes a socket's path from others.
        self._claim = options.claim if options.claim >= 0 else rundir.claim(options.run_id)
        self._renewed = time.monotonic()
        self._ranks = transport.collector_pull(self._context)
        self._connections = Connections(self._ranks)
        self._ranks.bind(transport.check_endpoint(ingest))
        self._viewers = transport.collector_publish(self._context, publish)
        self._snapshots = Snapshots(self._viewers, self._hub)
        self._own_ppm = _own_ppm(bool(options.record))
        self._attention = Attention(options.run_id, options.world_size, self._hub.ranks)
        self._poller = zmq.Poller()
        self._liveness = ProcessLiveness(self._poller)
        self._devices = DeviceThread(self._context, self._liveness.pids)
        for source in (self._ranks, self._viewers, self._devices.frames):
            self._poller.register(source, zmq.POLLIN)
        self._links = NodeLinks(
            self._context,
            self._poller,
            options.control,
            options.run_id,
            bool(options.node),
            options.restarts,
            self._hub,
            self._attention,
        )
        self._info = _info(options, ingest, publish)
        rundir.publish(self._claim, self._info)
        self._signal: signal.Signals | None = None
        self._signalled = 0.0
        self._wake: tuple[socket.socket, ...] = ()
        self._recording_thread: RecordingThread | None = None
        self._recording = RecordingState()
        self._unsent: list[Envelope] = []  # what viewers get at the end of the turn
        self._departed: dict[int, Departure] = {}
        self._previous: dict[int, str] = {}  # the run before, by the ranks that know of one
        self._started = time.monotonic()
        self._last_end = self._started
        self._next_tick = self._watched_s = self._started

    def end_on(self, *numbers: signal.Signals) -> None:
        """Makes these signals end the collector, with a goodbye and a complete recording. Main thread only."""
        self._wake = woken, waking = socket.socketpair()
        for end in self._wake:
            end.setblocking(False)
        signal.set_wakeup_fd(waking.fileno())  # ends the poll at once; pyzmq goes on polling after a handler
        self._poller.register(woken, zmq.POLLIN)
        for number in numbers:
            signal.signal(number, self._note_signal)

    def run(self) -> None:
        """Serves until the job has ended and late viewers have had their chance, or a signal comes."""
        self._devices.start()
        try:
            self._open_recording()
            self._links.report(Ready())
            self._explain_first_incident()
            while not self._is_over():
                self._turn()
            self._end_run()
            self._serve_snapshots(time.monotonic() + LINGER_S)
            with contextlib.suppress(DdpwatchError):  # the run directory is not to be used any more
                rundir.remove(self._options.run_id)  # not after an error: then the next collector needs it
        finally:
            self._devices.stop()
            self._close()

    def _explain_first_incident(self) -> None:
        """Starts what does, if the job wants it: a viewer, which ends by itself."""
        if os.environ.get(EXPLAIN) != FIRST_INCIDENT or self._options.node or self._options.restarts:
            return
        nowhere = subprocess.DEVNULL
        command = module_command("ddpwatch.viewer.first_incident", self._options.run_id)
        try:
            subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
        except OSError as error:
            _log.warning("%s: %s", EXPLAIN, error)

    def _note_signal(self, number: int, _: object) -> None:
        if self._signal is None:
            self._signal, self._signalled = signal.Signals(number), time.monotonic()

    # -- one turn of the loop --------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Looks after what is ready: with a hundred nodes, most turns are for a ping, and must be short."""
        remaining_s = self._next_tick - time.monotonic()
        polled = transport.poll(self._poller, max(0, int(remaining_s * 1000) + 1))
        ready = polled.ready
        if self._ranks in ready:
            self._receive_from_ranks()
        for node, frame in self._links.turn(polled):
            accepted = self._hub.accept_from_node(frame, node.number, node.ranks, self._clock.now_ns())
            if accepted is not None:
                self._spread(*accepted)
        if self._signal is not None:
            with contextlib.suppress(BlockingIOError):
                self._wake[0].recv(64)
        if self._devices.frames in ready:
            for frame in _received(self._devices.frames):
                sample = decode(frame)
                self._publish(self._hub.placed(sample) if isinstance(sample, RankSample) else sample)
        is_due = time.monotonic() >= self._next_tick
        if is_due or ready & self._liveness.fds.keys():
            self._handle_departures(ready)
        if is_due:
            self._tick()
        self._send_to_viewers()
        if is_due or self._viewers in ready or self._snapshots.is_sending:
            self._snapshots.serve()
            self._links.grant(max(self._snapshots.wanted_ppm, self._own_ppm), is_due)
            self._links.order(self._snapshots.order)

    def _tick(self) -> None:
        """Does what is due twice a second."""
        now = time.monotonic()
        self._next_tick = now + TICK_S
        self._take_rests()
        self._publish_status()
        for state in self._links.states(now):
            self._publish(state)
        self._renew_claim(now)

    def _send_to_viewers(self) -> None:
        for batch in transport.batches(self._unsent):
            transport.publish(self._viewers, transport.LIVE, batch)
        self._unsent.clear()

    def _receive_from_ranks(self) -> None:
        for _ in range(RECEIVE_LIMIT):
            try:
                parts = [self._ranks.recv(transport.DONTWAIT)]
            except zmq.Again:
                return
            while self._ranks.get(transport.RCVMORE):
                parts.append(self._ranks.recv(transport.DONTWAIT))
            accepted = self._hub.accept(parts, self._clock.now_ns())
            if accepted is not None:
                self._spread(*accepted, is_local=True)

    def _take_rests(self) -> None:
        """Takes what ranks have left that ended before this collector was up."""
        with contextlib.suppress(DdpwatchError, OSError):  # the run directory is gone
            for path in rundir.rests(self._options.run_id):
                for frame in take_rest(path):
                    if (accepted := self._hub.accept([frame], self._clock.now_ns())) is not None:
                        self._spread(*accepted, is_local=True)

    def _publish(self, message: Message, frame: bytes | None = None) -> None:
        """Keeps and spreads a message that comes from the collector itself."""
        envelope = self._hub.keep(message, frame or encode(message), self._clock.now_ns())
        self._spread(message, envelope, is_local=True)

    def _spread(self, message: Message, envelope: Envelope, is_local: bool = False) -> None:
        """Sends a frame to viewers and the recording, one of this node also up, and notes who comes and goes."""
        if self._snapshots.has_viewers:
            self._unsent.append(envelope)
        if self._recording_thread is not None:
            self._recording_thread.take_frame(message, envelope)
        if is_local:
            self._links.send_up(message, envelope.frame)
        if isinstance(message, Hello):
            self._note_previous(message)
            if is_local:
                self._liveness.follow(message)
        elif isinstance(message, Bye) and message.rank is not None:
            self._last_end = time.monotonic()
            departure = self._departed.pop(message.rank, None)
            self._liveness.take_goodbye(message.rank, message)
            if departure is not None and (failed := corrected(message, departure)) is not None:
                self._publish(failed)  # its process had ended before that was read

    def _note_previous(self, hello: Hello) -> None:
        """Lets `ddpwatch ls` say which run this one continues: a rank of any node may know it."""
        if not rundir.is_run_id(hello.previous):
            return
        self._previous[hello.rank] = hello.previous
        if (previous := run_before(self._previous)) != self._info.previous:
            self._info.previous = previous
            self._publish_info()

    def _publish_info(self) -> None:
        with contextlib.suppress(DdpwatchError, OSError):  # the file was removed, or the disk is full
            rundir.publish(self._claim, self._info)

    def _publish_status(self) -> None:
        if self._recording_thread is not None:
            self._recording = self._recording_thread.state
        status = Status(
            at_ns=time.monotonic_ns(),
            frames=self._hub.frames,
            bytes=self._hub.bytes,
            refused=dict(self._hub.refused + self._links.refused),
            recording=self._options.record,
            recording_bytes=self._recording.nbytes,
            recording_error=self._recording.error,
            restarts=self._options.restarts,
            lease_ppm=self._attention.granted_ppm(time.monotonic_ns()),
            cpu_ns=time.process_time_ns(),
            here=len(self._here()),
            whole=self._links.whole,
            order=0 if self._attention.order is None else self._attention.order.number,
        )
        self._publish(status)

    def _renew_claim(self, now: float) -> None:
        """Touches the run's files now and then: what is old is taken for left over, by us and by a cleaner of /tmp."""
        if now - self._renewed > RENEW_S:
            self._renewed = now
            with contextlib.suppress(DdpwatchError, OSError):  # the directory is gone, or read-only
                rundir.renew(self._claim, self._options.run_id)

    # -- ends of ranks and of the run ------------------------------------------------------------------------

    def _handle_departures(self, ready: Container[object]) -> None:
        """Finds processes that have ended, and sends the goodbye of those that did not within the grace.

        Corrects that of ranks that said they had finished, and failed.
        """
        for goodbye in self._liveness.corrections(ready):
            self._publish(goodbye)
        self._departed.update(self._liveness.departures(ready))
        self._departed.update(self._disconnected())
        for rank, departure in list(self._departed.items()):
            if time.monotonic_ns() - departure.at_ns > GOODBYE_GRACE_S * 1e9:
                self._publish(self._goodbye_for(rank, departure))

    def _here(self) -> list[int]:
        """Returns the ranks of this node that have not ended."""
        running = [rank for rank, entry in self._hub.ranks.items() if entry.ended is None]
        return [rank for rank in running if not self._links.is_elsewhere(rank)]

    def _disconnected(self) -> dict[int, Departure]:
        """Returns ranks whose processes cannot be seen, and whose silence and missing connections say they are gone.

        A connection does not say whose it is, but there are no more ranks than connections. So of the silent ranks as
        many are gone as connections are missing, those with the longest silence.
        """
        here = self._here()
        missing = len(here) - len(self._departed) - self._connections.count()
        if missing <= 0:
            return {}
        silent = self._hub.silent_ranks(self._clock.now_ns(), int(SILENT_S * 1e9))
        hidden = [rank for rank in silent if rank in here and rank not in self._departed]
        hidden = [rank for rank in hidden if not self._liveness.is_followed(rank)]
        lost = Departure("lost", GONE, None, time.monotonic_ns())
        return dict.fromkeys(hidden[:missing], lost)

    def _goodbye_for(self, rank: int, departure: Departure) -> Bye:
        """Returns a goodbye with the position from the rank's black box.

        Without one, with the step of its last heartbeat.
        """
        from ddpwatch.analysis.diagnosis.incident import is_by_launcher  # a collector starts without it

        beat = self._hub.ranks[rank].last_beat
        last = blackbox.read(rundir.blackbox(self._options.run_id, rank))
        if beat is not None and (last is None or sends_no_more(beat)):
            last = blackbox.LastState(beat.step, "", [])  # its phase is old, and mostly that of a waiting backward
        found = Bye(
            rank=rank,
            by="collector",
            reason=departure.reason,
            detail=departure.detail,
            signal=departure.signal,
            at_ns=departure.at_ns,
            step=None if last is None else last.step,
            phase="" if last is None else last.phase,
            in_flight=[] if last is None else last.in_flight,
        )
        was_killed = found.signal == signal.SIGKILL  # by torchrun, if SIGTERM has not ended it after 30 s
        if (was_killed or is_by_launcher(found)) and startup.was_interrupted():
            found.detail = f"{'SIGKILL' if was_killed else 'SIGTERM'}{INTERRUPTED_LAUNCHER}"
        return found

    def _is_over(self) -> bool:
        now = time.monotonic()
        if self._signal is not None:  # ranks that got it, too, end now
            return self._hub.all_ended or now - self._signalled > SIGNALLED_S
        known = len(self._hub.ranks)
        if not known:
            waited_s = now - self._started
            if clock.pid_alive(self._options.watch_pid):
                self._watched_s = now
            return now - self._watched_s > ORPHANED_S or waited_s > NO_RANK_TIMEOUT_S
        complete = known >= self._options.world_size or now - self._last_end > MISSING_RANK_GRACE_S
        exit_s = EXIT_S if self._hub.end_reason() == "finished" else FAILED_EXIT_S
        if not complete or (self._liveness.is_leaving() and now - self._last_end < exit_s):
            return False
        ranks = self._hub.ranks.items()
        return all(entry.ended is not None or self._links.is_gone(rank, now) for rank, entry in ranks)

    def _end_run(self) -> None:
        self._receive_from_ranks()
        self._take_rests()
        for rank, departure in list(self._departed.items()):
            self._publish(self._goodbye_for(rank, departure))
        self._publish(self._goodbye_of_run())
        self._publish_status()
        self._send_to_viewers()
        self._links.finish(signalled=self._signal is not None)
        if self._recording_thread is not None:
            self._recording_thread.finish(CLOSE_S if self._signal is None else SIGNALLED_CLOSE_S)
            self._recording, self._recording_thread = self._recording_thread.state, None
            self._publish_status()  # what the disk did not take, for viewers only
            self._send_to_viewers()
        self._write_last_view()
        self._info.ended = True
        self._publish_info()

    def _goodbye_of_run(self) -> Bye:
        reason, detail = self._hub.end_reason(), ""
        if self._signal is not None and not self._hub.all_ended:
            reason = "killed"
        if self._signal is not None:
            detail = f"the collector got {self._signal.name}"
        return Bye(rank=None, by="collector", reason=reason, detail=detail, at_ns=time.monotonic_ns())

    def _serve_snapshots(self, deadline: float) -> None:
        """Answers viewers only: the recording is closed, and nothing new is published."""
        while self._signal is None and (remaining_s := deadline - time.monotonic()) > 0:
            self._viewers.poll(int(min(remaining_s, RETRY_S) * 1000) + 1)
            self._snapshots.serve()
            self._links.drain()

    def _close(self) -> None:
        os.close(self._claim)
        self._liveness.close()
        self._connections.close()
        self._links.close()
        for source in (self._ranks, self._viewers, self._devices.frames):
            source.close()
        for end in self._wake:
            end.close()
        if not self._devices.is_alive():  # one that waits for a driver for ever keeps its socket
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
        restarted = self._options.restarts > 0
        self._recording_thread = RecordingThread(self._options.record, self._about(), limits, resume=restarted)
        self._recording_thread.start()

    def _write_last_view(self) -> None:
        """Writes the snapshot as a small recording, for viewers that attach after the collector has gone."""
        try:
            writer = RecordingWriter(rundir.last_view(self._options.run_id), self._about())
            for envelope in self._hub.snapshot():
                writer.write(envelope, type_name(decode(envelope.frame)))
            writer.close()
            rundir.last_views()
        except (DdpwatchError, OSError) as error:
            _log.warning("no last view: %s", error)

    def _about(self) -> dict[str, str]:
        return {"run_id": self._options.run_id, "script": self._options.script, "commit": self._info.commit}


def _own_ppm(records: bool) -> int:
    """Returns what watching may cost though nobody looks; 0 if the job's variable is not valid, as ranks warn.

    Ranks of a job in ``full`` need no budget.
    """
    if os.environ.get("DDPWATCH_DETAIL") == "full":
        return 0
    try:
        return detail_of_job(os.environ, records)
    except UsageError:
        return 0


def _info(options: Options, ingest: str, publish: str) -> rundir.RunInfo:
    return rundir.RunInfo(
        run_id=options.run_id,
        ingest=ingest,
        publish=publish,
        pid=os.getpid(),
        world_size=options.world_size,
        started=time.time(),
        script=options.script,
        recording=options.record,
        host=socket.gethostname(),
        boot_id=clock.boot_id(),
        pid_ns=clock.pid_namespace(),
        start_ticks=clock.start_ticks(os.getpid()),
        launched=os.environ.get("DDPWATCH_RUN", ""),
        commit=commit_of(Path.cwd()),  # the job's directory
    )


def _received(source: transport.Socket) -> Iterator[bytes]:
    """Yields the one-part messages that have arrived."""
    while True:
        try:
            yield source.recv(zmq.DONTWAIT)
        except zmq.Again:
            return
