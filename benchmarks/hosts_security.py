"""What can be reached from the network while a job on two hosts runs, and what a thousand connections a second do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from benchmarks.hosts_network import START_S, Job, network
from benchmarks.hosts_viewer import Viewer
from benchmarks.rounds import Rounds
from ddpwatch.report.format import table

HOSTS = 2
SECONDS, PER_S = 10, 1000
SETTLE_S = 5.0
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
print(connected, time.monotonic() - start)
"""


def security(rounds: Rounds) -> Iterator[list[str]]:
    """The tables: who listens, and what the connections did."""
    with network(HOSTS) as hosts:
        arguments = (str(hosts.folder), str(hosts.folder / "run.mcap"))
        with hosts.job("benchmarks/hosts_job.py", *arguments) as job:
            job.until(lambda: all(_listeners(job, host) for host in range(HOSTS)), START_S, "a job", rounds)
            job.pause(SETTLE_S, rounds)
            unwatched = [_listeners(job, host) for host in range(HOSTS)]
            (hosts.folder / "watch").touch()
            with Viewer(job.look().publish) as viewer:
                job.until(lambda: viewer.has_all_since(0.0, HOSTS), START_S, "steps of all ranks", rounds)
                watched = [_listeners(job, host) for host in range(HOSTS)]
                yield _who_listens(job, unwatched, watched)
                yield _knocked(job, viewer, rounds, (watched[0] - unwatched[0]).pop())


def _listeners(job: Job, host: int) -> set[str]:
    """The addresses at which somebody listens on a host, over TCP."""
    lines = job.network.hosts[host].run("ss", "-H", "-ltn").splitlines()
    return {line.split()[3] for line in lines}


def _who_listens(job: Job, unwatched: list[set[str]], watched: list[set[str]]) -> list[str]:
    rows = [
        [f"host{host}", str(len(before)), str(len(now)), ", ".join(sorted(now - before)) or "–"]
        for host, (before, now) in enumerate(zip(unwatched, watched, strict=True))
    ]
    return table(["host", "listeners, unwatched", "watched", "ddpwatch's"], rows)


def _knocked(job: Job, viewer: Viewer, rounds: Rounds, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    found = job.collector(0)
    assert found is not None
    command = [sys.executable, "-c", KNOCK, host, port, str(SECONDS), str(PER_S)]
    memory = [_mb(found)]
    with subprocess.Popen(job.network.hosts[1].entered(*command), stdout=subprocess.PIPE, text=True) as knocking:
        while knocking.poll() is None:
            job.pause(0.2)
            memory.append(_mb(found))
        connected, took_s = (knocking.stdout.read() if knocking.stdout else "0 0").split()
    done_s = time.monotonic()
    job.until(lambda: viewer.has_all_since(done_s, HOSTS), START_S, "steps after that")
    memory.append(_mb(found))
    (job.network.folder / "stop").touch()
    job.wait(START_S)
    missing = len(viewer.missing(job.network.folder, HOSTS))
    refused = viewer.status.refused if viewer.status is not None else {}
    cells = [connected, f"{float(took_s):.1f}", str(sum(refused.values())), str(len(viewer.seen)), str(missing)]
    cells += [str(viewer.duplicates), *(f"{mb:.1f}" for mb in (memory[0], max(memory), memory[-1]))]
    return table(["connects", "in s", "refused", "steps", "lost", "twice", "MB before", "at most", "after"], [cells])


def _mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 1e6
