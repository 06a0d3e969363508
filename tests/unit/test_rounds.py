"""Rounds that a signal ends early, and paired statistics."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.jobs import finished
from tests.support.paired import hodges_lehmann
from tests.support.rounds import SIGNALS, Rounds, rounds_done


@pytest.fixture(autouse=True)
def handlers_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


class Store(dict[str, bytes]):
    """The two calls of a job's store that `Rounds` makes."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


def test_all_rounds_take_place() -> None:
    with Rounds() as rounds:
        assert list(rounds.over(range(4), "work")) == [0, 1, 2, 3]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_loop_after_the_current_round(number: signal.Signals) -> None:
    done = []
    with Rounds() as rounds:
        for each in rounds.over(range(8), "work"):
            if each == 2:
                os.kill(os.getpid(), number)
            done.append(each)
        assert list(rounds.over(range(8), "more work")) == []
    assert done == [0, 1, 2]
    assert rounds_done(len(done), 8) == "stopped after 3 of 8 rounds"


def test_work_that_happens_on_the_way_is_not_started_after_a_signal() -> None:
    started = []

    def work() -> Iterator[int]:
        for each in range(8):
            started.append(each)
            if each == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield each

    with Rounds() as rounds:
        assert list(rounds.over(work(), "work", 8)) == [0, 1]
    assert started == [0, 1]


def test_a_second_signal_acts_as_usual_in_a_single_process() -> None:
    with Rounds() as rounds:
        os.kill(os.getpid(), signal.SIGINT)
        assert rounds.stop_requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_all_ranks_do_the_rounds_that_rank_0_starts() -> None:
    store = Store()
    with Rounds(0, store) as first, Rounds(1, store) as second:  # type: ignore[arg-type]
        second.stop_requested = True  # rank 1 has its signal first
        assert (first.go_on(), second.go_on()) == (True, True)
        first.stop_requested = True
        assert (first.go_on(), second.go_on()) == (False, False)


def test_only_rank_0_shows_progress(capfd: pytest.CaptureFixture[str]) -> None:
    store = Store()
    for rank in (0, 1):
        with Rounds(rank, store) as rounds:  # type: ignore[arg-type]
            list(rounds.over(range(2), f"of rank {rank}"))
    shown = capfd.readouterr().err
    assert "of rank 0: 100%" in shown
    assert "rank 1" not in shown


def test_the_interval_holds_the_ratio_in_spite_of_an_outlier() -> None:
    values = [1.04, 1.06, 1.05, 1.03, 1.07, 1.05, 1.05, 9.0]
    found = hodges_lehmann(values)
    assert 1.03 <= found.low <= found.value <= found.high < 9.0
    assert found.value == pytest.approx(1.05, abs=0.01)


def test_tests_that_send_signals_pass_where_these_are_ignored() -> None:
    """As nohup and ``&`` in a script leave it."""
    name = f"{__file__}::{test_a_second_signal_acts_as_usual_in_a_single_process.__name__}"
    command = ["sh", "-c", "trap '' HUP INT; exec \"$@\"", "sh", sys.executable, "-m", "pytest", "-q", name]
    done = finished(*command)
    assert done.returncode == 0, done.stdout
