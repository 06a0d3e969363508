"""Steps of any loop: whatever the order of events, steps tile time, and no event is lost without being counted."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.probe.event_log import Event, EventKind, EventLog, UpdateEnd
from ddpwatch.probe.record import BucketRecord
from ddpwatch.probe.steps_of import Start, Steps, steps_of
from ddpwatch.sampling.levels import BARE

WATCHED, START = UpdateEnd(), Start(0, 0, UpdateEnd())
KINDS: tuple[EventKind, ...] = (
    "forward", "backward_begin", "backward_end", "optimizer_begin", "optimizer_end", "data", "collective", "lost",
)  # fmt: skip


def _about(kind: EventKind, at: int, which: int) -> object:
    if kind == "optimizer_begin":
        return which
    if kind == "optimizer_end":
        return which, UpdateEnd(BARE if which == 2 else "ok")
    if kind == "collective":
        return BucketRecord(0, which, 8, at)
    return at + 5 if kind == "data" else 1 if kind == "lost" else None


@st.composite
def any_events(draw: st.DrawFn) -> list[Event]:
    """Any events in any order, some at the same time."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 2)), max_size=60))
    events, at = [], 0
    for number, (kind, pause, which) in enumerate(kinds):
        at += pause
        events.append(Event(number, at, kind, _about(kind, at, which)))
    return events


def loop(text: str, ending: UpdateEnd = WATCHED) -> list[Event]:
    """Events 10 ns apart: F forward, ( ) backward, [ ] an optimizer, { } another, d a wait of 5 ns, c a collective."""
    events = []
    for number, sign in enumerate(text.replace(" ", "")):
        at = 10 * (number + 1)
        kind: EventKind = {"F": "forward", "(": "backward_begin", ")": "backward_end", "[": "optimizer_begin",
                "{": "optimizer_begin", "d": "data", "c": "collective", "!": "lost"}.get(sign, "optimizer_end")  # type: ignore[assignment] # fmt: skip
        about = _about(kind, at, "[{".find(sign) if sign in "[{" else "]}".find(sign))
        events.append(Event(number, at, kind, (about[0], ending) if isinstance(about, tuple) else about))
    return events


def ends(text: str) -> list[int]:
    """Where in the text the steps end, from 1."""
    return [record.end // 10 for record in steps_of(loop(text), START, over=True).records]


# -- whatever happens --------------------------------------------------------------------------------------------------


@given(any_events(), st.booleans())
def test_steps_tile_time(events: list[Event], over: bool) -> None:
    found = steps_of(events, START, over)
    assert [record.step for record in found.records] == list(range(found.start.step))
    places = [START.at, *(record.start for record in found.records), found.start.at]
    assert places[0] == places[1]
    for before, after in pairwise(found.records):
        assert before.end == after.start
    assert all(record.end >= record.start for record in found.records)
    assert not found.records or found.records[-1].end == found.start.at


@given(any_events())
def test_phases_of_a_step_lie_in_it_one_after_the_other(events: list[Event]) -> None:
    for record in steps_of(events, START, over=True).records:
        stamps = [at for _, first, last in record.spans for at in (first, last)]
        assert stamps == sorted(stamps)
        assert all(first < last for _, first, last in record.spans)
        assert not stamps or record.start <= stamps[0] <= stamps[-1] <= record.end


@given(any_events())
def test_no_collective_and_no_backward_is_lost(events: list[Event]) -> None:
    found = steps_of(events, START)
    ended = len(events) - len(found.rest)
    watched = [record for record in found.records if record.status != BARE]
    seen = [id(bucket) for record in watched for bucket in record.buckets]
    assert len(seen) == len(set(seen))
    if len(watched) == len(found.records):
        assert seen == [id(event.about) for event in events[:ended] if event.kind == "collective"]
    assert found.rest == events[ended:]


@given(any_events(), st.data())
def test_it_does_not_matter_when_the_events_come(events: list[Event], data: st.DataObject) -> None:
    whole, rest, start, records = steps_of(events, START), list[Event](), START, []
    left = list(events)
    while left:
        count = data.draw(st.integers(1, len(left)))
        part: Steps = steps_of([*rest, *left[:count]], start)
        left, rest, start = left[count:], part.rest, part.start
        records += part.records
    assert [record.message(0, 0) for record in records] == [record.message(0, 0) for record in whole.records]
    assert (rest, start) == (whole.rest, whole.start)


@given(any_events())
def test_an_update_has_one_step(events: list[Event]) -> None:
    """No step without an optimizer's end in it, and none that goes on after that with a forward or a backward."""
    after = 0
    for record in steps_of(events, START, over=True).records:
        inside = [event for event in events[after:] if event.at <= record.end]
        assert any(event.kind == "optimizer_end" for event in inside)
        after += sum(event.at < record.end for event in events[after:])


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 12))
def test_no_event_is_lost_without_being_counted(bursts: list[int], most: int) -> None:
    log, taken, number = EventLog(most), list[Event](), 0
    for burst in bursts:
        for _ in range(burst):
            log.add_event("forward", number)
            number += 1
        taken += log.take_events()
    kept = [event for event in taken if event.kind != "lost"]
    assert len(kept) + sum(event.about for event in taken if event.kind == "lost") == number
    assert log.lost == number - len(kept)
    assert [event.at for event in taken] == sorted(event.at for event in taken)


