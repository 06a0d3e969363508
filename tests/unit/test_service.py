"""The collector's service: how it judges ranks whose processes it cannot see, and what it leaves when it fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from msgspec import structs

from ddpwatch.analysis.diagnosis.incident import is_by_ctrl_c
from ddpwatch.collector import devices, process_ends, service
from ddpwatch.collector.devices import DeviceSampler
from ddpwatch.collector.process_ends import Departure
from ddpwatch.collector.root import Root
from ddpwatch.collector.service import GONE, Collector, Options
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir, startup
from ddpwatch.run.blackbox import BlackBox
from ddpwatch.run.clock import boot_id, pid_namespace
from ddpwatch.sampling.lease import LEAD_STEPS, Lease
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire import transport
from ddpwatch.wire.control import Listen
from ddpwatch.wire.keys import new_key_pair
from ddpwatch.wire.messages import Bye, Device, EndReason, Hello, Message, encode
from ddpwatch.wire.transport import ReceiveClock
from tests.support import frames
from tests.support.jobs import wait_for

RUN = f"r{os.getpid()}"  # black boxes of all run directories on disks are in one place


@pytest.fixture
def collector(run_directory: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(service, "SILENT_S", 0.01)
    made = Collector(Options(run_id=RUN, world_size=3, watch_pid=os.getpid()))
    yield made
    if not made._ranks.closed:
        made._close()


@pytest.fixture
def ranks(collector: Collector) -> Iterator[list[transport.Socket]]:
    """Three ranks of another pid namespace, where each has the pid of this process here."""
    context = transport.Context()
    sockets = []
    for rank in range(3):
        sockets.append(transport.rank_push(context))
        sockets[-1].connect("ipc://" + os.environ["DDPWATCH_DIR"] + f"/{RUN}.in")
        hello = Hello(
            run_id=RUN, rank=rank, world_size=3, host="h", pid=os.getpid(), boot_id=boot_id(), pid_ns="pid:[1]"
        )
        sockets[-1].send(encode(hello))
        turn_until(collector, lambda known=rank + 1: len(collector._hub.ranks) == known)  # type: ignore[misc]
    yield sockets
    for socket in sockets:
        socket.close(linger=0)
    context.term()


def turn_until(collector: Collector, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        collector._ranks.poll(10)
        collector._receive_from_ranks()


def test_a_silent_rank_is_there_as_long_as_it_is_connected(collector: Collector, ranks: list[transport.Socket]) -> None:
    turn_until(collector, lambda: len(collector._hub.silent_ranks(time.time_ns(), 10_000_000)) == 3)
    assert not any(collector._liveness.is_followed(rank) for rank in range(3))
    assert collector._connections.count() == 3
    assert collector._disconnected() == {}


def test_as_many_are_gone_as_connections_the_longest_silent_first(
    collector: Collector, ranks: list[transport.Socket]
) -> None:
    ranks[0].close(linger=0)
    turn_until(collector, collector._disconnected)
    ((rank, departure),) = collector._disconnected().items()
    assert (rank, departure.reason, departure.detail) == (0, "lost", GONE)
    collector._departed.update(collector._disconnected())
    assert collector._disconnected() == {}
    ranks[1].close(linger=0)
    turn_until(collector, collector._disconnected)
    assert list(collector._disconnected()) == [1]


def test_one_that_fails_leaves_the_run_to_its_successor(
    collector: Collector, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file and the black boxes: the rank that starts it again holds the claim on them, too."""

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(collector, "_turn", fail)
    held = os.dup(collector._claim)
    with pytest.raises(MemoryError):
        collector.run()
    assert [info.run_id for info in rundir.live_runs()] == [RUN]
    successor = Collector(Options(run_id=RUN, world_size=3, watch_pid=os.getpid(), claim=held, restarts=1))
    assert [info.run_id for info in rundir.live_runs()] == [RUN]
    successor._close()
    assert rundir.live_runs() == []
    assert list(run_directory.iterdir()) == []


def introduce(collector: Collector, rank: int, previous: str) -> list[str]:
    """What the run's file names as the run before, once a rank has named that one."""
    about = {"host": "h", "pid": 1, "world_size": 4, "previous": previous}
    hello = Hello(run_id=RUN, rank=rank, **about)  # type: ignore[arg-type]
    collector._spread(hello, collector._hub.keep(hello, encode(hello), 1))
    return [info.previous for info in rundir.live_runs()]


def test_the_runs_file_names_the_run_before_once_a_rank_does(collector: Collector) -> None:
    """On whichever host. Where ranks name several, the most frequent one counts, and of several that of the lowest."""
    named = ["", "../r", "run-1", "run-2", "run-2", "run-1", "../r", "../r", "../r", ""]
    found = [introduce(collector, rank, previous) for rank, previous in enumerate(named)]
    assert found == [[name] for name in ("", "", "run-1", "run-1", "run-2", *["run-1"] * 5)]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), DdpwatchError("was removed")])
