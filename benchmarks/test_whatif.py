"""Checks how `benchmarks/whatif.py` judges: pairs, caps with equal buckets are one, no prediction beats the noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.whatif import best_caps, changes, measured_by_buckets, perfect, quantile, row, score
from benchmarks.whatif_jobs import OPTIONS_CAP_MIB, OPTIONS_FIRST_MIB, Setting, option_settings, pair_settings
from ddpwatch.whatif.recorded import Recorded
from ddpwatch.whatif.scenarios import Change
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


def test_each_setting_of_the_options_is_predicted_from_the_job_without() -> None:
    settings = {setting.name.removeprefix("paced-"): setting for setting in option_settings(1, quick=True)}
    assert len(settings) == 10
    assert {name: changes(settings["2-200-3-0"], target) for name, target in settings.items()} == {
        "2-200-3-0": None,
        "2-200-3-first0.5-0": ("another first cap", Change(cap_mib=OPTIONS_CAP_MIB, first_mib=OPTIONS_FIRST_MIB)),
        "2-200-3-bucket_view-0": ("bucket_view", Change(bucket_view=True)),
        "2-200-3-bf16-0": ("bf16", Change(hook="bf16")),
        "2-200-3-of2-0": ("accumulation over 2", Change(accumulate=2)),
        "2-200-3-of4-0": ("accumulation over 4", Change(accumulate=4)),
        "2-200-3-find_unused-0": None,
        "2-200-3-find_unused-static_graph-0": None,
        "3-200-3-0": ("2 → 3 ranks", Change(world=3)),
        "4-200-3-0": ("2 → 4 ranks", Change(world=4)),
    }
    unused, static = (settings[f"2-200-3-find_unused{suffix}-0"] for suffix in ("", "-static_graph"))
    assert changes(unused, static) == ("static_graph", Change(static_graph=True))
    assert changes(static, unused) is None
    assert changes(settings["2-200-3-of2-0"], settings["2-200-3-of4-0"]) is None


def test_pairs_differ_in_one_thing() -> None:
    settings = list(pair_settings(1, quick=False))
    kinds = {found[0] for one in settings for other in settings if (found := changes(one, other))}
    assert kinds == {"another cap", "another link", "fp16", "powersgd", "straggler removed", "2 → 3 ranks",
                     "3 → 2 ranks"}  # fmt: skip


def test_each_round_has_all_settings_of_a_network_in_another_order() -> None:
    settings = list(pair_settings(3, quick=True))
    third = len(settings) // 3
    rounds = [[replace(one, round=0).name for one in settings[i * third : (i + 1) * third]] for i in range(3)]
    assert len({tuple(each) for each in rounds}) == 3
    assert len({tuple(sorted(each)) for each in rounds}) == 1
    assert [one.round for one in settings] == [0] * third + [1] * third + [2] * third
    links = [one.mbit for one in pair_settings(2, quick=False) if one.ranks == 2]
    assert links == sorted(links)


def test_a_drift_that_slows_each_setting_in_one_round_is_no_error(runs: dict[Setting, Recorded]) -> None:
    (first, fast), (_, _), (last, other) = runs.items()
    slow = JOB.but(cap_mib=last.cap_mib, seed=7, data_ms=JOB.data_ms + 50).recorded()
    slower = JOB.but(cap_mib=first.cap_mib, seed=8, data_ms=JOB.data_ms + 50).recorded()
    drifted = {first: fast, replace(first, round=1): slower, last: other, replace(last, round=1): slow}
    found = [one for one in score(drifted, {}, "") if one.kind in ("another cap", "the same setting again")]
    errors = {kind: [abs(one.error) for one in found if one.kind == kind] for kind in ("another cap",
              "the same setting again")}  # fmt: skip
    assert [len(each) for each in errors.values()] == [2, 4]
    assert max(errors["another cap"]) < 0.05 < min(errors["the same setting again"])


def test_accumulation_is_judged_per_batch() -> None:
    plain = Setting("gpt:width=8", 2, 1000.0, 2.0)
    recorded = JOB.recorded()
    runs = {plain: recorded, replace(plain, accumulate=2): replace(recorded, measured_ns=2 * recorded.measured_ns)}
    found = [one for one in score(runs, {}, "") if one.kind == "accumulation over 2"]
    assert [one.measured_ms for one in found] == pytest.approx([recorded.measured_ns / MS])


def test_a_row_has_its_goal_and_the_95th_percentile(runs: dict[Setting, Recorded]) -> None:
    reproduced = [one for one in score(runs, {}, "") if one.kind == "reproduced"]
    many = [replace(reproduced[0], error=number / 1000) for number in range(100)]
    assert row("reproduced", many) == ["reproduced", "1 %, p95 2 %", "100", "5.0%", "9.0%", "9.5%", "", ""]
    assert row("fp16, with wire.json", many)[1] == "4 %, p90 8 %"
    assert quantile([3.0, 1.0, 2.0], 0.95) == 3.0
