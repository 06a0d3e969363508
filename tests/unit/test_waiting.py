"""Waiting for the last rank's launch and the transfer after it, on steps whose split is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.across_ranks import NO_SKEW, StepAcrossRanks
from ddpwatch.analysis.waiting import Flight, flights, split_exposed
from ddpwatch.common.intervals import total, union
from ddpwatch.wire.messages import Step
from tests.support.frames import MS, step, synchronous
from tests.support.synthetic import Fleet


def across(ranks: list[Step], comparable: bool = True) -> StepAcrossRanks:
    found = StepAcrossRanks(0, comparable)
    for one in ranks:
        found.add_step(one)
    return found


def flights_of(view: StepAcrossRanks, rank: int) -> list[Flight | None]:
    return flights(view.ranks[rank], view.facts_of(rank), view.skew)


def in_ms(flight: Flight | None) -> tuple[float, float, float, int | None] | None:
    return flight and (flight.start / MS, flight.transfer / MS, flight.done / MS, flight.last_rank)


def test_a_rank_waits_until_the_last_one_launches() -> None:
    """Rank 2 launches bucket 1 12 ms late, at 82: the others wait from 70 to 82, then 20 ms travel."""
    view = across(next(synchronous([[0, 5, 12]])))
    assert in_ms(flights_of(view, 0)[1]) == (70, 82, 102, 2)
    assert in_ms(flights_of(view, 1)[1]) == (75, 82, 102, 2)
    assert in_ms(flights_of(view, 2)[1]) == (82, 82, 102, 2)
    assert in_ms(flights_of(view, 0)[0]) == (50, 50, 60, 0)


def test_the_wait_is_that_of_the_skew() -> None:
    view = across(next(synchronous([[3, 0, 12, 7]])))
    for rank in view.members:
        waits = [flight.wait_ns for flight in flights_of(view, rank) if flight is not None]
        assert max(waits) == view.skew.wait[rank] == view.wait_ns(rank)


def test_ranks_start_at_different_times() -> None:
    """Rank 1's step starts 4 ms later: so do its launches, which are the last."""
    late = step(1, start_ns=step(0).start_ns + 4 * MS)
    view = across([step(0), late])
    assert in_ms(flights_of(view, 0)[0]) == (50, 54, 60, 1)
    assert in_ms(flights_of(view, 1)[0]) == (50, 50, 60, 1)


def test_ranks_that_cannot_be_compared_do_not_wait() -> None:
    view = across(next(synchronous([[0, 12]])), comparable=False)
    assert [in_ms(flight) for flight in flights_of(view, 0)] == [(50, 50, 60, None), (70, 70, 102, None)]
    alone = across([step(0)])
    assert [flight and flight.last_rank for flight in flights_of(alone, 0)] == [None, None]


def test_a_completion_that_was_not_measured() -> None:
    view = across([step(0, comm_done=[60 * MS, None]), step(1, late_ms=9)])
    assert [in_ms(flight) for flight in flights_of(view, 0)] == [(50, 50, 60, 0), None]


def test_a_collective_that_starts_late_waits_from_its_start_on() -> None:
    """On a GPU: launched at 70, its stream free at 76, the last rank launched at 82."""
    first, second = next(synchronous([[0, 12]]))
    first.comm_start = [50 * MS, 76 * MS]
    second.comm_start = [50 * MS, 82 * MS]
    view = across([first, second])
    assert in_ms(flights_of(view, 0)[1]) == (76, 82, 102, 1)
    first.comm_start = [50 * MS, 90 * MS]
    assert in_ms(flights_of(across([first, second]), 0)[1]) == (90, 90, 102, 1)


