"""What if, against numbers worked out by hand: a schedule of five gradients, and the formulas of ring and tree.

Gradients of 1 MiB come 10, 20, 30, 40 and 50 ms after the start of a backward of 60 ms. A collective takes 2 ms, and 8
more per MiB. With a cap of 2 MiB, buckets of 2, 2 and 1 MiB are ready after 20, 40 and 50 ms, and done after 38, 58 and
68: the last one is exposed for 8 ms.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ddpwatch.whatif.answer import Prediction, WhatIf
from ddpwatch.whatif.assignment import MIB
from ddpwatch.whatif.cost import Curve, Guess, Knot
from ddpwatch.whatif.model import fit
from ddpwatch.whatif.scenarios import Change, plan
from ddpwatch.whatif.schedule import Speeds
from tests.support.whatif import MS, MadeUpJob, line

BY_HAND = MadeUpJob(
    sizes_mib=(1.0,) * 5, cap_mib=2.0, cost=line(2.0, 8.0), copy_ns_per_byte=0.0, jitter=0.0, wire_jitter=0.0
)
LATE_BY_HAND = BY_HAND.but(late_ms=(0.0, 12.0))


FIGURE = re.compile(r"\d+\.\d")


def figures(text: str) -> list[float]:
    return [float(figure) for figure in FIGURE.findall(text)]


def ask(job: MadeUpJob, change: Change) -> Prediction:
    (found,) = WhatIf(job.recorded()).ask([change])
    return found


@pytest.mark.parametrize(
    ("job", "change", "gain_ms", "why"),
    [
        pytest.param(
            # Done after 20, 30, 40, 50 and 60 ms: with the backward.
            BY_HAND, Change(cap_mib=1.0), 8.0,
            "exposed communication 8.0 → 0.0 ms: ranks waited 8.0 ms for bucket 2 (the last of 3, 1.0 MiB); "
            "then the last of 5 has 1.0 MiB",
            id="smaller cap",
        ),
        pytest.param(
            # 4 MiB from 40 to 74 ms, then 1 MiB up to 84.
            BY_HAND, Change(cap_mib=4.0), -16.0,
            "exposed communication 8.0 → 24.0 ms: ranks then wait 14.0 ms for bucket 0 (of 2, 4.0 MiB)",
            id="larger cap",
        ),
        pytest.param(
            # Done after 30, 50 and 56 ms.
            BY_HAND, Change(link=2), 8.0,
            "exposed communication 8.0 → 0.0 ms: ranks waited 8.0 ms for bucket 2 (the last of 3, 1.0 MiB), then 0.0",
            id="faster link",
        ),
        pytest.param(
            # Three times 2 + 32 and 2 + 16 ms: done after 54, 88 and 106.
            BY_HAND, Change(link=0.5), -38.0,
            "exposed communication 8.0 → 46.0 ms: ranks then wait 28.0 ms for bucket 1 (of 3, 2.0 MiB)",
            id="slower link",
        ),
        pytest.param(
            BY_HAND, Change(perfect=True), 8.0,
            "exposed communication 8.0 → 0.0 ms: ranks waited 8.0 ms for bucket 2 (the last of 3, 1.0 MiB), then 0.0",
            id="communication for free",
        ),
        pytest.param(
            # Rank 1 takes 72 ms, so that buckets are ready after 24, 48 and 60 ms, and done after 42, 66 and 76. Bucket
            # 1 is exposed on rank 0 for 6 ms, bucket 2 for 10 and 4: 3 and 7 for the mean rank.
            LATE_BY_HAND, Change(without_lateness_of=1), 8.0,
            "the others no longer wait for rank 1; ranks' own work takes 6.0 ms less; "
            "exposed communication 10.0 → 8.0 ms: "
            "ranks waited 3.0 ms for bucket 1 (of 3, 2.0 MiB), then 0.0",
            id="straggler removed",
        ),
        pytest.param(
            # The first bucket is ready after 10 ms and done after 20, then 2 MiB each from 30 and 50 ms: up to 68.
            BY_HAND, Change(first_mib=1.0, cap_mib=2.0), 0.0,
            "exposed communication 8.0 → 8.0 ms: hardly a difference",
            id="first cap",
        ),
        pytest.param(
            # Its copy takes 1 ms per MiB, the last bucket's after the wait: 4 MiB are copied while that one moves.
            BY_HAND.but(copy_ns_per_byte=1e6 / MIB), Change(bucket_view=True), 1.0,
            "gradients are not copied back after the wait",
            id="bucket view",
        ),
        pytest.param(
            # Two batches take 2 · 104 + 8 ms less one optimizer (8): a step has 5 + 30 + 60 + 8 + 8 + 1.
            BY_HAND, Change(accumulate=2), 8.0, "buckets travel once in 2 batches", id="accumulation",
        ),
    ],
)  # fmt: skip
def test_the_bucket_that_stops_being_exposed(job: MadeUpJob, change: Change, gain_ms: float, why: str) -> None:
    found = ask(job, change)
    assert FIGURE.sub("#", found.why) == FIGURE.sub("#", why)
    assert figures(found.why) == pytest.approx(figures(why), abs=0.6)  # latency is fitted from two sizes
    assert found.gain_ms == pytest.approx(gain_ms, abs=0.6)


# -- ring and tree: 0.1 ms per hop, 100 MiB/s -----------------------------------------------------------------

HOP_MS, MIB_PER_S = 0.1, 100.0


def works(backend: str, ranks: int, world: int, hops: int) -> list[float]:
    """What buckets of 2 and 8 MiB take in another world, where a ring of ``ranks`` was recorded (ms)."""
    job = MadeUpJob(ranks=ranks, sizes_mib=(2.0, 8.0), cap_mib=1.0, backend=backend)
    recorded = job.recorded()
    knots = [Knot(n * MIB, MS * ring(n, ranks, hops), 0.0) for n in (1e-6, 2.0, 8.0)]  # as a sweep knows small ones
    physics = replace(fit(recorded), curve=Curve(tuple(knots)), link=Guess(0.7, 0.0))
    return [work / MS for work in plan(recorded, physics, Change(world=world)).works]


def ring(mib: float, ranks: int, hops: int) -> float:
    """2 (n − 1) / n · S / B + hops · α."""
    return 2 * (ranks - 1) / ranks * mib / MIB_PER_S * 1e3 + hops * HOP_MS


@pytest.mark.parametrize(
    ("backend", "hops", "world", "small_ms", "large_ms"),
    [
        # Recorded: 4 ranks on a ring, 6 hops: 0.6 + 1.5 · 20 = 30.6 ms for 2 MiB, and 0.6 + 1.5 · 80 = 120.6 for 8.
        pytest.param("gloo", 6, 2, 20.2, 80.2, id="ring of 2: 2 hops, each byte once"),
        pytest.param("gloo", 6, 16, 40.5, 153.0, id="ring of 16: 30 hops, each byte 1.875 times"),
        pytest.param("gloo", 6, 1024, 244.561, 364.444, id="ring of 1,024: 2,046 hops, each byte 1.998 times"),
        # Recorded: 4 ranks on a tree, twice log2(4) = 4 hops.
        pytest.param("nccl", 4, 16, 38.3, 150.8, id="tree of 16: 8 hops"),
        pytest.param("nccl", 4, 1024, 41.961, 161.844, id="tree of 1,024: 20 hops"),
    ],
)
def test_other_world_sizes_follow_the_formula(
    backend: str, hops: int, world: int, small_ms: float, large_ms: float
) -> None:
    large, small = works(backend, 4, world, hops)
    assert (small, large) == pytest.approx((small_ms, large_ms), rel=0.01)


@pytest.mark.parametrize("world", [2, 8, 32])
def test_a_made_up_job_of_another_world(world: int) -> None:
    """Its collectives follow the formula, and its further ranks are like the first four."""

    def job(ranks: int) -> MadeUpJob:
        cost = line(2 * (ranks - 1) * HOP_MS, 2 * (ranks - 1) / ranks * 5.0)
        return MadeUpJob(ranks=ranks, backend="gloo", speeds=Speeds(2, 0.5, 0.0, 0.0), cost=cost, jitter=0.0)

    found, truth = ask(job(4), Change(world=world)), job(world).step_ms
    assert found.step_ms == pytest.approx(truth, rel=0.1)  # a hop's latency is hardly seen in buckets of this size
    assert found.low < truth < found.high
