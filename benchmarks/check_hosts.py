"""Checks four hosts of one machine, of which one has a slow rank, one a slow link, or none: who is named, how often?

    python -m benchmarks.check_hosts --times 5 --seconds 15

Needs root: hosts are network namespaces with links of 100 Mbit/s. The slow rank is stopped three quarters of the time.
The slow link has 30 Mbit/s.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from ddpwatch.check.judge import CheckResult
from tests.support.network import Network, network

HOSTS = 4
SCRIPT = "ddpwatch/check/__main__.py"
RUN_S, STOP_S = 0.02, 0.06
SLOW_SHAPE = ("tbf", "rate", "30mbit", "burst", "256kbit", "latency", "50ms")
FAULTS = ("slow rank", "slow link", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    for _ in range(options.times):
        for fault in FAULTS:
            place, started = dice.randrange(HOSTS), time.monotonic()
            result = checked(fault, place, options.seconds)
            where = "" if fault == "none" else f" at host{place}"
            print(f"{fault}{where}: {'; '.join(result.slow) or 'nobody'}", end="")
            print(f" ({result.rounds} rounds, {time.monotonic() - started:.0f} s)", flush=True)


def checked(fault: str, place: int, seconds: float) -> CheckResult:
    """The result of one check."""
    with network(HOSTS) as net:
        file = net.folder / "result.json"
        with net.job(SCRIPT, "--seconds", str(seconds), "--result", str(file), "--disk", str(net.folder)) as job:
            if fault == "slow link":
                net.hosts[place].run("tc", "qdisc", "replace", "dev", "eth0", "root", *SLOW_SHAPE)
            with held_back(net, place) if fault == "slow rank" else contextlib.nullcontext():
                job.wait(600.0)
        return msgspec.json.decode(file.read_bytes(), type=CheckResult)


@contextlib.contextmanager
def held_back(net: Network, place: int) -> Iterator[None]:
    """Stops a host's rank now and then."""
    over = threading.Event()

    def hold() -> None:
        while not over.wait(RUN_S):
            for process in ranks(net, place):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGSTOP)
                    over.wait(STOP_S)
                    process.send_signal(signal.SIGCONT)

    known: list[psutil.Process] = []

    def ranks(net: Network, place: int) -> list[psutil.Process]:
        if not known:
            found = net.hosts[place].processes(Path(SCRIPT).name)
            known.extend(one for one in found if "torch.distributed.run" not in one.cmdline())
        return known

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
