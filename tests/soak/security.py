"""What can be reached from the network while a job on two hosts runs, and what lies and floods of connections do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import psutil

from ddpwatch.common.text import table
from tests.soak.hosts_viewer import Viewer
from tests.soak.liar import LIES
from tests.support.network import START_S, Job, network
from tests.support.rounds import Rounds

HOSTS = 2
SECONDS, PER_S = 10, 1000
SETTLE_S = 5.0
LOOK_S = 0.2
FLOODS = ("first flood", "second flood")
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


def security(rounds: Rounds) -> Iterator[list[str]]:
    """The tables: who listens, and what the connections did."""
    with network(HOSTS) as hosts:
        arguments = (str(hosts.folder), str(hosts.folder / "run.mcap"))
        with hosts.job("tests/soak/hosts_job.py", *arguments) as job:
            job.until(lambda: all(_listeners(job, host) for host in range(HOSTS)), START_S, "a job", rounds)
            job.pause(SETTLE_S, rounds)
            unwatched = [_listeners(job, host) for host in range(HOSTS)]
            (hosts.folder / "watch").touch()
            with Viewer(job.look(rounds).publish) as viewer:
                job.until(lambda: viewer.has_all_since(0.0, HOSTS), START_S, "steps of all ranks", rounds)
                watched = [_listeners(job, host) for host in range(HOSTS)]
                yield _who_listens(job, unwatched, watched)
                yield _lied(job, viewer, rounds)
                yield _knocked(job, viewer, rounds, (watched[0] - unwatched[0]).pop())


def _lied(job: Job, viewer: Viewer, rounds: Rounds) -> list[str]:
    """What came of a rank that writes false questions to the store, and what the root refused meanwhile."""
    said, before = job.network.folder / "lied", _refusals(viewer)
    (job.network.folder / "lie").touch()
    job.until(said.exists, START_S, "its lies", rounds)
    job.until(partial(viewer.has_all_since, time.monotonic(), HOSTS), START_S, "steps after that")
    refused = ", ".join(f"{count} × {reason}" for reason, count in sorted((_refusals(viewer) - before).items()))
    rows = [[lie, came, refused] for lie, came in zip(LIES, said.read_text().split(), strict=True)]
    return table(["a rank says that", "with that key", "refused, of both"], rows)


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
    found = job.collector(0)
    assert found is not None
    rows = []
    for what in ("", *FLOODS):
        refused, start_s, before_mb = _refused(viewer), time.monotonic(), _mb(found)
        connects, peak_mb = _flood(job, address, found) if what else _quiet(job, rounds, found)
        took_s = time.monotonic() - start_s
        job.until(partial(viewer.has_all_since, time.monotonic(), HOSTS), START_S, "steps after that")
        mb = (f"{value:.1f}" for value in (before_mb, peak_mb, _mb(found)))
        rows.append([what or "nothing", str(connects), f"{took_s:.1f}", str(_refused(viewer) - refused), *mb])
    (job.network.folder / "stop").touch()
    job.wait(START_S)
    missing = len(viewer.missing(job.network.folder, HOSTS))
    steps = f"{len(viewer.seen)} steps, {missing} lost, {viewer.duplicates} came twice"
    return [*table(["", "connects", "in s", "refused", "MB before", "at most", "after"], rows), steps]


def _flood(job: Job, address: str, root: psutil.Process) -> tuple[int, float]:
    """How many connections were made, and how much memory the root had at most."""
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-c", KNOCK, host, port, str(SECONDS), str(PER_S)]
    peak_mb = 0.0
    with subprocess.Popen(job.network.hosts[1].entered(*command), stdout=subprocess.PIPE, text=True) as knocking:
        assert knocking.stdout is not None
        while knocking.poll() is None:
            job.pause(LOOK_S)
            peak_mb = max(peak_mb, _mb(root))
        return int(knocking.stdout.read() or 0), peak_mb


def _quiet(job: Job, rounds: Rounds, root: psutil.Process) -> tuple[int, float]:
    """As `_flood`, for as long without connections."""
    job.pause(SECONDS, rounds)
    return 0, _mb(root)


def _refused(viewer: Viewer) -> int:
    return _refusals(viewer).total()


def _refusals(viewer: Viewer) -> Counter[str]:
    return Counter() if viewer.status is None else Counter(viewer.status.refused)


def _mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 1e6
