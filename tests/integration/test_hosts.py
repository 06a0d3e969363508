"""A job on two simulated hosts: one run, one listener, and what happens when a process or a link fails."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire.messages import Bye, ClockExchange, Hello, Node, Status, Step
from tests.support.fork_server import ROOT
from tests.support.hosts import Host, linked, listeners, skip, why_not
from tests.support.jobs import SCRIPTS, Frames, Job, live, messages, read_until, the_run, wait_for

pytestmark = [
    pytest.mark.same_everywhere,
    pytest.mark.xdist_group("hosts"),
    pytest.mark.seconds(40),
]  # one job for all, in this order
RANKS = {"alpha": {0, 1}, "beta": {2, 3}}
KNOCK = """
import sys, zmq, zmq.utils.z85
endpoint, root_key = sys.argv[1:]
context = zmq.Context()
public, secret = zmq.curve_keypair()
wrong, _ = zmq.curve_keypair()
for key, server in ((None, None), (public, root_key.encode()), (public, wrong)):
    knocking = context.socket(zmq.DEALER)
    knocking.linger = 0
    if key:
        knocking.curve_publickey, knocking.curve_secretkey, knocking.curve_serverkey = key, secret, server
    monitor = knocking.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED |
        zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    knocking.connect(endpoint)
    knocking.send(b"let me in")
    event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
    print("in" if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else "refused")
    knocking.disable_monitor()
    knocking.close()
"""


@dataclass
class Setting:
    """The hosts and the job on them."""

    alpha: Host
    beta: Host
    job: Job
    folder: Path

    def look(self, host: Host) -> rundir.RunInfo:
        """The one run that can be seen on a host."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DDPWATCH_DIR", str(host.directory))
            return the_run(self.job)

    def collector(self, host: Host) -> psutil.Process:
        """The one collector on a host, once there is one."""
        found: list[psutil.Process] = []

        def there() -> bool:
            found[:] = host.processes("ddpwatch.collector")
            return len(found) == 1

        wait_for(there, f"a collector on {host.name}")
        return found[0]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    if why := why_not():
        skip(why)
    folder = tmp_path_factory.mktemp("hosts")
    run_directory = Path(f"/tmp/dw-{os.getpid()}")
    run_directory.mkdir(mode=0o700)
    hosts = linked(["alpha", "beta"], run_directory)
    pids = ",".join(str(host.pid) for host in hosts)
    arguments = (pids, str(folder))
    environment = {"DDPWATCH_DIR": str(run_directory), "DDPWATCH_DETAIL": "full"}
    try:
        with Job(SCRIPTS / "hosts.py", *arguments, log=folder / "log", ranks=4, **environment) as job:
            yield Setting(*hosts, job, folder)
    finally:
        for host in hosts:
            for process in host.processes("ddpwatch.collector"):
                process.kill()
            host.close()
        run_directory.rmdir()


def steps_of(frames: Frames) -> Counter[tuple[int, int]]:
    return Counter((step.rank, step.step) for step in messages(frames, Step) if isinstance(step, Step))


def ranks_seen(frames: Frames) -> set[int]:
    return {rank for rank, _ in steps_of(frames)}


def newest(frames: Frames, rank: int) -> int:
    return max((step for of, step in steps_of(frames) if of == rank), default=-1)


def status(frames: Frames) -> Status:
    found = messages(frames, Status)[-1]
    assert isinstance(found, Status)
    return found


def goes_on(source: LiveSource, what: str, ranks: tuple[int, ...] = (0, 1, 2, 3), steps: int = 10) -> Frames:
    """Reads until each of the ranks has sent some more steps."""

    def enough(frames: Frames) -> bool:
        return all(newest(frames, rank) >= first.get(rank, newest(frames, rank)) + steps for rank in ranks)

    first: dict[int, int] = {}
    before = read_until(source, lambda frames: ranks_seen(frames) >= set(ranks), f"{what}: steps of all")
    first.update({rank: newest(before, rank) for rank in ranks})
    return before + read_until(source, enough, what)


def test_all_ranks_are_in_one_run(setting: Setting) -> None:
    with live(setting.look(setting.alpha)) as viewer:
        frames = goes_on(viewer, "all ranks train")
    hellos = [hello for hello in messages(frames, Hello) if isinstance(hello, Hello)]
    assert {hello.run_id for hello in hellos} == {setting.look(setting.alpha).run_id}
    assert {(hello.host, hello.rank) for hello in hellos} == {(host, r) for host, ranks in RANKS.items() for r in ranks}
    assert set(steps_of(frames).values()) == {1}
    nodes = [node for node in messages(frames, Node) if isinstance(node, Node)]
    assert {(node.host, tuple(node.ranks), node.connected, node.dropped) for node in nodes[-1:]} == {
        ("beta", (2, 3), True, 0)
    }
    assert status(frames).refused == {}


def test_the_clocks_of_the_hosts_are_measured(setting: Setting) -> None:
    """They are the same clock here, so the order of the four stamps is known."""
    with live(setting.look(setting.alpha)) as viewer:
        frames = read_until(viewer, lambda frames: len(messages(frames, ClockExchange)) > 1, "exchanges")
    for exchange in messages(frames, ClockExchange):
        assert isinstance(exchange, ClockExchange)
        assert exchange.sent_ns <= exchange.received_ns <= exchange.replied_ns <= exchange.returned_ns


