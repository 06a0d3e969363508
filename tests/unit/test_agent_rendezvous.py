"""How ranks on other hosts find an agent: another run directory makes another host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe import agent_rendezvous
from ddpwatch.probe.agent_rendezvous import CollectorAddress, JobUnwatchedError
from ddpwatch.probe.rendezvous import Rendezvous
from ddpwatch.run import rundir
from ddpwatch.wire.control import Admit, Connect, ControlSocket, Listen, Listening, Order, Ready, Report

ENDPOINT = "tcp://10.0.0.1:29600"


class FakeCollector:
    """The other end of the collector that a rank has started: no process. Answers as the root would."""

    started: ClassVar[list[FakeCollector]] = []
    listening = Listening(ENDPOINT)

    def __init__(self, command: list[str], pass_fds: tuple[int, int], **_: Any) -> None:
        self.command = command
        self.channel = ControlSocket(socket.socket(fileno=os.dup(pass_fds[1])))
        self.orders: list[Order | Report] = []
        self.code: int | None = None
        FakeCollector.started.append(self)
        os.write(pass_fds[0], b"{}")  # its entry in the run directory
        self.channel.send(Ready())

    def poll(self) -> int | None:
        for order in self.channel.receive():
            self.orders.append(order)
            if isinstance(order, Listen):
                self.channel.send(self.listening)
        return self.code

    def of(self, kind: type[Any]) -> list[Any]:
        return [order for order in self.orders if isinstance(order, kind)]


class Job:
    """Ranks that share a store, some of them on other hosts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.store = dist.HashStore()
        self.ranks: dict[int, Rendezvous] = {}
        self._hosts: dict[int, Path] = {}
        self._monkeypatch = monkeypatch
        self._folder = folder

    def add(self, rank: int, host: str, world_size: int = 4) -> None:
        self._hosts[rank] = self._folder / host
        self._on_host(rank)
        self.ranks[rank] = Rendezvous(rank, world_size, 1, self.store, None)
        self.ranks[rank].start()

    def find(self, rank: int) -> CollectorAddress | None:
        self._on_host(rank)
        return self.ranks[rank].find()

    def turn(self) -> dict[int, CollectorAddress | None]:
        """Every rank looks once, rank 0 last."""
        found = {rank: self.find(rank) for rank in sorted(self.ranks, reverse=True)}
        for rank in self.ranks:
            self._on_host(rank)
            self.ranks[rank].tend()
        return found

    def _on_host(self, rank: int) -> None:
        self._monkeypatch.setenv("DDPWATCH_DIR", str(self._hosts[rank]))

    def node(self, rank: int) -> str:
        self._on_host(rank)
        return rundir.node()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(subprocess, "Popen", FakeCollector)
    monkeypatch.setattr(FakeCollector, "started", [])
    with tempfile.TemporaryDirectory(prefix="dw-") as folder:
        made = Job(monkeypatch, Path(folder))
        yield made
        for rank in made.ranks.values():
            rank.leave()
        for collector in FakeCollector.started:
            collector.channel.close()


def two_hosts(job: Job) -> dict[int, CollectorAddress | None]:
    for rank in range(4):
        job.add(rank, "alpha" if rank < 2 else "beta")
    for _ in range(4):
        found = job.turn()
    return found


def test_each_host_has_one_collector_and_the_root_knows_whose_ranks_are_whose(job: Job) -> None:
    found = two_hosts(job)
    root, agent = FakeCollector.started
    run_id, node = job.ranks[0].run_id, job.node(2)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[3] is not None
    assert (found[3].run_id, found[3].files) == (run_id, f"{run_id}.{node}")
    assert found[3].endpoint == f"ipc://{os.environ['DDPWATCH_DIR'].replace('alpha', 'beta')}/{run_id}.{node}.in"
    (connect,) = agent.of(Connect)
    assert (connect.endpoint, connect.node) == (ENDPOINT, node)
    admitted = root.of(Admit)[-1]
    assert (admitted.node, admitted.key, sorted(admitted.ranks)) == (node, connect.keys.public, [2, 3])
    (listen,) = root.of(Listen)
    assert listen.keys.public == connect.key
    assert root.orders[0] == listen  # before anybody is admitted
    assert ["--node" in collector.command for collector in (root, agent)] == [False, True]


def test_a_job_on_one_host_has_no_listener(job: Job) -> None:
    for rank in range(2):
        job.add(rank, "alpha", world_size=2)
    for _ in range(3):
        found = job.turn()
    assert found[0] == found[1] is not None
    (collector,) = FakeCollector.started
    assert collector.orders == []


