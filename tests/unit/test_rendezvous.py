"""How ranks find their collector, without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe import store_requests
from ddpwatch.probe.agent_rendezvous import CollectorAddress, JobUnwatchedError
from ddpwatch.probe.rendezvous import Rendezvous
from ddpwatch.run import rundir

pytestmark = pytest.mark.usefixtures("run_directory")


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of collectors, none of which starts."""
    commands: list[list[str]] = []

    class Popen:
        """Starts nothing, and reports readiness at once."""

        def __init__(self, command: list[str], pass_fds: tuple[int, int], **_: Any) -> None:
            commands.append(command)
            os.write(pass_fds[0], b"{}")  # its entry in the run directory
            os.write(pass_fds[1], b'{"type":"ready"}\n')

        def poll(self) -> None:
            return None

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return commands


def recording(command: list[str]) -> Path:
    return Path(command[command.index("--record") + 1])


_made: list[Rendezvous] = []


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    yield
    while _made:
        _made.pop().leave()


def rendezvous(rank: int, world_size: int = 1, store: Any = None, record: Path | None = None) -> Rendezvous:
    _made.append(Rendezvous(rank, world_size, 1, store, record))
    _made[-1].start()
    return _made[-1]


def found(rendezvous: Rendezvous) -> CollectorAddress:
    address = rendezvous.find()
    assert address is not None
    return address


