"""The sender thread: when it works, and its goodbye, which is sent to a collector and soon given up without one."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe import sender as sender_module
from ddpwatch.probe.agent_rendezvous import CollectorAddress
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.send_queue import BACKLOG, SendQueue
from ddpwatch.probe.sender import Sender
from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir
from ddpwatch.sampling.lease import LeasePage
from ddpwatch.sampling.stack_order import PARTIAL, RUN_ENDED, StackOrder
from ddpwatch.wire.messages import Beat, Bye, Hello, Layout, Message, StackSamples, Step, decode
from tests.support.guards import noting
from tests.support.jobs import wait_for
from tests.support.runs import hello_of

BYE = Bye(rank=0, by="rank", reason="finished", at_ns=1)


@pytest.fixture(autouse=True)
def _rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", str(tmp_path / "rendezvous"))


class PatientSender(Sender):
    """Notes how long it was waited for at most."""

    def join(self, timeout: float | None = None) -> None:
        self.patience_s = math.inf if timeout is None else timeout
        super().join(timeout)


class FakeRendezvous:
    """Finds what it is given."""

    def __init__(self, find: Callable[[], CollectorAddress | None]) -> None:
        self.find = find
        self.found = threading.Event()
        self.refused = 0

    is_awaited = False
    previous = ""

    def tend(self) -> None:
        self.found.set()

    def answer(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def refuse(self) -> bool:
        self.refused += 1
        return self.refused < 3


def sender_of(
    rank: int, find: Callable[[], CollectorAddress | None], errors: list[Exception]
) -> tuple[PatientSender, SendQueue, FakeRendezvous]:
    queue, rendezvous = SendQueue(), FakeRendezvous(find)
    recorder = StepRecorder(queue.add_step)
    return PatientSender(rank, queue, recorder, rendezvous, noting(errors)), queue, rendezvous  # type: ignore[arg-type]


def here(endpoint: str) -> CollectorAddress:
    return CollectorAddress("train-7", endpoint)


def test_a_collector_that_does_not_listen_delays_the_exit_by_far_less_than_a_second(tmp_path: Path) -> None:
    errors: list[Exception] = []
    sender, queue, rendezvous = sender_of(0, lambda: here(f"ipc://{tmp_path}/nobody"), errors)
    queue.post(hello_of(0, 1))
    sender.start()
    assert rendezvous.found.wait(60.0)
    sender.stop(BYE)
    assert sender.patience_s < 0.8
    sender.join(60.0)
    assert not sender.is_alive()
    assert errors == []


def stretch(first: int) -> StepRecord:
    """Three bare steps of 100 ns."""
    record = StepRecord(first, 100 * first)
    record.status, record.ends, record.end = "unwatched", [100 * first + 100, 100 * first + 200], 100 * first + 300
    return record


def test_each_step_of_a_stretch_is_sent_and_lost_as_one(tmp_path: Path) -> None:
    sender, queue, _ = sender_of(0, lambda: here(f"ipc://{tmp_path}/collector"), pytest.fail)
    queue.post(hello_of(0, 1))
    queue.add_step(stretch(0))
    queue.add_step(stretch(3))
    with zmq.Context() as context, bound(context, f"ipc://{tmp_path}/collector") as socket:
        sender.start()
        messages = [received(socket) for _ in range(7)]
        sender.stop(BYE)
    sent = [message for message in messages if isinstance(message, Step)]
    assert [(step.step, step.start_ns, step.duration_ns) for step in sent] == [(i, 100 * i, 100) for i in range(6)]
    for number in range(BACKLOG + 1):
        queue.add_step(stretch(3 * number))
    assert queue.dropped == 3


class Frames:
    """A sink that keeps the steps, and all messages."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.messages: list[Message] = []

    def send(self, data: bytes, flags: int = 0) -> None:
        self.messages.append(message := decode(data))
        if isinstance(message, Step):
            self.steps.append(message)

    def close(self) -> None:
        pass


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[tuple[Sender, SendQueue, Frames]]:
    """A sender whose thread does not run."""
    sender, queue, _ = sender_of(0, lambda: None, pytest.fail)
    sender._sink = frames = Frames()
    yield sender, queue, frames
    sender._context.term()


