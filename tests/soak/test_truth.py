"""Checks whether what is said across hosts is true: who is late and by how much, and how the clocks differ.

All hosts are one machine, so that the truth is known: stamps differ by the hosts' skews and by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.run import steps_across_ranks
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import ClockExchange, Layout
from tests.support.hosts import skip, why_not
from tests.support.network import SKEWS_S, START_S, TOOLS, Network, network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HOSTS, LATE = len(SKEWS_S), 3  # one rank on each; the late one
LATE_MS, LAYER = 60, "blocks.0.mlp"
QUIET_NS = 10_000_000  # so late are ranks that share cores, without being named
NAMES_A_RANK = ("straggler", "intermittent", "drift", "slow_input", "pause", "slow_host", "hang", "death")
MODEL = ("--model", "gpt:width=32,layers=2,heads=2", "--bucket-cap-mb", "0.05", "--batch-size", "4")
STEPS, CLOCKS_S = 200, 120
NS_PER_S, NS_PER_MS, NS_PER_US = 1e9, 1e6, 1e3
LAST = 100  # steps


@pytest.fixture(autouse=True)
def hosts_can_be_made_up() -> None:
    if why := why_not(*TOOLS):
        skip(why)


# -- a late rank ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("injected", [True, False], ids=["rank 3 is late", "nobody is late"])
def test_who_is_late_across_hosts_and_by_how_much_is_true(injected: bool) -> None:
    with network(HOSTS) as hosts:
        file = _trained(hosts, injected)
        report, late, right = report_of(file), _lateness(file), _last_named(file)
        steps = list(_steps(file))
        bucket = _bucket(file)
    named = [row for row in report.incidents if row.kind in NAMES_A_RANK and row.ranks]
    medians = ", ".join(f"{median(values) / NS_PER_MS:.2f}" for values in zip(*late, strict=True))
    print(f"\nstated, ± and true ms: {medians}; {len(late)} full steps, {len(right)} buckets with a last rank")
    assert late
    assert all(abs(stated - true) <= error for stated, error, true in late)
    assert all(right)
    if not injected:  # four ranks share this machine's cores: one may be late
        ranks = {rank for row in named for rank in row.ranks}
        assert all(median(_truly_late(step, rank) for step in steps) > QUIET_NS for rank in ranks)
        return
    assert {tuple(row.ranks) for row in named} == {(LATE,)}
    assert {row.host for row in report.ranks if row.rank == LATE} == {f"host{LATE}"}
    assert any(LAYER in (row.param or "") and row.bucket == bucket for row in named)


def _trained(hosts: Network, injected: bool) -> Path:
    """The recording of a job."""
    file = hosts.folder / "run.mcap"
    options = [*MODEL, "--steps", str(STEPS), "--record", str(file)]
    options += ["--inject", f"slow-backward:rank={LATE},ms={LATE_MS},layer={LAYER}"] if injected else []
    with hosts.job("demo/train.py", *options) as job:
        job.wait(START_S + 5 * STEPS)
    return file


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


def _truly_late(step: StepAcrossRanks, rank: int = LATE) -> int:
    return max(launches[rank] - min(launches) for launches in _launches(step))


def _last_named(file: Path) -> list[bool]:
    """Of each bucket of which one rank was named as the last: whether it was."""
    return [
        launches.index(max(launches)) == bucket.last_rank
        for step in _steps(file)
        for bucket, launches in zip(step.skew.buckets.values(), _launches(step), strict=True)
        if bucket.last_rank is not None
    ]


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


def test_the_clocks_of_hosts_are_within_what_is_stated() -> None:
    """On a link that is mostly idle: of every ping and of every step."""
    with network(HOSTS) as hosts:
        (hosts.folder / "watch").touch()
        file = hosts.folder / "run.mcap"
        with hosts.job("tests/soak/hosts_job.py", str(hosts.folder), str(file), DDPWATCH_DETAIL="full") as job:
            job.look()
            job.pause(CLOCKS_S)
            (hosts.folder / "stop").touch()
            job.wait(START_S)
        messages = [message for message, _ in Recording(file)]
    steps = list(steps_across_ranks(iter(messages)))
    exchanges = [message for message in messages if isinstance(message, ClockExchange)]
    for rank in range(1, HOSTS):
        shifts = [step.shifts[rank] for step in steps if rank in step.shifts and step.comparable]
        clock = {shift.clock for shift in shifts}
        pings = [ping for ping in exchanges if (ping.node_boot_id, ping.node_time_ns) in clock]
        truth = -SKEWS_S[rank] * int(NS_PER_S)
        assert shifts
        assert pings
        assert all(ping.replied_ns - ping.returned_ns <= truth <= ping.received_ns - ping.sent_ns for ping in pings)
        assert all(shift.offset - shift.error <= truth <= shift.offset + shift.error for shift in shifts)
        wide_us = median(2 * shift.error for shift in shifts[-LAST:]) / NS_PER_US
        print(f"\nhost{rank}: {len(pings)} pings, {len(shifts)} steps, in the end {wide_us:.0f} µs wide")