def test_two_jobs_below_one_ddpwatch_run_are_two_runs(
    spawned: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("DDPWATCH_RUN", "train-120000-abcd")
    runs = [found(rendezvous(0, record=tmp_path / "run.mcap")).run_id for _ in range(2)]
    assert all(run.startswith("train-120000-abcd") for run in runs)
    assert len(set(runs)) == 2
    assert [recording(command).name for command in spawned] == ["run.mcap", "run-2.mcap"]
    assert [record.message for record in caplog.records] == [
        f"ddpwatch records to {tmp_path / 'run-2.mcap'}: run.mcap exists"
    ]


def test_a_restart_has_a_recording_of_its_own(
    spawned: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPWATCH_RUN", "train-120000-abcd")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert found(rendezvous(0, record=tmp_path / "run.mcap")).run_id.endswith(".1")
    assert recording(spawned[0]).name == "run.1.mcap"


def test_a_device_is_recorded_to_as_it_is(spawned: list[list[str]]) -> None:
    found(rendezvous(0, record=Path("/dev/null")))
    assert recording(spawned[0]) == Path("/dev/null")


def ask_and_answer(first: Rendezvous, *others: Rendezvous) -> list[CollectorAddress | None]:
    """What the others find, after they have asked and rank 0 has looked."""
    for other in others:
        assert other.find() is None
    first.find()
    first.tend()
    return [other.find() for other in others]


def test_the_other_ranks_get_an_answer_each(spawned: list[list[str]]) -> None:
    store = dist.HashStore()
    first = rendezvous(0, 3, store)
    answers = ask_and_answer(first, rendezvous(1, 3, store), rendezvous(2, 3, store))
    assert answers == [found(first)] * 2


def test_an_address_that_an_earlier_incarnation_has_left_is_not_taken(spawned: list[list[str]]) -> None:
    """The store and even the restart count are the same: agents reuse the one, and count the other for themselves."""
    store = dist.HashStore()
    old = rendezvous(0, 3, store)
    assert ask_and_answer(old, rendezvous(1, 3, store)) == [found(old)]
    old.leave()
    late = rendezvous(2, 3, store)
    assert late.find() is None  # asked before the new rank 0 came
    assert late.find() is None
    new = rendezvous(0, 3, store)
    assert ask_and_answer(new, rendezvous(1, 3, store)) == [found(new)]
    assert late.find() == found(new) != found(old)


def test_a_rank_that_died_when_it_had_counted_its_question_does_not_stop_the_others(spawned: list[list[str]]) -> None:
    store = dist.HashStore()
    first = rendezvous(0, 3, store)
    store.add("ddpwatch/1/questions", 2)
    assert ask_and_answer(first, rendezvous(1, 3, store)) == [found(first)]
    store.add("ddpwatch/1/questions", 1)
    assert ask_and_answer(first, rendezvous(2, 3, store)) == [found(first)]


def test_a_counter_that_somebody_else_has_set_costs_a_bounded_number_of_looks(
    spawned: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    first = rendezvous(0, 2, store)
    store.add("ddpwatch/1/questions", 1 << 40)
    assert first._server is not None
    looks: list[str] = []

    def check(names: list[str]) -> bool:
        looks.extend(names)
        return False

    seen = SimpleNamespace(add=store.add, get=store.get, set=store.set, check=check)
    monkeypatch.setattr(first._server._requests, "_store", seen)
    monkeypatch.setattr(store_requests, "MOST_LOOKS", 10)
    found(first)
    assert len(looks) == 10


def test_a_run_id_from_the_store_is_checked(spawned: list[list[str]]) -> None:
    store = dist.HashStore()
    first, other = rendezvous(0, 2, store), rendezvous(1, 2, store)
    assert other.find() is None
    assert first._server is not None
    first._server.serve(CollectorAddress("../../x", "ipc:///x.in"), None)
    with pytest.raises(DdpwatchError, match="not a run id"):
        other.find()


def test_rank_0_says_once_where_it_falls_back_to(
    spawned: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DDPWATCH_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/no-such-directory")
    store = dist.HashStore()
    first = rendezvous(0, 2, store)
    assert ask_and_answer(first, rendezvous(1, 2, store)) == [found(first)]
    rundir.log(first.run_id).unlink()
    rundir.remove(first.run_id)
    assert [record.message.count("XDG_RUNTIME_DIR") for record in caplog.records] == [1]


def test_where_rank_0_cannot_watch_the_others_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", "/proc/no-such-directory")
    store = dist.HashStore()
    first, early, late = (rendezvous(rank, 3, store) for rank in range(3))
    assert early.find() is None
    with pytest.raises(DdpwatchError, match="no-such-directory"):
        first.find()
    assert first.refuse()
    with pytest.raises(JobUnwatchedError):
        early.find()
    assert late.find() is None
    assert first.refuse()
    with pytest.raises(JobUnwatchedError):
        late.find()
    assert not late.refuse()


def test_a_store_that_has_gone_ends_the_answers_only(spawned: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    first = rendezvous(0, 3, store)
    address = found(first)

    def gone(*_: object) -> bool:
        raise RuntimeError("Connection reset by peer")

    assert first._server is not None
    monkeypatch.setattr(first._server._requests, "_store", SimpleNamespace(check=gone, add=gone))
    first.tend()
    first.answer()
    assert first.find() is address


def test_rank_files_need_no_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", "/proc/no-such-directory")
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", "/anywhere")
    store = dist.HashStore()
    first, other = rendezvous(0, 2, store), rendezvous(1, 2, store)
    assert ask_and_answer(first, other) == [found(first)]
    assert other.run_id == first.run_id


def test_questions_that_were_left_do_not_delay_the_answers(spawned: list[list[str]]) -> None:
    store = dist.HashStore()
    for rank in (1, 2):
        assert rendezvous(rank, 3, store).find() is None
    first = rendezvous(0, 3, store)
    found(first)
    assert ask_and_answer(first, rendezvous(1, 3, store), rendezvous(2, 3, store)) == [found(first)] * 2


def test_rank_0_answers_while_its_training_thread_waits_for_a_name() -> None:
    """As in ``new_group`` with a rank that is late. Over the job's own connection, it would wait as well, and hang."""
    store = dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60)))
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        store.get("late")

    own = store_requests.StoreConnection(store, own=True)
    assert not own.check(["late"])
    training = threading.Thread(target=wait, daemon=True)
    training.start()
    assert waits.wait(30)
    own.set("late", "here")
    training.join(30)
    assert not training.is_alive()
    assert own.get("late") == b"here"


def test_a_rank_of_rank_0s_host_reads_its_answer_there(
    spawned: list[list[str]], run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may hold the store, and end while a call is under way: then torch prints a stack trace."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store, asked = dist.HashStore(), []
    monkeypatch.setattr(
        store_requests.StoreConnection, "check", lambda self, names: asked.append(names) or store.check(names)
    )
    first, second = rendezvous(0, 2, store), rendezvous(1, 2, store)
    assert second.find() is None
    assert asked == []
    found(first)
    asked.clear()  # those of rank 0
    assert found(second) == found(first)
    assert asked == []
    assert not list(run_directory.glob("*.answer*"))


def test_a_rank_that_has_asked_again_leaves_no_answer_behind(
    spawned: list[list[str]], run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(store_requests, "ASK_AGAIN_S", 0.0)
    store = dist.HashStore()
    first, second = rendezvous(0, 2, store), rendezvous(1, 2, store)
    assert [second.find(), second.find()] == [None, None]
    found(first)
    assert found(second) == found(first)
    first.answer()
    assert not list(run_directory.glob("*.answer*"))


def test_a_rank_that_has_another_run_directory_than_rank_0_finds_its_answer_in_the_store(
    spawned: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(store_requests, "ASK_AGAIN_S", 0.0)
    store = dist.HashStore()
    first, second = rendezvous(0, 2, store), rendezvous(1, 2, store)
    with monkeypatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(tmp_path / "other"))
        assert second.find() is None
    found(first)
    with monkeypatch.context() as patch:
        patch.setattr(store_requests, "_take_answer", lambda nonce: "")
        assert found(second).run_id == found(first).run_id


def test_a_store_that_has_gone_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    held = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("job", dist.TCPStore("127.0.0.1", held.port, 1, is_master=False, wait_for_workers=False))
    connections = store_requests.StoreConnection(store), store_requests.StoreConnection(store, own=True)
    for connection in connections:
        connection.set("name", "text")
        assert connection.get("name") == b"text"
    del held
    for connection in connections:
        with pytest.raises(store_requests.StoreGoneError):
            connection.check(["name"])
    assert capfd.readouterr().err == ""


def test_a_store_without_connections_is_used_as_it_is() -> None:
    store = dist.HashStore()
    own = store_requests.StoreConnection(store, own=True)
    own.set("name", "text")
    assert (own.add("count", 2), store.get("name"), own.check(["name", "nothing"])) == (2, b"text", False)


def test_a_run_directory_that_was_removed_gets_no_note(
    spawned: list[list[str]], run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would remove it there."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    first, second = rendezvous(0), rendezvous(0)
    found(first)
    assert [path.suffix for path in run_directory.glob("*.note")] == [".note"]
    shutil.rmtree(run_directory)
    found(second)
    assert not list(run_directory.glob("*.note"))
