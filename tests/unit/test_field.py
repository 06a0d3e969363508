"""The judge of the field's cases: what a made-up recording says, against truths that hold and that do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.field.case import HEALTHY, Case, Truth
from tests.support.field.judge import OUTPUT, RECORDING, Judgement, NotedStep, Notes, judge, true_cost_ns
from tests.support.frames import MS, bye, enveloped, run
from tests.support.runs import record

STEPS, LATE_MS = 60, 40
WAITED_MS = 30  # as the other rank computes for another 10 ms after its last launch
LATE = Truth(("straggler",), (1,), ("backward",), "lead", soon=20, beside=("exposed_comm",))


def _note(folder: Path, lead_ms: int) -> None:
    """Writes notes of two ranks, the second of which has its gradients later by so much."""
    for rank in range(2):
        steps = [(at, 0, rank * lead_ms * MS, 0, 0) for at in range(STEPS)]
        (folder / f"notes-{rank}.json").write_text(json.dumps({"steps": steps, "struck": []}))


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose rank 1 is late in each step."""
    folder = tmp_path_factory.mktemp("late")
    frames = enveloped([*run(STEPS, late_rank=1, late_ms=LATE_MS), bye()])
    record(folder / RECORDING, ((message, envelope.received_ns) for message, envelope in frames))
    _note(folder, WAITED_MS)
    return folder


def _judged(folder: Path, truth: Truth) -> Judgement:
    return judge(Case("a_case", "nobody", truth, lambda job: None), folder)


def _wrong(judgement: Judgement) -> set[str]:
    return {name for name, right in judgement.parts.items() if not right}


def test_what_is_true_is_right(late: Path) -> None:
    judgement = _judged(late, LATE)
    assert judgement.word == "right", judgement
    assert judgement.named_after is not None
    assert judgement.cost == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(
    ("truth", "wrong"),
    [
        (replace(LATE, phases=("data",)), {"phase", "soon"}),
        (replace(LATE, soon=1), {"soon"}),
        (replace(LATE, cause="starved"), {"cause"}),
        (replace(LATE, says="no_sync"), {"says"}),
        (replace(LATE, period=7), {"period"}),
        (replace(LATE, updates=7), {"updates"}),
    ],
)
def test_a_part_that_is_not_true_makes_it_partly_right(late: Path, truth: Truth, wrong: set[str]) -> None:
    judgement = _judged(late, truth)
    assert _wrong(judgement) == wrong
    assert judgement.word == "partly"


def test_a_cost_is_within_15_percent_of_the_notes(late: Path) -> None:
    _note(late, WAITED_MS * 5 // 4)
    assert _wrong(_judged(late, LATE)) == {"cost"}
    _note(late, WAITED_MS)


@pytest.mark.parametrize(("fault_ms", "after_ms", "cost_ms"), [(12, 0, 12), (50, 0, 30), (12, 12, 12), (12, 11, 12)])
def test_a_late_rank_costs_what_its_fault_delayed_others(fault_ms: int, after_ms: int, cost_ms: int) -> None:
    """Not what it would have been last by anyway; a fault after a reduction delays the next step."""
    late = [NotedStep(at, 0, 30 * MS * (at > 1), 0, after_ms * MS) for at in range(4)]
    struck = [(1, fault_ms * MS), (2, fault_ms * MS)]
    on_time = Notes([NotedStep(at, 0, 0, 0, 0) for at in range(4)], [], [], [])
    of_steps = 2 if after_ms >= fault_ms else 1  # without a lead, step 1 costs nothing
    assert true_cost_ns(LATE, [on_time, Notes(late, struck, [], [])]) == of_steps * cost_ms * MS
    assert true_cost_ns(LATE, [on_time, Notes(late, [], [], [])]) == 2 * 30 * MS


def test_another_rank_is_wrong_and_an_untrue_alarm(late: Path) -> None:
    judgement = _judged(late, replace(LATE, ranks=(0,)))
    assert judgement.word == "wrong"
    assert (1,) in [alarm.ranks for alarm in judgement.others]


def test_an_alarm_about_a_healthy_job_is_wrong(late: Path) -> None:
    judgement = _judged(late, HEALTHY)
    assert judgement.word == "wrong"
    assert _wrong(judgement) == {"no alarm", "verdict"}


def test_the_terminal_has_to_say_what_the_report_says(late: Path) -> None:
    verdict = _judged(late, LATE).verdict
    incidents = "  straggler  rank 1     59 steps  late\n  exposed    all ranks  59 steps  exposed\n"
    said = f"header\n   59  10.0  {verdict}\nincidents: 2; 20 % lost\n{incidents}"
    for output, agree in ((said, True), (said.replace("rank 1", "rank 0"), False), ("killed", False)):
        (late / OUTPUT).write_text(output)
        assert _judged(late, LATE).parts["live"] is agree
    (late / OUTPUT).unlink()
