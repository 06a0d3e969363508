"""A job whose nodes leave and join (``torchrun --nnodes=1:3``): each membership is a run that names the one before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddpwatch.run import rundir
from ddpwatch.wire.messages import Bye, Hello, Step
from tests.support.fork_server import TORCHRUN_IMPORTS
from tests.support.hosts import LINKS, Host, linked, listeners, skip, why_not
from tests.support.jobs import (
    DDPWATCH,
    PROBE_IMPORTS,
    SCRIPTS,
    Frames,
    Job,
    kill,
    live,
    messages,
    read_until,
    wait_for,
)

pytestmark = pytest.mark.seconds(40)
COMPARED = 30  # the script's steps until then
STORE = 2  # torchrun's rendezvous is on the second host: it stays when the first one leaves
# A node counts as gone after 10 s without a sign of life; a round waits for 3 s for further nodes.
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=5,last_call_timeout=3,join_timeout=200,read_timeout=200"


class Nodes:
    """The hosts, and torchrun on some of them."""

    def __init__(self, folder: Path, run_directory: Path) -> None:
        self.folder = folder
        self._directory = run_directory
        self.hosts = linked(["alpha", "beta", "gamma"], run_directory)
        self.torchruns: dict[str, Job] = {}
        self.runs: list[str] = []

    def join(self, number: int) -> None:
        """Starts torchrun on the first, second or third host, with one rank."""
        host = self.hosts[number - 1]
        options = ["--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
        options += [f"--rdzv-endpoint={LINKS['eth0']}.{STORE}:29400", f"--local-addr={LINKS['eth0']}.{number}"]
        options += [f"--rdzv-conf={RENDEZVOUS},is_host={int(number == STORE)}", "--no-python"]
        # Torch's agents share one store across rounds only among those that were there in the first.
        about = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "eth0", "DDPWATCH_IFNAME": "mon0"}
        about |= {"DDPWATCH_DIR": str(self._directory), "DDPWATCH_DETAIL": "full"}
        self.torchruns[host.name] = Job(
            SCRIPTS / "torchrun_on_host.py",
            *(str(host.pid), *options, str(SCRIPTS / "hosts.py"), "-", str(self.folder)),
            log=self.log(host),
            ranks=0,
            preload=(*TORCHRUN_IMPORTS, *PROBE_IMPORTS),
            **about,
        )

    def log(self, host: Host) -> Path:
        """What torchrun and the rank there have printed."""
        return self.folder / f"{host.name}.log"

    def run_on(self, host: Host, ranks: int) -> rundir.RunInfo:
        """The next run whose root is on that host, once it has so many ranks; nodes may meet one by one."""
        found: list[rundir.RunInfo] = []

        def there() -> bool:
            assert self.torchruns[host.name].process.poll() is None, self.log(host).read_text()
            new = [info for info in runs_on(host) if info.run_id not in self.runs and "." not in info.run_id]
            self.runs.extend(info.run_id for info in new)
            found.extend(info for info in new if info.world_size == ranks)
            return bool(found)

        wait_for(there, f"a run of {ranks} ranks on {host.name}")
        return found[0]

    def before(self, info: rundir.RunInfo) -> str:
        """The run seen before this one: mostly one that the test has waited for, but nodes may miss a round."""
        return self.runs[self.runs.index(info.run_id) - 1]

    def lists(self, host: Host, info: rundir.RunInfo) -> bool:
        """Whether `ddpwatch ls` there names the run before this one."""
        said = host.run(*DDPWATCH, "ls", DDPWATCH_DIR=str(self._directory))
        return any(info.run_id in line and self.before(info) in line for line in said.splitlines())

    def close(self) -> None:
        """Ends all."""
        for torchrun in self.torchruns.values():
            torchrun.kill_everything()
        for host in self.hosts:
            kill(host.processes("ddpwatch.collector"))
            host.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if why := why_not():
        skip(why)
    run_directory = Path(f"/tmp/dwe-{os.getpid()}")
    run_directory.mkdir(mode=0o700)
    with ExitStack() as stack:
        stack.callback(run_directory.rmdir)
        made = Nodes(tmp_path, run_directory)
        stack.callback(made.close)
        yield made


def runs_on(host: Host) -> list[rundir.RunInfo]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(host.directory))
        return rundir.live_runs()[::-1]


def seen(info: rundir.RunInfo, hosts: list[str]) -> Frames:
    """Frames until every rank has compared its parameters; the ranks are on these hosts in this order."""

    def enough(frames: Frames) -> bool:
        on = {step.rank for step in messages(frames, Step) if isinstance(step, Step) and step.step > COMPARED}
        return len(on) == len(hosts)

    with live(info) as viewer:
        frames = read_until(viewer, enough, f"steps of all ranks of {info.run_id}")
    assert where(frames) == dict(enumerate(hosts))
    return frames


def where(frames: Frames) -> dict[int, str]:
    return {hello.rank: hello.host for hello in messages(frames, Hello) if isinstance(hello, Hello)}


def previous(frames: Frames) -> str:
    """The run before, as rank 0 knows it."""
    (found,) = {hello.previous for hello in messages(frames, Hello) if isinstance(hello, Hello) and hello.rank == 0}
    return found


def test_each_membership_is_a_run_that_names_the_one_before(nodes: Nodes) -> None:
    alpha, beta, gamma = nodes.hosts
    nodes.join(1)
    nodes.join(2)
    first = nodes.run_on(alpha, 2)
    seen(first, ["alpha", "beta"])

    with live(first) as viewer:  # rank 0's node leaves, but for the root: it sees how all have ended
        nodes.torchruns["alpha"].kill_everything()
        frames = read_until(viewer, lambda frames: any(bye.rank is None for bye in messages(frames, Bye)), "the end")  # type: ignore[union-attr]
    ends = {bye.rank: bye.reason for bye in messages(frames, Bye) if isinstance(bye, Bye)}
    assert ends[0] in ("killed", "lost")  # its signal is known unless somebody reaps it at once
    assert ends[1] in ("exception", "killed", "lost")  # or torchrun notices first, and sends SIGTERM
    second = nodes.run_on(beta, 1)
    assert previous(seen(second, ["beta"])) == nodes.before(second)

    nodes.join(3)
    third = nodes.run_on(beta, 2)
    assert previous(seen(third, ["beta", "gamma"])) == nodes.before(third)
    wait_for(lambda: nodes.lists(beta, third), "ddpwatch ls names the run before")
    (root,) = beta.processes(third.run_id)
    assert [address[:9] for address in listeners(root)] == ["02014D0A:"]  # 10.77.1.2, mon0's
    assert listeners(*gamma.processes(third.run_id)) == []

    (nodes.folder / "stop").touch()
    for host in (beta, gamma):
        assert nodes.torchruns[host.name].wait() == 0, nodes.log(host).read_text()
    said = "".join(nodes.log(host).read_text() for host in nodes.hosts)
    assert said.count("bit-identical True") >= 5
    assert "bit-identical False" not in said
    for host in nodes.hosts:
        wait_for(lambda host=host: not host.processes("ddpwatch.collector"), f"no collector on {host.name}")  # type: ignore[misc]
    left = {path.suffix for host in (beta, gamma) for path in host.directory.iterdir()}
    assert left <= {".mcap", ".log", ".note"}
