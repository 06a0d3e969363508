"""The sender thread: when it works, and its last words, said if somebody listens and given up soon if nobody does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ddpwatch.errors import DdpwatchError
from ddpwatch.messages import Beat, Bye, Hello, Step, decode
from ddpwatch.probe import sender as sender_module
from ddpwatch.probe.sender import Sender
from ddpwatch.recording.reader import Recording
from tests.support.runs import hello_of

BYE = Bye(rank=0, by="rank", reason="finished", at_ns=1)


@pytest.fixture(autouse=True)
def _rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", str(tmp_path / "rendezvous"))


def test_a_collector_that_does_not_listen_delays_the_exit_by_far_less_than_a_second(tmp_path: Path) -> None:
    errors: list[Exception] = []
    sender = Sender(0, lambda: f"ipc://{tmp_path}/nobody", errors.append)
    sender.post(hello_of(0, 1))
    sender.start()
    begun = time.monotonic()
    sender.stop(BYE)
    assert time.monotonic() - begun < 0.8
    sender.join(5.0)
    assert not sender.is_alive()
    assert errors == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_file_of_its_own_is_named_by_the_run(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rank 0 has named, on whichever host; without a name there is none."""
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", str(tmp_path / "files"))
    errors: list[Exception] = []
    asked: list[int] = []
    hello = hello_of(1, 2)
    hello.run_id = ""

    def find() -> str | None:
        asked.append(1)
        if len(asked) < 3:
            return None
        hello.run_id = "train-7"
        if elsewhere:
            raise DdpwatchError("rank 1 is on another host than rank 0")
        return "ipc://somewhere"

    sender = Sender(1, find, errors.append)
    sender.post(hello)
    sender.start()
    deadline = time.monotonic() + 10.0
    while len(asked) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    sender.stop(BYE, 5.0)
    assert errors == []
    messages = [message for message, _ in Recording(tmp_path / "files" / "train-7" / "rank00001.mcap")]
    assert isinstance(messages[0], Hello)
    assert isinstance(messages[-1], Bye)
    assert not any(isinstance(message, Step) for message in messages)


def test_a_run_without_a_name_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", str(tmp_path / "files"))

    def find() -> str | None:
        raise DdpwatchError("rank 0 has not called watch() within 60 s")

    errors: list[Exception] = []
    sender = Sender(1, find, errors.append)
    hello = hello_of(1, 2)
    hello.run_id = ""
    sender.post(hello)
    sender.start()
    sender.join(5.0)
    assert [str(error) for error in errors] == ["rank 0 has not called watch() within 60 s"]
    assert not (tmp_path / "files").exists()


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[tuple[Sender, zmq.Socket[bytes]]]:
    """A sender that is yet to start, and the collector's end."""
    endpoint = f"ipc://{tmp_path}/collector"
    with zmq.Context() as context, context.socket(zmq.PULL) as collector:
        collector.bind(endpoint)
        sender = Sender(0, lambda: endpoint, pytest.fail)
        yield sender, collector
        sender.stop(BYE)


def test_it_works_when_the_training_thread_begins_to_wait(
    heard: tuple[Sender, zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "REST_S", 0.0)
    monkeypatch.setattr(sender_module, "LULL_S", 3600.0)
    sender, collector = heard
    sender.start()
    deadline = time.monotonic() + 10.0
    while sender._due == math.inf and time.monotonic() < deadline:
        time.sleep(0.01)
    sender.post(hello_of(0, 1))
    sender.recorder.lull()
    assert collector.poll(10_000)
    assert isinstance(decode(collector.recv()), Hello)  # and nothing before it, not even a heartbeat
    assert collector.poll(10_000)
    assert isinstance(decode(collector.recv()), Beat)


def test_a_training_thread_that_never_waits_is_not_waited_for(
    heard: tuple[Sender, zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "LULL_S", 0.01)
    sender, collector = heard
    sender.start()
    assert collector.poll(10_000)
    assert isinstance(decode(collector.recv()), Beat)