def test_the_finished_steps_of_a_stretch_are_sent_while_the_job_hangs_in_the_next(
    idle: tuple[Sender, SendQueue, Frames],
) -> None:
    sender, _, frames = idle
    recorder = sender._recorder
    recorder.current, recorder.steps = stretch(0), 2
    for _ in range(2):
        sender._send_settled()
        assert [(step.step, step.start_ns, step.duration_ns) for step in frames.steps] == [(0, 0, 100), (1, 100, 100)]
    recorder.current.ends += [300, time.monotonic_ns() + 3600 * 10**9]  # it goes on, however late this test does
    recorder.steps = 4
    sender._send_settled()
    assert len(frames.steps) == 2
    recorder.abort()
    sender._send_settled()
    assert [step.step for step in frames.steps] == [0, 1, 2, 3, 4]


def test_they_may_be_all_that_the_stretch_has(idle: tuple[Sender, SendQueue, Frames]) -> None:
    sender, queue, frames = idle
    recorder = sender._recorder
    recorder.current, recorder.steps = stretch(0), 2
    sender._send_settled()
    recorder.abort()
    assert [record.steps for record in queue.records] == [0, 1]
    sender._send_rest()
    assert [(step.step, step.status) for step in frames.steps] == [(0, "unwatched"), (1, "unwatched"), (2, "aborted")]


def test_they_do_not_overtake_the_steps_before(idle: tuple[Sender, SendQueue, Frames]) -> None:
    sender, queue, frames = idle
    before = StepRecord(0, 0)
    before.resolved = False
    queue.add_step(before)
    sender._recorder.current = stretch(1)
    sender._send_settled()
    assert not frames.steps
    before.resolved = True
    sender._send_settled()
    assert [step.step for step in frames.steps] == [0, 1, 2]


def test_what_was_sampled_until_the_end_is_sent_before_the_goodbye(
    idle: tuple[Sender, SendQueue, Frames], tmp_path: Path
) -> None:
    """It was lost: the thread that samples posted it once nobody sent any more."""
    sender, _, frames = idle
    page, recorder = LeasePage(tmp_path / "r.lease"), sender._recorder
    recorder.lease.open(tmp_path / "r.lease")
    page.order(StackOrder(77, 0, 1, 60, 0))
    sender._send_settled()
    wait_for(lambda: recorder.lease.sampled, "it samples")
    sender._stopping.set()
    sender._goodbye = BYE
    sender._send_rest()
    *_, samples, bye = frames.messages
    assert isinstance(samples, StackSamples)
    assert (samples.ordered, samples.cut_short) == (60 - PARTIAL, RUN_ENDED)
    assert bye == BYE


