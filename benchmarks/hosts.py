"""What ddpwatch does on several hosts, which are namespaces of this machine: jobs that torchrun starts on each of them.

    python benchmarks/hosts.py [--part straggler|clock|cost|faults|security] [--times 20] …

Needs root. Every host has a network of its own (a link of 100 Mbit/s: ``tc tbf``), mounts, a host name, and a monotonic
clock that differs by exactly 0, +5,000, −300 and 0 s from this machine's, so that the truth is known. Without
``--part``, all parts run, for about 70 minutes, 50 of them for the faults.

straggler: 4 hosts, rank 3 is late, or nobody is. Columns:
    named, its host, layer, bucket    what the report says
    late ms, ± ms, truly ms           how late rank 3 is said to be, how far that may be off, the truth (medians)
    inside                            in how many steps the truth is within that
    true                              how often one rank was named as a bucket's last, and was it
clock: 4 hosts on links that are mostly idle. Of every ping and of every step:
    µs p50, best, at end              how wide the interval of the clock's offset is; at the end: in the last 100 steps
    inside                            how many intervals hold the truth
cost: 2 hosts; blocks of steps, watched and not, in turns (`overhead.py` explains the columns)
faults: 2 hosts; ddpwatch has a link of its own, so that the training goes on. Columns:
    ≤ 5 s, p50 s, worst s             from the end of the cause until a viewer has a newer step of every rank
    twice                             steps that came twice
    lost, uncounted                   steps that a viewer never got (of a full disk: frames that are not recorded), and
                                      by how many ddpwatch's own count differs
    step                              the mean step while it lasts, to that before (`paired.hodges_lehmann`)
security: 2 hosts; who listens, what a rank that writes lies to the store achieves, and what a thousand connections a
    second to the root do
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable

from tests.soak.security import security

from ddpwatch.common.text import table
from tests.soak import faults, truth
from tests.support.hosts import why_not
from tests.support.network import START_S, TOOLS, Interrupted, network
from tests.support.rounds import Rounds, rounds_done

COST_HOSTS = 2
ROUND_S = 60.0  # more than a round takes


def run_straggler(options: argparse.Namespace, rounds: Rounds) -> None:
    """Prints a table of two jobs."""
    rows = []
    with contextlib.suppress(Interrupted):
        for row in rounds.over(truth.straggler(rounds, options.steps), "straggler", 2):
            rows.append(row)
    show(table(truth.STRAGGLER_COLUMNS, rows))
    print(f"{rounds_done(len(rows), 2, 'job')} of {options.steps} steps")


def run_clock(options: argparse.Namespace, rounds: Rounds) -> None:
    """Prints a table of the hosts."""
    with contextlib.suppress(Interrupted):
        show(truth.clocks(rounds, options.seconds))


def run_cost(options: argparse.Namespace, rounds: Rounds) -> None:
    """Prints the job's own table."""
    with network(COST_HOSTS) as hosts:
        result = hosts.folder / "result"
        arguments = (str(result), str(options.rounds), str(options.block))
        with hosts.job("benchmarks/hosts_cost.py", *arguments, shown=True) as job:
            try:
                job.wait(START_S + options.rounds * ROUND_S, rounds)
            except Interrupted:
                job.interrupt()
                with contextlib.suppress(RuntimeError):  # torchrun fails after a signal
                    job.until(result.exists, ROUND_S, "a result")
        show([result.read_text() if result.exists() else "no round was complete"])


def run_faults(options: argparse.Namespace, rounds: Rounds) -> None:
    """Prints a table of the faults."""
    names = options.fault or list(faults.FAULTS)
    outcomes, planned = [], options.times * len(names)
    with contextlib.closing(faults.strike_all(options.times, names, rounds, options.seed)) as struck:
        for outcome in rounds.over(struck, "faults", planned):
            outcomes.append(outcome)
    show(table(faults.COLUMNS, list(faults.rows(outcomes, names))))
    print(rounds_done(len(outcomes), planned, "fault"))


def run_security(options: argparse.Namespace, rounds: Rounds) -> None:
    """Prints three tables."""
    with contextlib.suppress(Interrupted):
        for lines in rounds.over(security(rounds), "security", 3):
            show(lines)


PARTS: dict[str, Callable[[argparse.Namespace, Rounds], None]] = {
    "straggler": run_straggler,
    "clock": run_clock,
    "cost": run_cost,
    "security": run_security,
    "faults": run_faults,
}


def show(lines: list[str]) -> None:
    print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="repeatable (default: all)")
    parser.add_argument("--times", type=int, default=20, help="of each fault (default: %(default)s)")
    parser.add_argument("--fault", choices=faults.FAULTS, action="append", help="repeatable (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults' moments (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of the straggler's jobs (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="of the clocks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=64, help="of the cost (default: %(default)s)")
    parser.add_argument("--block", type=int, default=32, help="steps in a block of the cost (default: %(default)s)")
    options = parser.parse_args()
    if why := why_not(*TOOLS):
        sys.exit(f"benchmarks/hosts.py {why}")
    with Rounds() as rounds:
        for part in options.part or PARTS:
            if not rounds.stop_requested:
                print(f"\n{part}", flush=True)
                PARTS[part](options, rounds)


if __name__ == "__main__":
    main()