def test_another_host_shows_its_ranks_and_the_way_to_the_whole(setting: Setting) -> None:
    run_id = setting.look(setting.alpha).run_id
    with live(setting.look(setting.beta)) as viewer:
        frames = goes_on(viewer, "the ranks of beta train", ranks=(2, 3))
        frames += read_until(viewer, lambda frames: messages(frames, Status), "a status")
    assert ranks_seen(frames) == RANKS["beta"]
    assert status(frames).whole == f"ddpwatch attach ssh://alpha/{run_id}"


def test_one_process_listens_at_one_address(setting: Setting) -> None:
    (address,) = listeners(setting.collector(setting.alpha))
    assert address.startswith("01014D0A:")  # 10.77.1.1, mon0's
    assert listeners(setting.collector(setting.beta)) == []


def test_no_secret_is_in_an_argument_the_environment_or_a_file(setting: Setting) -> None:
    """Keys are 40 characters of Z85; public ones are in no argument, either."""
    for host in (setting.alpha, setting.beta):
        process = setting.collector(host)
        assert not [word for word in process.cmdline() if len(word) == 40]
        assert not [value for name, value in process.environ().items() if "SECRET" in name or "CURVE" in name]
        files = [path for path in host.directory.iterdir() if path.is_file()]
        key = (setting.folder / "key").read_bytes()
        assert not [path for path in files if key in path.read_bytes()]


def test_whoever_has_no_key_or_a_wrong_one_is_refused_and_counted(setting: Setting) -> None:
    (address,) = listeners(setting.collector(setting.alpha))
    endpoint = f"tcp://10.77.1.1:{int(address.partition(':')[2], 16)}"
    key = (setting.folder / "key").read_text()
    said = setting.beta.run(sys.executable, "-c", KNOCK, endpoint, key, PYTHONPATH=str(ROOT))
    assert said.split() == ["refused"] * 3
    with live(setting.look(setting.alpha)) as viewer:
        expected = {"unknown key", "bad handshake"}
        read_until(
            viewer, lambda frames: messages(frames, Status) and status(frames).refused.keys() >= expected, "counts"
        )


def test_the_budget_of_a_viewer_at_the_root_holds_on_all_hosts(setting: Setting) -> None:
    ppm = 20_000
    with live(setting.look(setting.alpha), ppm), live(setting.look(setting.beta)) as viewer:
        read_until(viewer, lambda frames: messages(frames, Status) and status(frames).lease_ppm == ppm, "a lease")


def test_a_host_out_of_sight_is_unseen_and_rejoins_without_a_gap(setting: Setting) -> None:
    def last_node_is(connected: bool) -> Callable[[Frames], bool]:
        def is_so(frames: Frames) -> bool:
            nodes = messages(frames, Node)
            return bool(nodes) and isinstance(nodes[-1], Node) and nodes[-1].connected is connected

        return is_so

    with live(setting.look(setting.alpha)) as viewer:
        frames = goes_on(viewer, "all is well")
        setting.beta.run("ip", "link", "set", "mon0", "down")
        frames += read_until(viewer, last_node_is(connected=False), "beta is out of sight")
        setting.beta.run("ip", "link", "set", "mon0", "up")
        frames += read_until(viewer, last_node_is(connected=True), "beta is back")
        frames += goes_on(viewer, "all send again")
    assert not messages(frames, Bye)
    found = steps_of(frames)
    assert set(found.values()) == {1}
    for rank in RANKS["beta"]:
        steps = sorted(step for of, step in found if of == rank)
        assert steps == list(range(steps[0], steps[-1] + 1))


@pytest.mark.parametrize("where", ["beta", "alpha"], ids=["agent", "root"])
def test_a_collector_that_is_killed_comes_back(setting: Setting, where: str) -> None:
    host = setting.beta if where == "beta" else setting.alpha
    with live(setting.look(setting.alpha)) as viewer:
        frames = goes_on(viewer, "all is well")
        before = setting.collector(host)
        addresses = listeners(before)
        before.kill()
        wait_for(lambda: setting.collector(host).pid != before.pid, "another one")
        frames += goes_on(viewer, "all send again")
    assert set(steps_of(frames).values()) == {1}
    assert listeners(setting.collector(host)) == addresses
    assert not [bye for bye in messages(frames, Bye) if isinstance(bye, Bye) and bye.rank is not None]


def test_the_run_ends_when_the_ranks_of_all_hosts_have(setting: Setting) -> None:
    with live(setting.look(setting.alpha)) as viewer:
        read_until(viewer, lambda frames: ranks_seen(frames) == {0, 1, 2, 3}, "all ranks")
        (setting.folder / "stop").touch()
        frames = read_until(viewer, lambda frames: any(bye.rank is None for bye in messages(frames, Bye)), "the end")  # type: ignore[union-attr]
    ends = {(bye.rank, bye.reason) for bye in messages(frames, Bye) if isinstance(bye, Bye)}
    assert ends == {(rank, "finished") for rank in (0, 1, 2, 3, None)}
    assert setting.job.wait() == 0, setting.job.output()
    assert setting.job.output().count("bit-identical True") == 4
    for host in (setting.alpha, setting.beta):
        wait_for(lambda host=host: not host.processes("ddpwatch.collector"), f"no collector on {host.name}")  # type: ignore[misc]
        assert {path.suffix for path in host.directory.iterdir()} <= {".mcap", ".log"}