def test_a_rank_that_ends_before_rank_0_has_answered_waits_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the collector of a short job may be there just before the job ends."""
    monkeypatch.setattr(sender_module, "STARTING_S", 0.0)
    endpoint, asked_late = f"ipc://{tmp_path}/collector", []

    def find() -> CollectorAddress | None:
        asked_late.extend([1] if sender._stopping.is_set() else [])
        return here(endpoint) if asked_late else None

    sender, queue, _ = sender_of(1, find, pytest.fail)
    queue.post(hello_of(1, 2))
    with zmq.Context() as context, bound(context, endpoint) as socket:
        sender.start()
        sender.stop(BYE)
        assert sender.patience_s < 1.0
        assert isinstance(received(socket), Hello)
    sender.join(60.0)


def test_a_file_of_its_own_is_named_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 names the run, on any host; without a name there is no file."""
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", str(tmp_path / "files"))
    errors: list[Exception] = []
    asked: list[int] = []
    hello = hello_of(1, 2)
    hello.run_id = ""

    def find() -> CollectorAddress | None:
        asked.append(1)
        return CollectorAddress("train-7", "ipc://somewhere", "another host") if asked[2:] else None

    sender, queue, _ = sender_of(1, find, errors)
    queue.post(hello)
    sender.start()
    deadline = time.monotonic() + 60.0
    while len(asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    sender.stop(BYE)
    sender.join(60.0)
    assert errors == []
    messages = [message for message, _ in Recording(tmp_path / "files" / "train-7" / "rank00001.mcap")]
    assert isinstance(messages[0], Hello)
    assert isinstance(messages[-1], Bye)
    assert not any(isinstance(message, Step) for message in messages)


def test_a_run_without_a_name_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", str(tmp_path / "files"))

    def find() -> CollectorAddress | None:
        raise DdpwatchError("rank 0 has not called watch() within 60 s")

    errors: list[Exception] = []
    sender, queue, rendezvous = sender_of(1, find, errors)
    hello = hello_of(1, 2)
    hello.run_id = ""
    queue.post(hello)
    sender.start()
    sender.join(60.0)
    assert [str(error) for error in errors] == ["rank 0 has not called watch() within 60 s"]
    assert not (tmp_path / "files").exists()
    assert rendezvous.refused == 3  # as long as other ranks may ask


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[tuple[Sender, SendQueue, zmq.Socket[bytes]]]:
    """A sender that has not started, its queue, and the collector's end."""
    endpoint = f"ipc://{tmp_path}/collector"
    with zmq.Context() as context, context.socket(zmq.PULL) as collector:
        collector.bind(endpoint)
        sender, queue, _ = sender_of(0, lambda: here(endpoint), pytest.fail)
        yield sender, queue, collector
        sender.stop(BYE)


def test_it_works_when_the_training_thread_begins_to_wait(
    connected: tuple[Sender, SendQueue, zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "REST_S", 0.0)
    monkeypatch.setattr(sender_module, "EXTRA_REST_S", 3600.0)
    sender, queue, collector = connected
    sender.start()
    deadline = time.monotonic() + 60.0
    while queue.due_s == math.inf and time.monotonic() < deadline:
        time.sleep(0.01)
    queue.post(hello_of(0, 1))
    queue.wake_if_due()
    assert collector.poll(60_000)
    assert isinstance(decode(collector.recv()), Hello)  # and nothing before it, not even a heartbeat
    assert collector.poll(60_000)
    assert isinstance(decode(collector.recv()), Beat)


def test_a_training_thread_that_never_waits_is_not_waited_for(
    connected: tuple[Sender, SendQueue, zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "EXTRA_REST_S", 0.01)
    sender, _, collector = connected
    sender.start()
    assert collector.poll(60_000)
    assert isinstance(decode(collector.recv()), Beat)


def test_it_introduces_the_rank_again_to_a_collector_that_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank itself, and its newest layouts; a first connection is no reason."""
    monkeypatch.setattr(sender_module, "REST_S", 0.01)
    monkeypatch.setattr(sender_module, "EXTRA_REST_S", 0.0)
    endpoint = f"ipc://{tmp_path}/collector"
    sender, queue, _ = sender_of(0, lambda: here(endpoint), pytest.fail)
    queue.post(hello_of(0, 1))
    for epoch in range(1, 7):
        queue.post(Layout(rank=0, epoch=epoch, params=["w"], buckets=[]))
    with zmq.Context() as context:
        first = bound(context, endpoint)
        sender.start()
        assert introduction(first, 7) == ["hello", 1, 2, 3, 4, 5, 6]
        assert all(isinstance(received(first), Beat) for _ in range(10))
        first.close(linger=0)
        second = bound(context, endpoint)
        assert introduction(second, 5) == ["hello", 3, 4, 5, 6]
        sender.stop(BYE)
        second.close(linger=0)


def bound(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.bind(endpoint)
    return socket


def received(socket: zmq.Socket[bytes]) -> Message:
    assert socket.poll(60_000)
    return decode(socket.recv())


def introduction(socket: zmq.Socket[bytes], count: int) -> list[str | int]:
    """The next hellos and layouts, these by their epoch."""
    found: list[str | int] = []
    while len(found) < count:
        message = received(socket)
        if isinstance(message, Hello | Layout):
            found.append("hello" if isinstance(message, Hello) else message.epoch)
    return found


@pytest.mark.parametrize("is_up", [True, False])
def test_no_black_box_outlives_the_goodbye(is_up: bool, tmp_path: Path) -> None:
    """Nor is there one if the collector has ended, with nobody to remove it."""
    run_id = f"box-{os.getpid()}"  # boxes of all run directories lie in one place
    claim = rundir.claim(run_id) if is_up else -1
    address = CollectorAddress(run_id, f"ipc://{tmp_path}/collector")
    sender, queue, rendezvous = sender_of(0, lambda: address, pytest.fail)
    queue.post(hello_of(0, 1))
    box = rundir.blackbox(run_id, 0)
    assert box is not None
    sender.start()
    assert rendezvous.found.wait(60.0)
    assert box.exists() is is_up
    sender.stop(BYE)
    sender.join(60.0)
    assert not box.exists()
    if is_up:
        os.close(claim)