def test_a_clock_error_leaves_the_parts_within_the_collective() -> None:
    early = step(0, comm_done=[60 * MS, 75 * MS])
    view = across([early, step(1, late_ms=12)])
    assert in_ms(flights_of(view, 0)[1]) == (70, 75, 75, 1)
    backwards = step(0, comm_done=[60 * MS, 65 * MS])
    assert in_ms(flights_of(across([backwards, step(1, late_ms=12)]), 0)[1]) == (70, 70, 65, 1)


def test_exposed_communication_divides_into_waiting_and_transfer() -> None:
    """Rank 0 computes until 80; rank 1 launches at 82 and all is done at 102: of 22 ms exposed, 2 are a wait."""
    view = across(next(synchronous([[0, 12]])))
    exposed = view.figures[0].exposed
    assert exposed == [(80 * MS, 102 * MS)]
    assert split_exposed(exposed, flights_of(view, 0)) == [(80 * MS, 82 * MS, 1), (82 * MS, 102 * MS, None)]


def test_a_wait_counts_although_an_earlier_collective_transfers() -> None:
    """25 buckets, each 2 ms after the other and 2 ms long; rank 5 is 12 ms late from a third of them on.

    The transfers that the wait delayed fill the end of the step, but no rank could have left it 12 ms earlier.
    """
    fleet = Fleet(16, late={5: 12.0})
    view = across([fleet.step(rank, 1) for rank in range(16)])
    for rank in sorted(view.members - {5}):
        split = split_exposed(view.figures[rank].exposed, flights_of(view, rank))
        waited = sum(end - start for start, end, last in split if last == 5)
        assert 11.5 * MS < waited < 12.5 * MS
        assert 1 * MS < view.figures[rank].exposed_ns - waited < 3 * MS  # type: ignore[operator]
    assert all(last is None for _, _, last in split_exposed(view.figures[5].exposed, flights_of(view, 5)))


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ((0, 10, 30, 1), (5, 25, 40, 2), [(0, 5, 1), (5, 25, 2), (25, 40, None)]),
        ((0, 10, 20, 1), (15, 15, 40, 2), [(0, 10, 1), (10, 40, None)]),
        ((0, 30, 40, 1), (5, 10, 20, 2), [(0, 5, 1), (5, 10, 2), (10, 30, 1), (30, 40, None)]),
        ((0, 0, 20, None), (5, 30, 40, 2), [(0, 5, None), (5, 30, 2), (30, 40, None)]),
    ],
)
def test_of_several_that_wait_the_last_launched_decides(
    first: tuple[int, int, int, int | None],
    second: tuple[int, int, int, int | None],
    found: list[tuple[int, int, int | None]],
) -> None:
    assert split_exposed([(0, 40)], [Flight(*first), None, Flight(*second)]) == found


MOMENTS = st.integers(0, 40)


@st.composite
def any_flight(draw: st.DrawFn) -> Flight:
    start, transfer, done = sorted(draw(st.tuples(MOMENTS, MOMENTS, MOMENTS)))
    return Flight(start, transfer, done, draw(st.integers(0, 3)))


FLIGHTS = st.lists(st.none() | any_flight(), max_size=6)


@given(st.lists(st.tuples(MOMENTS, MOMENTS), max_size=4), FLIGHTS)
def test_every_instant_is_decided_by_the_rule(stretches: list[tuple[int, int]], crowd: list[Flight | None]) -> None:
    exposed = union(stretches)
    found = split_exposed(exposed, crowd)
    assert union((start, end) for start, end, _ in found) == exposed
    assert total([(start, end) for start, end, _ in found]) == total(exposed)
    for at in range(41):
        waiting = [f.last_rank for f in crowd if f is not None and f.start <= at < f.transfer]
        drawn = [rank for start, end, rank in found if start <= at < end]
        assert drawn in ([], [waiting[-1] if waiting else None])


def test_no_skew_at_all() -> None:
    view = across([step(0), step(1)])
    plain = flights(view.ranks[0], view.facts_of(0), NO_SKEW)
    assert [flight and flight.wait_ns for flight in plain] == [0, 0]
