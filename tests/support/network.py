"""Several hosts on this machine: namespaces with clocks of their own, links of a given rate, and jobs on all of them.

The hosts are those of the tests (`tests.support.hosts`). They end with this process, and their links with them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import psutil

from ddpwatch.run import rundir
from tests.support.fork_server import ROOT
from tests.support.hosts import LINKS, Host
from tests.support.jobs import kill

SKEWS_S = (0, 5000, -300, 0)  # by host
SHAPE = ("tbf", "rate", "100mbit", "burst", "256kbit", "latency", "50ms")
TOOLS = ("tc", "ss", "bridge")  # beside those of the tests
PORT = "29533"
START_S = 180.0
END_S = 60.0
LOOK_S = 0.05
SHOWN = 3000  # characters of the output


class NeverError(RuntimeError):
    """What a job was expected to come to has not happened in time."""


class Network:
    """Hosts on one switch, which all send at 100 Mbit/s at most.

    Attributes:
        hosts: In the order of their ranks.
        folder: For what jobs write: all hosts see it.
    """

    def __init__(self, hosts: Sequence[Host], switch: Host, folder: Path, run_directory: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self._switch, self._run_directory = switch, run_directory
        for link in LINKS:
            self._connect(link)

    @contextlib.contextmanager
    def job(self, script: str, *arguments: str, **environment: str) -> Iterator[Job]:
        """Runs torchrun on every host, with one rank each; kills what is left at the end.

        Args:
            script: Within the repository.
            arguments: Its own.
            environment: In addition to this process's.
        """
        environment = {"DDPWATCH_DIR": str(self._run_directory), **environment}
        job = Job(self, [str(ROOT / script), *arguments], environment)
        try:
            yield job
        finally:
            for host in self.hosts:
                kill(host.processes("python"))

    def cut(self, link: str, host: int, how: str) -> None:
        """Takes a host off the switch: its own end is ``down``, or the switch is ``silent`` and forwards nothing."""
        if how == "down":
            self.hosts[host].run("ip", "link", "set", link, "down")
        else:
            self._port(link, host, "0")

    def mend(self, link: str, host: int, how: str) -> None:
        """Undoes `cut`."""
        if how == "down":
            self.hosts[host].run("ip", "link", "set", link, "up")
        else:
            self._port(link, host, "3")

    def _port(self, link: str, host: int, state: str) -> None:
        self._switch.run("bridge", "link", "set", "dev", f"{link}-{host}", "state", state)

    def _connect(self, link: str) -> None:
        switch = f"{link}-switch"
        self._switch.run("ip", "link", "add", switch, "type", "bridge")
        self._switch.run("ip", "link", "set", switch, "up")
        for number, host in enumerate(self.hosts):
            port = f"{link}-{number}"
            ends = ["name", link, "netns", str(host.pid), "type", "veth", "peer", "name", port]
            subprocess.run(["ip", "link", "add", *ends, "netns", str(self._switch.pid)], check=True)
            self._switch.run("ip", "link", "set", port, "master", switch, "up")
            host.run("ip", "address", "add", f"{LINKS[link]}.{number + 1}/24", "dev", link)
            host.run("ip", "link", "set", link, "up")
            host.run("tc", "qdisc", "add", "dev", link, "root", *SHAPE)


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Hosts for one job. Whatever still runs there at the end is killed."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dw-hosts-", ignore_cleanup_errors=True)))
        run_directory = Path(tempfile.mkdtemp(prefix="dw-", dir="/tmp"))  # a short path: it holds sockets
        stack.callback(run_directory.rmdir)
        hosts: list[Host] = []
        stack.callback(_close, hosts)
        for name, ahead_s in zip([*(f"host{n}" for n in range(count)), "switch"], (*SKEWS_S[:count], 0), strict=True):
            hosts.append(Host(name, run_directory, ahead_s))
        yield Network(hosts[:-1], hosts[-1], folder, run_directory)


def _close(hosts: Sequence[Host]) -> None:
    for host in hosts:
        kill(host.processes(""))
        host.close()


class Job:
    """torchrun on every host of a network."""

    def __init__(self, network: Network, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.network = network
        self._log = network.folder / "log"
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(network.hosts)}"]
        torchrun += ["--nproc-per-node=1", f"--master-addr={LINKS['eth0']}.1", f"--master-port={PORT}"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"}
        variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR", **environment}  # it warns about addresses without a name
        with self._log.open("ab") as log:
            self._processes = [
                subprocess.Popen(
                    host.entered(*torchrun, f"--node-rank={number}", *command),
                    cwd=ROOT,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for number, host in enumerate(network.hosts)
            ]

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of the job and of its collectors. Raises as `until`."""
        self.until(lambda: all(process.poll() is not None for process in self._processes), timeout_s, "its end")
        self.until(lambda: not any(map(self.collector, range(len(self.network.hosts)))), END_S, "its collectors' end")

    def pause(self, seconds: float) -> None:
        """Lets it train. Raises as `until`."""
        end_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end_s, 2 * seconds + 1, "a step")

    def until(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Waits until something holds.

        Raises:
            NeverError: That takes too long.
            RuntimeError: The job failed.
        """
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if any(process.poll() for process in self._processes):
                raise RuntimeError(f"the job failed:\n{self.output()[-SHOWN:]}")
            if time.monotonic() > deadline_s:
                raise NeverError(f"the job never came to {what}:\n{self.output()[-SHOWN:]}")
            time.sleep(LOOK_S)

    def output(self) -> str:
        """What its processes have printed."""
        return self._log.read_text(errors="replace")

    def look(self) -> rundir.RunInfo:
        """The run as it can be seen on rank 0's host, once there is one. Raises as `until`."""
        found: list[rundir.RunInfo] = []

        def there() -> bool:
            with patch.dict(os.environ, DDPWATCH_DIR=str(self.network.hosts[0].directory)):
                found[:] = rundir.live_runs()
            return bool(found)

        self.until(there, START_S, "a run")
        return found[0]

    def collector(self, host: int) -> psutil.Process | None:
        """The one that runs on a host."""
        return next(iter(self.network.hosts[host].processes("ddpwatch.collector")), None)