# -- loops that people write -------------------------------------------------------------------------------------------


def test_a_plain_loop() -> None:
    assert ends("dF()[]" * 3) == [6, 12, 18]


def test_a_step_is_known_once_the_next_forward_or_backward_begins() -> None:
    assert len(steps_of(loop("F()[]"), START).records) == 0
    assert len(steps_of(loop("F()[] d"), START).records) == 0
    assert len(steps_of(loop("F()[] F"), START).records) == 1
    assert len(steps_of(loop("F()[] ("), START).records) == 1


def test_several_optimizers_step_for_one_update() -> None:
    assert ends("F()[]{} F()[]{}") == [7, 14]


def test_a_gan_updates_twice_an_iteration() -> None:
    assert ends("F()[] F(){}") == [5, 10]


def test_micro_batches_are_counted_and_their_number_may_change() -> None:
    records = steps_of(loop("F()F()F()[] F()[]"), START, over=True).records
    assert [record.backwards for record in records] == [3, 1]


def test_a_closure_runs_within_its_optimizer() -> None:
    assert ends("[F()F()F()] [F()]") == [11, 16]
    (first, _) = steps_of(loop("[F()F()] [F()]"), START, over=True).records
    assert [phase for phase, *_ in first.spans] == ["optimizer", "forward", "backward"] * 2 + ["optimizer"]


def test_an_optimizer_that_calls_another_is_one() -> None:
    assert ends("F()[F(){}] F()[F(){}]") == [10, 20]


def test_an_optimizer_within_the_backward_ends_the_step_with_it() -> None:
    assert ends("F([]{}[]) F([]{})") == [9, 16]


def test_a_backward_within_another_is_part_of_it() -> None:
    (record,) = steps_of(loop("F(()())[]"), START, over=True).records
    assert record.backwards == 1
    assert [phase for phase, *_ in record.spans] == ["forward", "backward", "optimizer"]


def test_an_optimizer_that_has_raised_hides_no_later_step() -> None:
    assert ends("F()[ F()[] F()[]") == [9, 14]


def test_a_forward_that_is_not_seen_begins_with_what_came_before() -> None:
    (record,) = steps_of(loop("d()c[]"), START, over=True).records
    assert record.spans == [("forward", 15, 20), ("backward", 20, 30), ("optimizer", 50, 60)]
    assert record.data == [(10, 15)]
    assert [bucket.launch for bucket in record.buckets] == [40]


def test_a_step_that_lacks_events_is_aborted() -> None:
    first, second = steps_of(loop("F(!)[] F()[]"), START, over=True).records
    assert (first.status, second.status) == ("aborted", "ok")


def test_a_bare_step_has_its_ends_only() -> None:
    events = loop("F()[] ()] ()]", UpdateEnd(BARE, own_ns=7, cpu_ns=100))
    first, second, _ = steps_of(events, START, over=True).records
    assert first.spans
    assert not second.spans
    assert (second.status, second.own_ns, second.cpu_ns, second.backwards) == (BARE, 7, 0, 1)


def test_the_first_step_is_a_warm_up() -> None:
    assert steps_of(loop("()]"), Start(0, 0), over=True).records[0].status == "warmup"
