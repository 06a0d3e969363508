"""Network namespaces with links of a given rate, one per rank, and jobs in them. Needs root, ``ip`` and ``tc``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

JOB_TIMEOUT_S = 600
# A token bucket: how long it lasts at the full rate, so that late timers cost no rate, and how much it holds. At most,
# as so much of a message that follows a pause is not slowed. At least, as a smaller one cuts what TCP hands over at
# once (up to 64 KiB) into packets of 1,500 bytes; to receive each alone takes half of a core at 200 Mbit/s, which
# slows compute. A network card puts them together.
BURST_MS, LEAST_BURST_BYTES, MOST_BURST_BYTES = 2.0, 80_000, 250_000
PORT = 29533


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2)"
    tried = subprocess.run(["ip", "netns", "add", _name(99)], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", _name(99)], capture_output=True, check=False)
    return f"network namespaces do not work here: {tried.stderr.strip()}" if tried.returncode else ""


def _name(rank: int) -> str:
    return f"ddpw{os.getpid()}-{rank}"


def _outside(rank: int) -> str:
    """The end of a rank's link that is on the bridge."""
    return f"v{os.getpid()}-{rank}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def shaped_network(ranks: int, mbit: float) -> Iterator[None]:
    """A namespace per rank, all on one bridge; each sends at ``mbit`` Mbit/s at most."""
    bridge = f"ddpw{os.getpid()}"
    with ExitStack() as stack:
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "link", "set", bridge, "up")
        for rank in range(ranks):
            _run("ip", "netns", "add", _name(rank))
            stack.callback(_run, "ip", "netns", "del", _name(rank))
            _connect(rank, bridge, mbit)
            # A namespace takes its links down some time after it is gone, and the next network has the same names.
            stack.callback(_run, "ip", "link", "del", _outside(rank))
        yield


def _connect(rank: int, bridge: str, mbit: float) -> None:
    name, outside = _name(rank), _outside(rank)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", outside, "master", bridge, "up")
    inside = ("ip", "-n", name)
    _run(*inside, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
    _run(*inside, "link", "set", "eth0", "up")
    _run(*inside, "link", "set", "lo", "up")
    burst = min(MOST_BURST_BYTES, max(LEAST_BURST_BYTES, int(mbit * 1e6 / 8 * BURST_MS / 1e3)))
    shape = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "200ms")
    _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)


@contextmanager
def job_started(
    command: Sequence[str], ranks: int, log: Path, environment: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """``python COMMAND`` once per namespace, as torchrun would start it; what still runs at the end is killed."""
    with log.open("wb") as output:
        job = [
            subprocess.Popen(
                ["ip", "netns", "exec", _name(rank), sys.executable, *command],
                env={**os.environ, "OMP_NUM_THREADS": "1", **_rank_environment(rank, ranks), **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            yield job
        finally:
            for rank in job:
                rank.kill()
                rank.wait()


def run_job(command: Sequence[str], ranks: int, log: Path, environment: Mapping[str, str]) -> None:
    """Runs ``python COMMAND`` once per namespace, and waits.

    Raises:
        RuntimeError: A rank failed; the text has the end of its output.
    """
    with job_started(command, ranks, log, environment) as job:
        codes = [rank.wait(JOB_TIMEOUT_S) for rank in job]
    if any(codes):
        raise failure(codes, log)


def failure(codes: Sequence[int | None], log: Path) -> RuntimeError:
    """What to raise when ranks have failed."""
    return RuntimeError(f"ranks ended with {codes}:\n{log.read_text(errors='replace')[-2000:]}")


def _rank_environment(rank: int, ranks: int) -> dict[str, str]:
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": PORT}
    return {
        **{name: str(value) for name, value in about.items()},
        "MASTER_ADDR": "10.77.0.1",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
