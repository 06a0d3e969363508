"""Checks what the network reaches while a job on two hosts runs, and what lies and floods of connections do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import psutil
import pytest

from tests.soak.seen import Viewer
from tests.support.hosts import skip, why_not
from tests.support.network import START_S, TOOLS, Job, network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HOSTS = 2
SECONDS, PER_S = 10, 1000
SETTLE_S = 5.0
LOOK_S = 0.2
MORE_MB = 10.0  # what a second flood may add to the root
KNOCK = """
import socket, sys, time
host, port, seconds, per_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
held, connected, start = [], 0, time.monotonic()
for number in range(seconds * per_s):
    time.sleep(max(0, start + number / per_s - time.monotonic()))
    knocking = socket.socket()
    knocking.settimeout(0.2)
    try:
        knocking.connect((host, port))
        connected += 1
        if number % 2:
            knocking.send(b"GET / HTTP/1.0\\r\\n\\r\\n" * 4)
            knocking.close()
        else:
            held.append(knocking)
    except OSError:
        knocking.close()
    if len(held) > 900:
        held.pop(0).close()
print(connected)
"""


@dataclass
class Watched:
    """A watched job on two hosts.

    Attributes:
        before: The addresses at which somebody listens over TCP, by host, before it was watched.
        after: The same since.
    """

    job: Job
    viewer: Viewer
    before: list[set[str]]
    after: list[set[str]]

    def until_steps(self) -> None:
        """Waits for a step of each rank that ends from now on."""
        self.job.until(partial(self.viewer.has_all_since, time.monotonic(), HOSTS), START_S, "steps after that")

    def refusals(self) -> Counter[str]:
        """What the root has refused so far."""
        return Counter() if self.viewer.status is None else Counter(self.viewer.status.refused)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    if why := why_not(*TOOLS):
        skip(why)
    with network(HOSTS) as hosts:
        arguments = (str(hosts.folder), str(hosts.folder / "run.mcap"))
        with hosts.job("tests/soak/hosts_job.py", *arguments) as job:
            job.until(lambda: all(listeners(job, host) for host in range(HOSTS)), START_S, "a job")
            job.pause(SETTLE_S)
            before = [listeners(job, host) for host in range(HOSTS)]
            (hosts.folder / "watch").touch()
            with Viewer(job.look().publish) as viewer:
                job.until(lambda: viewer.has_all_since(0.0, HOSTS), START_S, "steps of all ranks")
                yield Watched(job, viewer, before, [listeners(job, host) for host in range(HOSTS)])
                (hosts.folder / "stop").touch()
                job.wait(START_S)
                assert viewer.missing(hosts.folder, HOSTS) == []
                assert viewer.duplicates == 0


def listeners(job: Job, host: int) -> set[str]:
    """The addresses at which somebody listens on a host, over TCP."""
    return {line.split()[3] for line in job.network.hosts[host].run("ss", "-H", "-ltn").splitlines()}


def test_nobody_but_the_root_listens(watched: Watched) -> None:
    assert [len(now - before) for before, now in zip(watched.before, watched.after, strict=True)] == [1, 0]


def test_a_rank_that_lies_to_the_store_is_refused(watched: Watched) -> None:
    """It says that it is on a host of its own, and that its host has a key of its own."""
    said, before = watched.job.network.folder / "lied", watched.refusals()
    (watched.job.network.folder / "lie").touch()
    watched.job.until(said.exists, START_S, "its lies")
    watched.until_steps()
    assert said.read_text().split() == ["refused", "refused"]
    print(f"\nrefused: {dict(watched.refusals() - before)}")
    assert (watched.refusals() - before)["unknown key"] >= 2


def test_a_thousand_connections_a_second_cost_the_root_no_step_and_little_memory(watched: Watched) -> None:
    root = watched.job.collector(0)
    assert root is not None
    address = (watched.after[0] - watched.before[0]).pop()
    first_mb, (connects, second_mb) = flood(watched.job, address, root)[1], flood(watched.job, address, root)
    watched.until_steps()
    print(f"\n{connects} connects in {SECONDS} s; the root had {first_mb:.1f} MB at most, then {second_mb:.1f} MB")
    assert connects > SECONDS * PER_S // 2
    assert second_mb - first_mb < MORE_MB


def flood(job: Job, address: str, root: psutil.Process) -> tuple[int, float]:
    """How many connections were made, and how much memory the root had at most."""
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-c", KNOCK, host, port, str(SECONDS), str(PER_S)]
    peak_mb = 0.0
    with subprocess.Popen(job.network.hosts[1].entered(*command), stdout=subprocess.PIPE, text=True) as knocking:
        assert knocking.stdout is not None
        while knocking.poll() is None:
            job.pause(LOOK_S)
            peak_mb = max(peak_mb, root.memory_info().rss / 1e6)
        return int(knocking.stdout.read() or 0), peak_mb
