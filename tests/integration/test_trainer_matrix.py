"""Every strategy and comm hook on real ranks, against one process that saw the same samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scripts.matrix_names import CAST_HOOKS, EXACT_HOOKS, EXACT_STRATEGIES, LOW_RANK_HOOKS
from tests.support.jobs import SCRIPTS, Job
from trainer.strategies import SHARDED

pytestmark = [pytest.mark.xdist_group("matrix"), pytest.mark.seconds(20)]  # one job for all
Outcomes = dict[str, dict[str, Any]]
EXACT = (*EXACT_STRATEGIES, *EXACT_HOOKS)
FP16_EPSILON, BF16_EPSILON = 2**-10, 2**-7


def run_matrix(ranks: int, directory: Path) -> Outcomes:
    out = directory / "outcomes.json"
    with Job(SCRIPTS / "trainer_matrix.py", str(out), ranks=ranks, log=directory / "log") as job:
        assert job.wait() == 0, job.output()
    outcomes: Outcomes = json.loads(out.read_text())
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_matrix(2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("model", ["digits", "text", "branches"])
@pytest.mark.parametrize("way", EXACT)
def test_exact_ways_equal_one_process(outcomes: Outcomes, way: str, model: str) -> None:
    assert outcomes[f"{model} {way}"]["same_on_all_ranks"]
    assert outcomes[f"{model} {way}"]["distance"] < 1e-5


@pytest.mark.parametrize("way", SHARDED)
def test_sharded_ways_equal_one_process(outcomes: Outcomes, way: str) -> None:
    assert outcomes[f"digits {way}"]["same_on_all_ranks"]
    assert outcomes[f"digits {way}"]["distance"] < 1e-5


@pytest.mark.xdist_group("four ranks")
def test_exact_ways_equal_one_process_on_four_ranks(tmp_path: Path) -> None:
    outcomes = run_matrix(4, tmp_path)
    assert set(outcomes) == {f"digits {way}" for way in (*EXACT, *SHARDED)}
    assert {way: o for way, o in outcomes.items() if not o["same_on_all_ranks"] or o["distance"] >= 1e-5} == {}


@pytest.mark.parametrize("hook", CAST_HOOKS)
def test_casts_stay_within_their_precision(outcomes: Outcomes, hook: str) -> None:
    assert outcomes[hook]["same_on_all_ranks"]
    assert 0 < outcomes[hook]["detour"] < 4 * (FP16_EPSILON if hook.startswith("fp16") else BF16_EPSILON)


@pytest.mark.parametrize("hook", LOW_RANK_HOOKS)
def test_low_rank_keeps_ranks_together(outcomes: Outcomes, hook: str) -> None:
    assert outcomes[hook]["same_on_all_ranks"]
    assert outcomes[hook]["detour"] > 0


def test_noop_lets_ranks_drift_apart(outcomes: Outcomes) -> None:
    assert not outcomes["noop"]["same_on_all_ranks"]


@pytest.mark.parametrize("strategy", EXACT_STRATEGIES)
@pytest.mark.parametrize("how", ["accumulate", "wrong"])
def test_accumulation_equals_the_large_batch(outcomes: Outcomes, how: str, strategy: str) -> None:
    assert outcomes[f"{how} {strategy}"]["same_on_all_ranks"]
    assert outcomes[f"{how} {strategy}"]["distance"] < 1e-5
