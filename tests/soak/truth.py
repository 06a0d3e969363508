"""Whether what is said across hosts is true: who is late and by how much, and how the clocks differ.

All hosts are one machine, so that the truth is known: stamps differ by the hosts' skews and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.run import steps_across_ranks
from ddpwatch.common.text import UNKNOWN, table
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import ClockExchange, Layout
from tests.support.network import SKEWS_S, START_S, Network, network
from tests.support.rounds import Rounds

HOSTS, LATE = len(SKEWS_S), 3  # one rank on each; the late one
LATE_MS, LAYER = 60, "blocks.0.mlp"
NAMES_A_RANK = ("straggler", "intermittent", "drift", "slow_input", "pause", "slow_host", "hang", "death")
MODEL = ("--model", "gpt:width=32,layers=2,heads=2", "--bucket-cap-mb", "0.05", "--batch-size", "4")
NS_PER_S, NS_PER_MS, NS_PER_US = 1e9, 1e6, 1e3
LAST = 100  # steps
Interval = tuple[int, int]


# -- a late rank ------------------------------------------------------------------------------------------------------


def straggler(rounds: Rounds, steps: int) -> Iterator[list[str]]:
    """A job in which rank 3 is late, and the same one in which nobody is; a table's row of each."""
    for injected in (True, False):
        with network(HOSTS) as hosts:
            yield _row(injected, _trained(hosts, rounds, steps, injected))


STRAGGLER_COLUMNS = (
    "injected", "named", "its host", "layer", "bucket", "late ms", "± ms", "truly ms", "inside", "true",
)  # fmt: skip


def _trained(hosts: Network, rounds: Rounds, steps: int, injected: bool) -> Path:
    """The recording of a job."""
    file = hosts.folder / "run.mcap"
    options = [*MODEL, "--steps", str(steps), "--record", str(file)]
    options += ["--inject", f"slow-backward:rank={LATE},ms={LATE_MS},layer={LAYER}"] if injected else []
    with hosts.job("demo/train.py", *options) as job:
        job.wait(START_S + 5 * steps, rounds)
    return file


def _row(injected: bool, file: Path) -> list[str]:
    report = report_of(file)
    named = [row for row in report["incidents"] if row["kind"] in NAMES_A_RANK and row["ranks"]]
    about = [_named(row, report) for row in named] or [["nobody", UNKNOWN, UNKNOWN, UNKNOWN]]
    cells = ["; ".join(cell) for cell in zip(*about, strict=True)]
    late = _lateness(file)
    what = f"rank {LATE}, {LATE_MS} ms, {LAYER}, bucket {_bucket(file)}" if injected else "nothing"
    return [
        what,
        *cells,
        *(f"{median(values) / NS_PER_MS:.2f}" for values in zip(*late, strict=True)),
        f"{sum(abs(stated - true) <= error for stated, error, true in late)} of {len(late)}",
        _last_named(file),
    ]


def _named(incident: dict[str, Any], report: dict[str, Any]) -> list[str]:
    hosts = {row["rank"]: row["host"] for row in report["ranks"]}
    ranks = incident["ranks"]
    cells = [f"{incident['kind']}: rank {', '.join(map(str, ranks))}", ", ".join(hosts[rank] for rank in ranks)]
    return [*cells, incident["param"] or UNKNOWN, str(incident["bucket"])]


def _bucket(file: Path) -> int:
    """The bucket of the layer at which rank 3 is late: the first that it launches late."""
    layout = [message for message, _ in Recording(file) if isinstance(message, Layout) and message.rank == LATE][-1]
    names = [f".{name}." for name in layout.params]
    buckets = [
        bucket.index for bucket in layout.buckets if any(f".{LAYER}." in names[param] for param in bucket.params)
    ]
    return min(buckets)


def _lateness(file: Path) -> list[tuple[int, int, int]]:
    """Per step rank 3's lateness as it is stated, how far that may be off, and the truth (ns)."""
    return [(step.skew.late[LATE], step.skew.error, _truly_late(step)) for step in _steps(file)]


