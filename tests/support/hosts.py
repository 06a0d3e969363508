"""Several hosts on one machine: each has namespaces for its network, mounts and host name, and two links to the others.

On ``eth0`` the job talks, on ``mon0`` ddpwatch, so that a test can cut the one and leave the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

REQUIRED = "HOST_TESTS"  # `.ci/run` sets it to ``required`` where namespaces work
INSIDE = """
mount -t tmpfs -o mode=700 tmpfs "$1"
mount -t tmpfs tmpfs /dev/shm
hostname "$2"
ip link set lo up
echo up $$
exec cat
"""
NAMESPACES = ("net", "mnt", "uts")
LINKS = {"eth0": "10.77.0", "mon0": "10.77.1"}
_LISTEN = "0A"  # a state in /proc/net/tcp


def why_not(*tools: str) -> str:
    """Why hosts cannot be simulated here, with these tools; empty where they can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", *tools) if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    namespaces = ["unshare", "--net", "--mount", "--uts", "sh", "-c"]
    probe = [
        *namespaces,
        "mount -t tmpfs tmpfs /mnt && ip link add name probe0 type veth && ip link add name probe1 type bridge",
    ]
    done = subprocess.run(probe, capture_output=True, check=False)
    return "needs the right to create namespaces and network links" if done.returncode else ""


def skip(why: str) -> NoReturn:
    """Skips a test that simulates hosts. Where `.ci/run` has found that it could, the test fails instead."""
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(f"{why}, though namespaces work here", pytrace=False)
    pytest.skip(why)


class Host:
    """One host, with a run directory of its own.

    Args:
        name: Its host name.
        run_directory: Where it has its run directory.
        ahead_s: By how much its monotonic clock is ahead of this machine's; None for the same clock.

    Attributes:
        pid: The process that keeps its namespaces.
        name: Its host name.
        directory: Its run directory, as seen from outside.
    """

    def __init__(self, name: str, run_directory: Path, ahead_s: int | None = None) -> None:
        self._kinds = ["--net", "--mount", "--uts"]
        clock: list[str] = []
        if ahead_s is not None:
            self._kinds.append("--time")
            clock = ["--fork", f"--monotonic={ahead_s}", f"--boottime={ahead_s}"]
        command = ["unshare", *self._kinds, *clock, "sh", "-ec", INSIDE, "host", str(run_directory), name]
        self.name = name
        pipe = subprocess.PIPE  # in a session of its own: Ctrl-C must not end the host before what runs there
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        assert self._process.stdout is not None
        up, pid = self._process.stdout.readline().split()
        assert up == b"up"
        self.pid = int(pid)
        self.directory = Path(f"/proc/{self.pid}/root{run_directory}")

    def entered(self, *command: str) -> list[str]:
        """The command that runs a command in there."""
        return ["nsenter", f"--target={self.pid}", *self._kinds, *command]

    def run(self, *command: str, **environment: str) -> str:
        """The output of a command that runs in there."""
        variables = {**os.environ, **environment}
        return subprocess.run(self.entered(*command), env=variables, check=True, capture_output=True, text=True).stdout

    def processes(self, word: str) -> list[psutil.Process]:
        """The processes in there that have the word in their command lines; none that has ended."""
        network, found = _network(self.pid), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if network and _network(process.pid) == network and any(word in part for part in process.cmdline()):
                    found.append(process)
        return found

    def close(self) -> None:
        """Ends it; its links go with it."""
        self._process.communicate()


def linked(names: Sequence[str], run_directory: Path) -> list[Host]:
    """Hosts with links between them, over bridges on the first: addresses of ``eth0`` and ``mon0`` end with 1, 2, …"""
    first, *others = hosts = [Host(name, run_directory) for name in names]
    for link, prefix in LINKS.items():
        first.run("ip", "link", "add", "name", link, "type", "bridge")
        for host in others:
            port = f"{link}-{host.name}"
            ends = ["name", port, "netns", str(first.pid), "type", "veth", "peer", "name", link, "netns", str(host.pid)]
            subprocess.run(["ip", "link", "add", *ends], check=True)
            first.run("ip", "link", "set", port, "master", link, "up")
        for number, host in enumerate(hosts, 1):
            host.run("ip", "address", "add", f"{prefix}.{number}/24", "dev", link)
            host.run("ip", "link", "set", link, "up")
    return hosts


def listeners(process: psutil.Process) -> list[str]:
    """The addresses at which a process listens, as the kernel writes them in hexadecimal digits."""
    sockets = set()
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a file that it has closed since
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                sockets.add(target[len("socket:[") : -1])
    tables = [Path(f"/proc/{process.pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    return [line[1] for line in lines if line[3] == _LISTEN and line[9] in sockets]


def _network(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""
