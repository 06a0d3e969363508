"""How `benchmarks/whatif.py` judges: caps with equal buckets are one setting, and no prediction beats the noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.whatif import Setting, best_caps, measured_by_buckets, perfect, score
from ddpwatch.analysis.whatif.recorded import Recorded
from tests.support.whatif import MS, MadeUpJob

CAPS_MIB = (0.2, 0.25, 8.0)  # the first two make the same buckets, as gradients of 1 MiB fill each of them
JOB = MadeUpJob(steps=30)


@pytest.fixture(scope="module")
def runs() -> dict[Setting, Recorded]:
    settings = [Setting("gpt:width=8", 2, 1000.0, cap) for cap in CAPS_MIB]
    return {s: JOB.but(cap_mib=s.cap_mib, seed=number).recorded() for number, s in enumerate(settings)}


def test_caps_with_equal_buckets_are_one_measured_twice(runs: dict[Setting, Recorded]) -> None:
    first, second, other = runs.values()
    measured = measured_by_buckets([first, second, other])
    assert len(measured) == 2
    assert measured[tuple(first.sizes)][0] == pytest.approx((first.measured_ns + second.measured_ns) / 2)


def test_pairs_with_equal_buckets_have_a_row_of_their_own(runs: dict[Setting, Recorded]) -> None:
    found = list(score(runs, {}, ""))
    kinds = [one.kind for one in found]
    assert {kind: kinds.count(kind) for kind in kinds} == {"reproduced": 3, "the same buckets": 2, "another cap": 4}
    assert all(one.within("gpt") and one.within("1000") and not one.within("100") for one in found)
    assert all(one.width > 0 for one in found if one.kind == "another cap")


def test_the_best_cap_among_made_up_ones_is_found(runs: dict[Setting, Recorded]) -> None:
    assert str(best_caps(runs, {})) == "3 of 3 (100%; a perfect prediction: 100%)"
    alike = {replace(s, cap_mib=cap): run for (s, run), cap in zip(runs.items(), CAPS_MIB, strict=True) if cap < 1}
    assert best_caps(alike, {}).asked == 0


def test_no_prediction_is_better_than_the_noise() -> None:
    assert perfect([(100 * MS, MS), (120 * MS, MS)]) == 1
    assert perfect([(100 * MS, 0.0), (101 * MS, 0.0)]) == 1
    assert 0.5 < perfect([(100 * MS, 5 * MS), (104 * MS, 5 * MS)]) < 0.9
