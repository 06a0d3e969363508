"""Transfers that became slower: of several groups, where clocks may be off, and where a group is gone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import Shift
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.rules.slow_link import GONE, SlowLink
from tests.support.frames import MS, step

PAIRS = {8: (0, 1), 9: (2, 3)}


def after(steps: Iterable[Mapping[int, int]], errors: Iterable[int] = ()) -> list[Incident]:
    """What is found in steps in which the second bucket of each group's ranks takes so long (ms).

    Args:
        steps: Per step, by group. A group that is not there sends nothing.
        errors: Per step, how far the clocks of two hosts may be off (ns); without them, all ranks have one clock.
    """
    link, known = SlowLink(DeviceCauses()), list(errors)
    for number, took in enumerate(steps):
        across = StepAcrossRanks(number, comparable=not known, members=PAIRS.get)
        for group, ms in took.items():
            done = [60 * MS, (70 + ms) * MS]
            for rank in PAIRS[group]:
                across.add_step(step(rank, number, comm_group=[group, group], comm_done=done))
        if known:
            hosts = {rank: Shift((f"host{rank % 2}", ""), ("host0", ""), 0, known[number]) for rank in across.members}
            across.align(hosts)
        link.add_step(across)
    return link.incidents()


def test_a_link_that_is_mostly_as_fast_as_before_is_no_warning() -> None:
    found = after({8: 36 if 40 <= n < 45 or n % 5 == 0 < n - 40 else 20 + n // 40, 9: 20} for n in range(120))
    assert [(one.open, one.severity) for one in found] == [(True, "info")]
    found = after({8: 36 if n >= 40 else 20, 9: 20} for n in range(120))
    assert [(one.open, one.severity) for one in found] == [(True, "warning")]


def test_five_slow_transfers_are_chance_where_two_of_five_were_as_slow_before() -> None:
    dice = random.Random(1)
    noisy = [dice.choice((20, 20, 20, 50, 60)) for _ in range(400)]
    assert after({8: ms, 9: 20} for ms in noisy) == []
    (found,) = after({8: ms if n < 200 else 3 * ms + 40, 9: 20} for n, ms in enumerate(noisy))
    assert (found.ranks, found.open, found.since_step) == ((0, 1), True, 200)


def test_a_second_pair_joins_and_both_have_to_recover() -> None:
    found = after({8: 60 if 40 <= n < 60 else 20, 9: 60 if 50 <= n < 90 else 20} for n in range(80))
    assert [(one.ranks, one.open, one.since_step) for one in found] == [((), True, 40)]  # all ranks by now
    found = after({8: 60 if 40 <= n < 60 else 20, 9: 60 if 50 <= n < 90 else 20} for n in range(110))
    assert [one.open for one in found] == [False]


def test_a_pair_that_is_gone_is_slow_no_longer() -> None:
    slow = [{8: 20, 9: 60 if n >= 40 else 20} for n in range(60)]
    (found,) = after(slow)
    assert (found.ranks, found.open) == ((2, 3), True)
    (found,) = after([*slow, *[{8: 20}] * (GONE + 1)])
    assert (found.ranks, found.open) == ((2, 3), False)


def test_clocks_that_get_worse_are_no_slow_link() -> None:
    """Each transfer is within their error from then on, or not much longer than that."""
    steady = [{8: 20}] * 120
    assert after(steady, [100_000] * 60 + [30 * MS] * 60) == []
    assert after([{8: 20}] * 60 + [{8: 60}] * 60, [100_000] * 120)
