"""The log's lines on incidents: what starts, what ends, what only wavers; and what else it logs."""

from __future__ import annotations

from dataclasses import replace

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.incident_news import ABSENT_NS
from ddpwatch.tui.models.log import RunLog
from ddpwatch.wire.messages import Mark, Node
from tests.support.frames import step

EXPOSED = Incident("exposed_comm", "warning", "exposed communication 11 %", since_step=8, until_step=9, open=True)
LATE = Incident("straggler", "warning", "rank 1 is late", (1,), "backward", since_step=10, until_step=20, open=True)
OVER = replace(LATE, open=False, until_step=40, cost_ns=41 * 10**9, share=0.008)
PAUSE = Incident("pause", "warning", "rank 2 paused for 12 s", (2,), since_step=30, cost_ns=10**9, share=0.5)
HANG = Incident("hang", "error", "rank 2 stuck for 9 s", (2,), "forward", since_step=30, until_step=30, open=True)
CHECKPOINT = Incident("pause", "info", "every rank paused", (), "checkpoint", since_step=12, cost_ns=10**9, share=0.1)


def texts(log: RunLog) -> list[str]:
    return [line.text for line in log.lines]


def test_a_figure_that_wavers_around_its_threshold_is_one_incident() -> None:
    log = RunLog()
    for at in range(20):
        log.log_incidents([] if at % 2 else [EXPOSED], at * ABSENT_NS // 3, "GPU-seconds")
    assert texts(log) == [EXPOSED.message]


def test_what_stays_away_has_ended_once() -> None:
    log = RunLog()
    log.log_incidents([EXPOSED], 0, "GPU-seconds")
    for at in range(1, 10):
        log.log_incidents([], at * ABSENT_NS // 3, "GPU-seconds")
    assert texts(log) == [EXPOSED.message, f"ended: {EXPOSED.message}; cost 0.00 GPU-seconds, – of all ranks' time"]
    assert log.lines[-1].step == 9


def test_an_incident_starts_and_ends_with_its_cost() -> None:
    log = RunLog()
    for at, incidents in enumerate([[LATE], [replace(LATE, until_step=30)], [OVER], [OVER]]):
        log.log_incidents(incidents, at, "GPU-seconds")
    assert texts(log) == ["rank 1 is late", "ended: rank 1 is late; cost 41.0 GPU-seconds, 0.8 % of all ranks' time"]
    assert [(line.kind, line.severity, line.step) for line in log.lines] == [
        ("incident", "bad", 10),
        ("incident", "good", 40),
    ]


def test_its_kind_and_start_may_become_clearer() -> None:
    log = RunLog()
    log.log_incidents([LATE], 0, "GPU-seconds")
    log.log_incidents([replace(LATE, kind="intermittent")], 1, "GPU-seconds")
    log.log_incidents([replace(LATE, since_step=9)], 2, "GPU-seconds")
    assert texts(log) == ["rank 1 is late"]


def test_two_at_once_are_two() -> None:
    log = RunLog()
    log.log_incidents([LATE, EXPOSED], 0, "GPU-seconds")
    log.log_incidents([OVER, EXPOSED], 1, "GPU-seconds")
    assert [text[:12] for text in texts(log)] == ["rank 1 is la", "exposed comm", "ended: rank "]


def test_one_that_comes_back_later_is_another() -> None:
    log = RunLog()
    for at, incidents in enumerate([[LATE], [OVER], [replace(LATE, since_step=60, until_step=70), OVER]]):
        log.log_incidents(incidents, at, "GPU-seconds")
    assert [text[:12] for text in texts(log)] == ["rank 1 is la", "ended: rank ", "rank 1 is la"]


def test_a_hang_that_ends_as_a_pause_is_one_incident() -> None:
    log = RunLog()
    log.log_incidents([HANG], 0, "GPU-seconds")
    log.log_incidents([PAUSE], 1, "GPU-seconds")
    assert texts(log) == [
        HANG.message,
        "ended: rank 2 paused for 12 s; cost 1.00 GPU-seconds, 50.0 % of all ranks' time",
    ]


def test_what_is_over_when_it_is_found_has_one_line() -> None:
    log = RunLog()
    for at in range(3):
        log.log_incidents([PAUSE, CHECKPOINT], at, "GPU-seconds")
    assert texts(log) == [
        "rank 2 paused for 12 s; cost 1.00 GPU-seconds, 50.0 % of all ranks' time",
        "every rank paused; cost 1.00 GPU-seconds, 10.0 % of all ranks' time",
    ]
    assert [line.severity for line in log.lines] == ["warn", "dim"]


def test_an_unusual_step_is_logged_once_and_others_are_not() -> None:
    log = RunLog()
    for number, status in enumerate(["warmup", "ok", "shadow", "unwatched", "aborted"]):
        for rank in (0, 1):
            log.take_message(step(rank, number, status=status), number)
    for kind in ("data", "gc"):  # waits for data may come in each step
        log.take_message(Mark(rank=1, kind=kind, name=kind, start_ns=0, end_ns=25_700_000), 9)
    assert texts(log) == [
        "step 0 is warm-up (rank 0)",
        "step 4 is aborted (rank 0)",
        "rank 1: garbage collection, 25.7 ms",
    ]


def test_a_host_that_goes_and_comes_back_has_a_line_for_each() -> None:
    log = RunLog()
    for at, connected in enumerate([True, True, False, False, True]):
        log.take_message(Node(node=1, host="b", ranks=[2, 3], at_ns=at, seen_ns=at, connected=connected), at)
    assert texts(log) == ["host b is not connected: ranks 2, 3 unseen", "host b is connected again: ranks 2, 3"]


def test_a_host_whose_agent_never_came_has_no_name() -> None:
    log = RunLog()
    log.take_message(Node(node=1, host="", ranks=[2], at_ns=1, seen_ns=0, connected=False), 1)
    assert texts(log) == ["another host is not connected: rank 2 unseen"]
