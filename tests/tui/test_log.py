"""The log's findings: what comes and goes, and what only wavers."""

from __future__ import annotations

from ddpwatch.analysis.diagnosis.verdict import Verdict
from ddpwatch.tui.models.log import CLEARED_NS, RunLog
from tests.support.frames import step

EXPOSED = Verdict("exposed_comm", "warn", "exposed communication 11 %", bucket=2)
HIDDEN = Verdict("hidden", "ok", "communication is hidden: exposed only 9 %")
LATE = Verdict("straggler", "bad", "rank 1 is late", rank=1)


def texts(log: RunLog) -> list[str]:
    return [line.text for line in log.lines]


def test_a_figure_that_wavers_around_its_threshold_is_one_finding() -> None:
    log = RunLog()
    for at in range(20):
        log.log_verdict(HIDDEN if at % 2 else EXPOSED, at * CLEARED_NS // 3, at)
    assert texts(log) == [EXPOSED.text]


def test_what_stays_away_is_cleared_once_with_the_step_at_which_it_went() -> None:
    log = RunLog()
    log.log_verdict(EXPOSED, 0, 10)
    for at in range(1, 10):
        log.log_verdict(HIDDEN, at * CLEARED_NS // 3, 10 + at)
    assert texts(log) == [EXPOSED.text, f"cleared: {EXPOSED.text}"]
    assert log.lines[-1].step == 11


def test_another_finding_takes_its_place_at_once() -> None:
    log = RunLog()
    for at, verdict in enumerate([EXPOSED, HIDDEN, LATE]):
        log.log_verdict(verdict, at, at)
    assert texts(log) == [EXPOSED.text, f"cleared: {EXPOSED.text}", LATE.text]


def test_a_finding_that_comes_back_later_is_logged_again() -> None:
    log = RunLog()
    for at, verdict in [(0, EXPOSED), (1, HIDDEN), (1 + CLEARED_NS, HIDDEN), (2 + CLEARED_NS, EXPOSED)]:
        log.log_verdict(verdict, at, 0)
    assert texts(log) == [EXPOSED.text, f"cleared: {EXPOSED.text}", EXPOSED.text]


def test_an_unusual_step_is_logged_once_and_others_are_not() -> None:
    log = RunLog()
    for number, status in enumerate(["warmup", "ok", "shadow", "unwatched", "aborted"]):
        for rank in (0, 1):
            log.take(step(rank, number, status=status), number)
    assert texts(log) == ["step 0 is warm-up (rank 0)", "step 4 is aborted (rank 0)"]