def test_a_run_file_that_cannot_be_written_does_not_end_the_collector(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(rundir, "publish", fail)
    assert introduce(collector, 0, "before") == [""]


def test_a_rank_that_an_interrupted_launcher_ended_says_so(
    collector: Collector, ranks: list[transport.Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun that gets two SIGINTs at once ends its ranks by SIGTERM, and 30 s later by SIGKILL; no rank died."""
    startup.create(file := tmp_path / "job.startup")
    monkeypatch.setenv(startup.VARIABLE, str(file))
    introduce(collector, 0, "")
    for interrupted in (False, True):
        departures = [Departure("killed", sent.name, sent, 1) for sent in (signal.SIGTERM, signal.SIGKILL)]
        ends = [collector._goodbye_for(0, departure) for departure in departures]
        assert [is_by_ctrl_c(end) for end in ends] == [interrupted, interrupted]
        assert [(end.signal, end.detail[:7]) for end in ends] == [(15, "SIGTERM"), (9, "SIGKILL")]
        startup.note_interrupt(file)


def test_a_run_directory_that_is_open_to_others_by_now_does_not_end_the_collector(
    collector: Collector, ranks: list[transport.Socket], run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that is gone, or on a disk that became read-only."""

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    run_directory.chmod(0o755)
    monkeypatch.setattr(os, "utime", fail)
    collector._renew_claim(time.monotonic() + 2 * service.RENEW_S)
    bye = collector._goodbye_for(0, Departure("killed", "SIGKILL", 9, 1))
    assert (bye.reason, bye.step) == ("killed", None)
    assert collector._attention._open_slot() is None
    monkeypatch.setattr(service, "LINGER_S", 0.0)
    monkeypatch.setattr(collector, "_is_over", lambda: True)
    collector.run()


def test_a_run_has_ended_once_its_recording_and_its_last_view_are_complete(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then `ddpwatch run` returns, while viewers still find the run."""
    record = tmp_path / "run.mcap"
    collector = Collector(Options(run_id=RUN, world_size=1, watch_pid=os.getpid(), record=str(record)))
    ended: list[bool] = []

    def look(_: float) -> None:
        (run,) = rundir.live_runs()
        ended.append(run.ended)
        assert not any(Recording(path).cut_tail for path in (record, rundir.last_view(RUN)))

    monkeypatch.setattr(collector, "_serve_snapshots", look)
    monkeypatch.setattr(collector, "_is_over", lambda: bool(ended.append(rundir.live_runs()[0].ended)) or True)
    collector.run()
    assert ended == [False, True]


def test_a_driver_that_never_answers_does_not_hold_up_the_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML may hang in the kernel once a GPU has fallen off the bus."""
    asked, answers = threading.Event(), threading.Event()

    def hang(_: DeviceSampler) -> list[Device]:
        asked.set()
        answers.wait()
        return [Device(host="h", kind="cpu", at_ns=3)]

    monkeypatch.setattr(devices, "SAMPLE_S", 0.01)
    monkeypatch.setattr(DeviceSampler, "sample", hang)
    collector._devices.start()
    assert asked.wait(60.0)
    collector._devices.stop()
    closing = threading.Thread(target=collector._close, daemon=True)
    closing.start()
    closing.join(30.0)
    closed = not closing.is_alive()
    answers.set()
    collector._devices.join()
    collector._context.term()
    assert closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sampler_that_dies_leaves_no_socket_behind(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end would wait for it."""

    def fail(_: DeviceSampler) -> list[Device]:
        raise ZeroDivisionError

    opened: list[transport.Socket] = []
    real = collector._context.socket
    monkeypatch.setattr(collector._context, "socket", lambda kind: opened.append(real(kind)) or opened[-1])
    monkeypatch.setattr(devices, "SAMPLE_S", 0.01)
    monkeypatch.setattr(DeviceSampler, "sample", fail)
    collector._devices.start()
    collector._devices.join(60.0)
    assert [socket.closed for socket in opened] == [True]


def test_a_place_is_looked_for_once_and_not_for_each_of_a_thousand_ranks(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames wait meanwhile."""
    asked = []
    real = rundir.file_system
    monkeypatch.setattr(rundir, "file_system", lambda path: asked.append(path) or real(path))
    for rank in range(1000):
        hello = Hello(run_id=RUN, rank=rank, world_size=1000, host="h", pid=1)
        collector._hub.keep(hello, encode(hello), 1)
    box = BlackBox()
    box.open(rundir.blackbox(RUN, 999))
    box.begin_step(7, 5)
    asked.clear()
    assert collector._attention._open_slot() == 5
    assert len(asked) <= 2


def test_an_order_begins_soon_where_steps_are_long_now_and_then(collector: Collector) -> None:
    """It began 260 steps later, each fifth of which took 400 ms: when its viewer had given up."""
    hello = Hello(run_id=RUN, rank=0, world_size=1, host="h", pid=1)
    collector._hub.keep(hello, encode(hello), 1)
    for number in range(20):
        step = frames.step(0, number, duration_ns=(400 if number % 5 == 0 else 4) * frames.MS)
        collector._hub.keep(step, encode(step), number)
    box = BlackBox()
    box.open(rundir.blackbox(RUN, 0))
    box.begin_step(7, 5)
    collector._attention.take_order(StackOrder(number=1, rank=0, peer=0, steps=40))
    order = collector._attention.order
    assert order is not None
    assert 5 + LEAD_STEPS + 12 < order.first_slot < 5 + LEAD_STEPS + 20


def test_orders_of_viewers_reach_the_ranks_one_after_the_other(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a step on that none has reached; each stands as long as its viewer waits."""
    hello = Hello(run_id=RUN, rank=0, world_size=1, host="h", pid=1)
    collector._hub.keep(hello, encode(hello), 1)
    lease, box = Lease(), BlackBox()
    lease.open(rundir.lease(RUN))
    box.open(rundir.blackbox(RUN, 0))
    box.begin_step(7, 5)
    endpoint = collector._viewers.getsockopt_string(transport.zmq.LAST_ENDPOINT)
    first, second = LiveSource(endpoint), LiveSource(endpoint)

    def ordered(number: int | None) -> bool:
        collector._turn()
        found = lease.order()
        return (None if found is None else found.number) == number

    try:
        first.order_stacks(StackOrder(11, 0, 0, 20))
        wait_for(lambda: ordered(11), "the first order")
        second.order_stacks(StackOrder(12, 0, 0, 30))
        collector._turn()
        order = lease.order()
        assert order is not None
        assert (order.number, order.steps) == (11, 20)
        assert order.first_slot >= 5 + LEAD_STEPS
    finally:
        first.close()
    wait_for(lambda: ordered(12), "the second order")
    second.close()
    wait_for(lambda: ordered(None), "no order any more")


def test_a_sample_that_fails_is_not_the_last(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Device(host="h", kind="cpu", at_ns=3)
    samples = iter([OSError(errno.EMFILE, "Too many open files"), [host]])

    def sample(_: DeviceSampler) -> list[Device]:
        found = next(samples, [host])
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(devices, "SAMPLE_S", 0.01)
    monkeypatch.setattr(DeviceSampler, "sample", sample)
    collector._devices.start()
    arrived = collector._devices.frames.poll(30_000)
    collector._devices.stop()
    assert arrived


def test_the_death_of_a_process_whose_name_is_no_text() -> None:
    """A name of more than 15 bytes is cut, maybe within a character."""
    script = "import time; open('/proc/self/comm', 'wb').write(b'caf\\xc3'); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_ends._proc_state(process.pid) == ("Z", 9)


@contextmanager
def ending(script: str) -> Iterator[tuple[Hello, Callable[[], None]]]:
    """A process as rank 0, and what lets it go on to its end, which nobody has asked for yet."""
    with subprocess.Popen([sys.executable, "-c", f"import sys; sys.stdin.read(); {script}"], stdin=-1) as process:
        about = {"host": "h", "pid": process.pid, "boot_id": boot_id(), "pid_ns": pid_namespace()}

        def end() -> None:
            assert process.stdin is not None
            process.stdin.close()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        yield Hello(run_id=RUN, rank=0, world_size=1, **about), end  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "reason"), [(0, "finished"), (3, "lost")])
def test_a_process_that_ends_without_a_goodbye_has_finished_if_its_exit_code_says_so(code: int, reason: str) -> None:
    """As with a job's own ``_exit`` in C, which ddpwatch does not see."""
    follows = process_ends.ProcessLiveness(zmq.Poller())
    with ending(f"exit({code})") as (hello, end):
        follows.follow(hello)
        end()
        assert follows.corrections(set(follows.fds)) == []
        departure = follows.departures(set(follows.fds))[0]
    assert (departure.reason, departure.detail) == (reason, f"exited with code {code} without saying goodbye")
    follows.close()


FINISHED = Bye(rank=0, by="rank", reason="finished", at_ns=5, step=7, phase="input", exits=True)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("exit(3)", "exited with code 3"),
        ("exit()", ""),
        ("import os; os.kill(os.getpid(), 9)", ""),  # it is the launcher that does not wait for its exit handlers
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
def test_a_rank_that_says_it_has_finished_may_have_failed_all_the_same(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, ends: str, said: str
) -> None:
    """``sys.exit(3)``: exit handlers, such as ddpwatch's, do not know the code."""
    published: list[Message] = []
    monkeypatch.setattr(service, "EXIT_S", 1e9)
    monkeypatch.setattr(collector._links, "send_up", lambda message, frame: published.append(message))
    with ending(ends) as (hello, end):
        for message in (hello, FINISHED):
            collector._publish(message)
        monkeypatch.setattr(collector, "_options", Options(run_id=RUN, world_size=1, watch_pid=os.getpid()))
        assert (collector._liveness.pids(), collector._is_over()) == ({}, False)
        end()
        collector._handle_departures(set(collector._liveness.fds))
    assert collector._is_over()
    reason, number = ("killed", 11) if said == "SIGSEGV" else ("lost", None)
    failed = [structs.replace(FINISHED, by="collector", reason=reason, detail=said, signal=number)] if said else []
    assert published == [hello, FINISHED, *failed]
    assert collector._hub.end_reason() == (reason if said else "finished")


def test_an_end_that_is_noticed_before_the_goodbye_is_read_corrects_it(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[Message] = []
    monkeypatch.setattr(collector._links, "send_up", lambda message, frame: published.append(message))
    with ending("exit(3)") as (hello, end):
        collector._publish(hello)
        end()
        collector._handle_departures(set(collector._liveness.fds))
        collector._publish(FINISHED)
    failed = structs.replace(FINISHED, by="collector", reason="lost", detail="exited with code 3")
    assert published == [hello, FINISHED, failed]


@pytest.mark.parametrize("reason", ["finished", "exception"])
def test_what_has_only_stopped_watching_is_not_waited_for_unless_another_rank_failed(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, reason: EndReason
) -> None:
    """Nor is the exit code of a process whose successor has come."""
    monkeypatch.setattr(collector, "_options", Options(run_id=RUN, world_size=2, watch_pid=os.getpid()))
    monkeypatch.setattr(service, "EXIT_S", 0.0)
    monkeypatch.setattr(service, "FAILED_EXIT_S", 1e9)
    with ending("exit(3)") as (hello, end):
        for message in (hello, FINISHED, structs.replace(FINISHED, rank=1, reason=reason)):
            collector._publish(message)
        assert collector._is_over() is (reason == "finished")
        collector._publish(structs.replace(hello, pid=os.getpid()))
        end()
        assert collector._liveness.corrections(set(collector._liveness.fds)) == []


def test_the_exit_code_of_a_process_that_went_on_without_ddpwatch_is_not_its_rank_s(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends its workers with code 1 after they have trained."""
    monkeypatch.setattr(service, "EXIT_S", 1e9)
    monkeypatch.setattr(collector, "_options", Options(run_id=RUN, world_size=1, watch_pid=os.getpid()))
    with ending("exit(1)") as (hello, end):
        for message in (hello, structs.replace(FINISHED, exits=False)):
            collector._publish(message)
        assert collector._is_over()
        end()
        assert collector._liveness.corrections(set(collector._liveness.fds)) == []


def test_receive_times_never_go_back(collector: Collector) -> None:
    """Where the system's clock is set back by a minute, all ranks would seem to be silent for a minute."""
    wall, steady = 1_000_000_000_000, 5_000
    collector._clock = ReceiveClock(lambda: wall, lambda: steady)
    hello = Hello(run_id=RUN, rank=0, world_size=3, host="h", pid=1)
    received = []
    for jump in (0, 50, -60_000_000_000, 0, 3_600_000_000_000):
        wall, steady = wall + jump + 10, steady + 10
        collector._publish(hello)
        received.append(collector._hub.ranks[0].seen_ns)
    assert [at - received[0] for at in received] == [0, 60, 70, 80, received[4] - received[0]]
    assert received[4] == wall


def test_while_late_viewers_have_their_chance_failed_handshakes_are_still_received(collector: Collector) -> None:
    """An event that nobody receives blocks ZeroMQ, and with it the viewers."""
    root = Root(collector._context, Listen(new_key_pair()), RUN, lambda: None)
    collector._links._root = root
    monitor = root.sources[2]
    turn_until(collector, root.listen)
    context = transport.Context()
    knocking = context.socket(zmq.DEALER)  # without a key
    knocking.connect(root._agents.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    assert monitor.poll(30_000)
    collector._serve_snapshots(time.monotonic() + 0.05)
    assert root.nodes.refused["bad handshake"] > 0
    context.destroy(linger=0)
