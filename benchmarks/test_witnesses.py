"""Checks what others than the engine say of a real job's warnings: DDP's own logger, and the kernel."""

from __future__ import annotations

from typing import Any

from benchmarks.diagnosis_job import Injector
from benchmarks.diagnosis_real import is_exposed, is_starved
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.kinds import Kind

MS = 1_000_000


def noted(exposed_ms: int = 0, starved_ms: int = 0) -> dict[str, Any]:
    """What a rank notes of 20 steps of 100 ms."""
    return {"steps": [[number, 100 * MS, starved_ms * MS, exposed_ms * MS] for number in range(20)]}


def warned(kind: Kind, *ranks: int, cost_ms: int = 0) -> Incident:
    return Incident(kind, "warning", "", ranks, since_step=5, until_step=14, cost_ns=cost_ms * MS)


def test_what_the_rank_that_waits_least_waits_is_exposed() -> None:
    assert is_exposed([noted(exposed_ms=40), noted(exposed_ms=12)], warned("exposed_comm"))
    assert not is_exposed([noted(exposed_ms=40), noted(exposed_ms=2)], warned("exposed_comm"))
    assert not is_exposed([noted(exposed_ms=40), noted(exposed_ms=12)], warned("straggler", 1))


def test_a_rank_that_waits_longer_for_a_core_than_others_is_late() -> None:
    """By 20 ms in each of 10 steps, for which two others wait."""
    ranks = [noted(starved_ms=5), noted(starved_ms=25), noted(starved_ms=5)]
    assert is_starved(ranks, warned("straggler", 1, cost_ms=2 * 10 * 20))
    assert is_starved(ranks, warned("intermittent", 1, cost_ms=2 * 10 * 39))
    assert not is_starved(ranks, warned("straggler", 1, cost_ms=2 * 10 * 41))
    assert not is_starved(ranks, warned("straggler", 0, cost_ms=2 * 10 * 20))
    assert not is_starved(ranks, warned("exposed_comm"))


def test_a_wait_for_a_core_is_a_part_of_its_step() -> None:
    class Logged:
        def _get_ddp_logging_data(self) -> dict[str, int]:
            return {}

    injector = Injector([], 0)
    injector._ddp = Logged()  # type: ignore[assignment]
    for step in range(4):
        injector.begin(step)
    assert [number for number, *_ in injector.steps] == [0, 1]
    assert all(0 <= starved <= took for _, took, starved, _ in injector.steps)