def _truly_late(step: StepAcrossRanks) -> int:
    return max(launches[LATE] - min(launches) for launches in _launches(step))


def _last_named(file: Path) -> str:
    """Of how many buckets one rank was named as the last, and of how many it was."""
    right = [
        launches.index(max(launches)) == bucket.last_rank
        for step in _steps(file)
        for bucket, launches in zip(step.skew.buckets.values(), _launches(step), strict=True)
        if bucket.last_rank is not None
    ]
    return f"{sum(right)} of {len(right)}"


def _steps(file: Path) -> Iterator[StepAcrossRanks]:
    """The steps that all ranks recorded in full, on one time line."""
    steps = steps_across_ranks(message for message, _ in Recording(file))
    return (step for step in steps if step.full and step.comparable and len(step) == HOSTS and step.skew.late)


def _launches(step: StepAcrossRanks) -> Iterator[tuple[int, ...]]:
    """Per bucket the ranks' launches on this machine's clock (ns)."""
    ranks = [step.ranks[rank] for rank in range(HOSTS)]
    ahead = [skew_s * int(NS_PER_S) for skew_s in SKEWS_S]
    rows = [[one.start_ns - by + at for at in one.comm_launch] for one, by in zip(ranks, ahead, strict=True)]
    return zip(*rows, strict=True)


# -- the clocks -------------------------------------------------------------------------------------------------------

CLOCK_COLUMNS = ("host", "ahead s", "pings", "µs p50", "µs best", "inside", "steps", "µs p50", "µs at end", "inside")


def clocks(rounds: Rounds, seconds: float) -> list[str]:
    """The table of a job on a link that is mostly idle: per host how wide the intervals are, and whether they hold."""
    with network(HOSTS) as hosts:
        (hosts.folder / "watch").touch()
        file = hosts.folder / "run.mcap"
        with hosts.job("tests/soak/hosts_job.py", str(hosts.folder), str(file), DDPWATCH_STEPS="full") as job:
            job.look(rounds)
            for _ in rounds.over(range(round(seconds)), "seconds"):
                job.pause(1.0)
            (hosts.folder / "stop").touch()
            job.wait(START_S)
        return table(CLOCK_COLUMNS, list(_clock_rows(file)))


def _clock_rows(file: Path) -> Iterator[list[str]]:
    messages = [message for message, _ in Recording(file)]
    steps = list(steps_across_ranks(iter(messages)))
    exchanges = [message for message in messages if isinstance(message, ClockExchange)]
    for rank in range(1, HOSTS):
        shifts = [step.shifts[rank] for step in steps if rank in step.shifts and step.comparable]
        clock = {shift.clock for shift in shifts}
        pings = [ping for ping in exchanges if (ping.node_boot_id, ping.node_time_ns) in clock]
        truth = -SKEWS_S[rank] * int(NS_PER_S)
        of_pings = [(ping.replied_ns - ping.returned_ns, ping.received_ns - ping.sent_ns) for ping in pings]
        of_steps = [(shift.offset - shift.error, shift.offset + shift.error) for shift in shifts]
        yield [
            f"host{rank}",
            f"{SKEWS_S[rank]:+,}",
            *_held(of_pings, truth, min),
            *_held(of_steps, truth, lambda widths: median(widths[-LAST:])),
        ]


def _held(intervals: Sequence[Interval], truth: int, shown: Callable[[list[float]], float]) -> list[str]:
    """How many there are, their width in the median and another figure of it, and how many hold the truth."""
    if not intervals:
        return ["0", UNKNOWN, UNKNOWN, UNKNOWN]
    widths = [(high - low) / NS_PER_US for low, high in intervals]
    inside = sum(low <= truth <= high for low, high in intervals)
    return [f"{len(widths)}", f"{median(widths):.0f}", f"{shown(widths):.0f}", f"{inside}"]
