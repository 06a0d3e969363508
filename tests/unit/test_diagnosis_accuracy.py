"""What `benchmarks/diagnosis.py` measures at length, in small: clear faults are found, and nothing else is."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis_cases import Case, Kind, job_of
from benchmarks.diagnosis_score import play
from benchmarks.fleet_noise import NoiseKind

FAULTS: list[tuple[Kind, float, NoiseKind]] = [
    ("constant", 0.20, "uniform"),
    ("constant", 0.10, "gauss"),
    ("periodic", 0.50, "gauss"),
    ("random", 0.50, "heavy"),
    ("stall", 0.0, "heavy"),
    ("moving", 0.20, "gauss"),
    ("two", 0.50, "uniform"),
    ("slow_input", 0.20, "heavy"),
    ("slow_input_all", 0.20, "gauss"),
    ("exposed", 0.30, "slow"),
    ("slow_link", 0.30, "gauss"),
    ("gc", 0.50, "gauss"),
    ("checkpoint", 0.0, "heavy"),
    ("checkpoint_rank0", 0.0, "gauss"),
    ("validation", 0.0, "gauss"),
]


@pytest.mark.parametrize(("kind", "size", "noise"), FAULTS, ids=[f"{kind}-{noise}" for kind, _, noise in FAULTS])
def test_a_clear_fault_is_found_with_its_rank_and_cause(kind: Kind, size: float, noise: NoiseKind) -> None:
    result = play(job_of(Case(kind, size, 4, 0, noise)))
    for score in result.scores:
        assert score.detected, result.incidents
        assert score.rank, result.incidents
        assert score.cause is not False, result.incidents
        assert score.period is not False, result.incidents


@pytest.mark.parametrize("noise", ["quiet", "gauss", "uniform", "heavy"])
def test_nobody_is_blamed_while_nothing_is_wrong(noise: NoiseKind) -> None:
    assert play(job_of(Case("clean", 0.0, 2, 0, noise))).others == []