def test_secrets_are_in_no_argument_and_not_in_the_store(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[str] = []
    put = job.store.set

    class Noting:
        """A store that notes what is put into it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(job_store, name)

        def set(self, name: str, text: str) -> None:
            stored.append(text)
            put(name, text)

    job_store = job.store
    monkeypatch.setattr(job, "store", Noting())
    two_hosts(job)
    root, agent = FakeCollector.started
    secrets = [root.of(Listen)[0].keys.secret, agent.of(Connect)[0].keys.secret]
    assert len(stored) > 4
    for secret in secrets:
        assert not [text for text in stored if secret in text]
        assert not [word for each in (root, agent) for word in each.command if secret in word]


def test_a_collector_that_is_started_again_gets_the_same_orders(job: Job) -> None:
    two_hosts(job)
    root, agent = FakeCollector.started
    root.code = agent.code = -9
    job.turn()
    job.turn()
    _, _, *second = FakeCollector.started
    assert len(second) == 2
    again = {type(order): order for each in second for order in each.orders}
    assert again[Listen] == Listen(root.of(Listen)[0].keys, ENDPOINT)  # where the agents look for it
    assert again[Admit] == root.of(Admit)[-1]
    assert again[Connect] == agent.of(Connect)[0]


def test_a_rank_stays_with_the_node_that_named_it_first(job: Job) -> None:
    two_hosts(job)
    root = FakeCollector.started[0]
    session = job.ranks[0]._address
    assert session is not None
    prefix = agent_rendezvous.join_prefix(session.session)
    local, unnamed, beyond = (0, "ffffffffffff"), (2, "no name"), (4, "ffffffffffff")
    for rank, node in ((2, "ffffffffffff"), local, (1, "ffffffffffff"), unnamed, beyond):
        text = json.dumps({"rank": rank, "node": node, "key": "k" * 40})
        agent_rendezvous.PendingRequest(job.store, prefix, agent_rendezvous.Seal(), text).answer()
    job.turn()
    root.poll()
    assert {order.node: sorted(order.ranks) for order in root.of(Admit)} == {job.node(2): [2, 3]}


def test_a_root_that_cannot_listen_leaves_local_views_with_one_warning(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeCollector, "listening", Listening("", "no such interface"))
    found = two_hosts(job)
    assert None not in found.values()
    assert FakeCollector.started[1].of(Connect) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"ddpwatch: no such interface; {agent_rendezvous.LOCAL_ONLY}"
    ]


def test_a_rank_0_that_does_not_answer_leaves_local_views(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_rendezvous, "JOIN_TIMEOUT_S", -1.0)
    two_hosts(job)
    assert [record.getMessage().startswith("ddpwatch: rank 0 has not answered") for record in caplog.records] == [True]


def test_a_host_whose_agent_cannot_start_says_so_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, host in enumerate(("alpha", "alpha", "/proc/nowhere", "/proc/nowhere")):
        job.add(rank, host)
    for rank in (2, 3):
        assert job.find(rank) is None
    job.find(0)
    errors = {}
    for rank in (2, 3):
        monkeypatch.setenv("LOCAL_RANK", str(rank - 2))
        with pytest.raises(DdpwatchError, match="nowhere") as caught:
            job.find(rank)
        errors[rank] = caught.value
    assert not isinstance(errors[2], JobUnwatchedError)
    assert isinstance(errors[3], JobUnwatchedError)


def test_a_question_without_the_jobs_secret_is_not_answered(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.add(2, "beta")
    assert job.find(2) is None
    (tmp_path / "secret").write_text("of this job")
    monkeypatch.setenv("DDPWATCH_SECRET_FILE", str(tmp_path / "secret"))
    job.add(0, "alpha")
    for _ in range(2):
        job.turn()
    assert job.find(2) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "an entry of the job's store is not signed with this job's secret" in said


def test_an_answer_without_the_jobs_secret_is_not_taken(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("of this job")
    monkeypatch.setenv("DDPWATCH_SECRET_FILE", str(tmp_path / "secret"))
    job.add(2, "beta")
    assert job.find(2) is None
    request = job.ranks[2]._request
    assert request is not None
    job.store.set(f"ddpwatch/1/answer/{request._request.nonce}", '{"run_id": "x", "endpoint": "ipc://x"}')
    with pytest.raises(DdpwatchError, match="not signed"):
        job.find(2)


@pytest.mark.parametrize("lie", ["", "junk", "{}", '{"run_id": 7, "endpoint": "ipc://x"}', '["\\u001b[2J"]'])
def test_what_is_no_answer_of_rank_0s_is_refused_in_one_line(job: Job, lie: str) -> None:
    """A store that lies, about the collector and then about the root."""
    job.add(2, "beta")
    assert job.find(2) is None
    request = job.ranks[2]._request
    assert request is not None
    job.store.set(f"ddpwatch/1/answer/{request._request.nonce}", lie)
    with pytest.raises(DdpwatchError, match="something other than rank 0's answer"):
        job.find(2)


@pytest.mark.parametrize("lie", ["junk", '{"endpoint": 1}'])
def test_what_is_no_address_of_a_root_is_refused_and_costs_nobody_else(job: Job, lie: str) -> None:
    for rank in (0, 1, 2, 3):
        job.add(rank, "alpha" if rank < 2 else f"beta{rank}")
    for rank in (2, 3, 0, 2):
        job.find(rank)
    guest_2 = job.ranks[2]._agent
    assert guest_2 is not None
    assert guest_2._join is not None
    prefix = agent_rendezvous.join_prefix(guest_2._address.session)
    job.store.set(f"{prefix}/answer/{guest_2._join._request.nonce}", lie)
    with pytest.raises(DdpwatchError, match="something other than rank 0's answer"):
        job.find(2)
    job.ranks.pop(2).leave()
    for _ in range(4):
        found = job.turn()
    assert None not in found.values()
    assert [order.endpoint for agent in FakeCollector.started for order in agent.of(Connect)] == [ENDPOINT]


def test_with_the_same_secret_everywhere_all_is_as_without(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("of this job")
    monkeypatch.setenv("DDPWATCH_SECRET_FILE", str(tmp_path / "secret"))
    assert None not in two_hosts(job).values()
    assert len(FakeCollector.started[1].of(Connect)) == 1
