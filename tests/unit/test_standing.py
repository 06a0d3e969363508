"""The verdict does not flap, and what comes back is the same incident: whatever hovers around a threshold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.analysis.diagnosis.incident import DeviceFigures, Evidence, Incident
from ddpwatch.analysis.diagnosis.standing import AGAIN, AWAY_SHARE, HOLD, OUTWEIGHS, Standing, key_of, rejoined
from ddpwatch.analysis.diagnosis.thresholds import COSTLY_SHARE, OVER_SHARE
from ddpwatch.analysis.diagnosis.words.next_steps import JobPlaces, next_step
from ddpwatch.analysis.diagnosis.words.verdict import verdict
from ddpwatch.analysis.window import Summary
from ddpwatch.tui.models.incidents import struck
from ddpwatch.viewer.state import RunState
from tests.support.frames import MS, diagnosed, enveloped, hello, layout, run, state_of, synchronous

pytestmark = pytest.mark.same_everywhere

LATE = Incident(
    "straggler", "warning", "rank 1 is late", ranks=(1,), phase="forward", since_step=20, until_step=60, steps=41,
    cost_ns=10, gain=0.1, open=True, evidence=Evidence(late_ms=30.0),
)  # fmt: skip
EXPOSED = Incident(
    "exposed_comm", "warning", "transfers", phase="exposed_comm", since_step=8, until_step=60, steps=40, gain=0.1,
    open=True,
)  # fmt: skip
REPEATED = replace(EXPOSED, kind="repeated_reduction")
SLOWER = replace(EXPOSED, kind="slow_device", severity="info", phase="", message="all ranks are slower")
BY_TURNS = replace(EXPOSED, kind="imbalance", severity="info")

STEPS = range(61)  # that were watched


def spells_of(shape: list[tuple[int, int]], newest: int) -> list[Incident]:
    """One incident a spell, as a detector finds them: the newest one is open until its last step."""
    found = []
    for since, until in shape:
        if since <= newest:
            over = min(until, newest)
            found.append(
                replace(
                    LATE, since_step=since, until_step=over, steps=over - since + 1, share=0.02, open=newest <= until
                )
            )
    return found


@st.composite
def hovering(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Spells with gaps of any length between them, as of a figure that hovers around a threshold."""
    at, found = 20, []
    for _ in range(draw(st.integers(1, 12))):
        until = at + draw(st.integers(0, 60))
        found.append((at, until))
        at = until + draw(st.integers(1, 120))
    return found


@settings(max_examples=20)  # of some 800 steps each, whose verdict is asked for after every one
@given(hovering(), st.sampled_from([None, 0.06, 0.14]))
def test_a_rank_that_hovers_changes_the_verdict_seldom_and_stays_one_incident(
    shape: list[tuple[int, int]], beside: float | None
) -> None:
    standing, kinds, identities = Standing(), [], set()
    lasts = [] if beside is None else [replace(EXPOSED, gain=beside)]
    for newest in range(shape[-1][1] + 3 * HOLD):
        joined = rejoined(spells_of(shape, newest))
        standing.look([*joined, *lasts], range(newest + 1), 0.0, newest * 10**9)
        found = standing.judged(joined, range(newest + 1))
        shown = standing.judged([*joined, *lasts], range(newest + 1))
        kinds.append(verdict(Summary(), shown, 2, finished_steps=newest).kind)
        identities |= {(key_of(one), one.since_step) for one in found}
        assert len(found) <= 1
    since = shape[1][0] if lasts and len(shape) > 1 else 0  # what comes for the first time makes way for what lasts
    changes = [step for step, (before, now) in enumerate(pairwise(kinds)) if before != now and step >= since]
    assert all(third - first > HOLD for first, third in zip(changes, changes[2:], strict=False))
    assert identities == {(key_of(LATE), 20)}
    assert len(found[0].spells_or_one) == len(shape)


@given(
    st.lists(st.sampled_from([0.8, 1.0, 1.2]), min_size=2, max_size=200),
    st.sampled_from(["share", "info", "rival", "mends"]),
)
def test_a_figure_around_a_threshold_changes_the_verdict_once(factors: list[float], what: str) -> None:
    standing, said = Standing(), []
    for at, factor in enumerate(factors):
        lost_share, incidents = 0.0, [replace(EXPOSED, gain=0.1)]
        if what == "share":
            incidents, lost_share = [], factor * COSTLY_SHARE
        elif what == "info":
            incidents = [replace(EXPOSED, severity="info", gain=factor * COSTLY_SHARE)]
        else:
            incidents.append(replace(LATE, gain=factor * 0.1 / (OUTWEIGHS if what == "mends" else 1.0)))
        standing.look(incidents, STEPS, lost_share, at * 10**9)
        worst = [one.kind for one in standing.judged(incidents, STEPS) if one.foremost]
        said.append((worst, standing.costly))
    assert sum(before != now for before, now in pairwise(said)) <= 1


def test_what_comes_and_goes_lasts_until_it_stays_away_for_longer_than_before() -> None:
    """It was "is", "was", "is" fifteen times in ten minutes."""
    shape, said = [(20, 60), (75, 90), (150, 160), (200, 210), (330, 340)], []
    for newest in range(20, 500):
        spells = [replace(one, lasting="is", message="is" if one.open else "was") for one in spells_of(shape, newest)]
        (found,) = rejoined(spells, range(newest + 1))
        said.append(found.message)
        assert found.open is (found.message == "is")
        assert not rejoined([replace(one, open=False) for one in spells])[0].open  # once the run has ended
    changes = [20 + at for at, (before, now) in enumerate(pairwise(said), start=1) if before != now]
    away = int(41 * AWAY_SHARE) + 1
    assert changes == [60 + away, 75, 340 + 4 * HOLD]
    text = verdict(Summary(), [replace(found, open=True, resting=True, counts=True)], 2, finished_steps=500).text
    assert "on and off, last in step 340" in text


@pytest.mark.parametrize(("steps", "away"), [(16, 1), (160, 10), (1600, HOLD)])
def test_what_lasted_long_is_not_over_at_once(steps: int, away: int) -> None:
    once = replace(LATE, until_step=20 + steps, steps=steps, open=False, lasting="rank 1 is late")
    for more, rests in ((away - 1, True), (away, False)):
        (found,) = rejoined([once], range(21 + steps + more))
        assert (found.resting, found.open) == (rests, rests)
        assert struck(found, 9999)[-1] == once.until_step


def test_a_warning_stays_one_while_it_counts() -> None:
    standing = Standing()
    standing.look([EXPOSED], STEPS, 0.0, 0)
    minor = replace(EXPOSED, severity="info", gain=0.001)
    (now,) = standing.judged([minor], range(62))
    assert (now.severity, now.counts) == ("warning", True)
    over = replace(minor, open=False, until_step=61)
    assert [one.counts for one in standing.judged([over], range(62 + HOLD))] == [True]
    assert [(one.counts, one.severity) for one in standing.judged([over], range(63 + HOLD))] == [(False, "info")]


def test_another_incident_takes_the_verdict_over_if_it_costs_clearly_more_or_is_an_error() -> None:
    for other, takes in ((0.11, False), (0.1 * OUTWEIGHS + 0.01, True)):
        standing, both = Standing(), [REPEATED, replace(LATE, gain=other)]
        standing.look([REPEATED], STEPS, 0.0, 0)
        standing.look(both, STEPS, 0.0, 10**9)
        assert [one.foremost for one in standing.judged(both, STEPS)] == [not takes, takes]
    error = replace(LATE, severity="error", gain=None, kind="layouts_differ")
    standing.look([EXPOSED, error], STEPS, 0.0, 2 * 10**9)
    assert [one.foremost for one in standing.judged([EXPOSED, error], STEPS)] == [False, True]


@pytest.mark.parametrize(
    ("now", "other", "takes"),
    [
        # Where time goes is first only if that is 1.5 times what can be mended, and clearly so to become it
        ((EXPOSED, 0.199), (LATE, 0.199), True),
        ((EXPOSED, 0.21), (REPEATED, 0.17), True),
        ((EXPOSED, 0.204), (BY_TURNS, 0.189), True),
        ((EXPOSED, 0.3), (LATE, 0.19), False),
        ((LATE, 0.1), (EXPOSED, 0.2), False),
        ((LATE, 0.1), (EXPOSED, 0.24), True),
        ((SLOWER, 0.2), (LATE, 0.14), True),
        ((replace(SLOWER, device="CPU starved"), 0.2), (LATE, 0.14), False),
        # An info gives way to a warning that costs more
        ((replace(SLOWER, device="CPU starved"), 0.2), (LATE, 0.21), True),
        ((LATE, 0.2), (replace(SLOWER, device="CPU starved"), 0.21), False),
        # What is over, to what lasts and costs as much as it did
        ((replace(SLOWER, device="CPU starved", open=False, share=0.077), 0.32), (EXPOSED, 0.186), True),
        ((replace(LATE, open=False, share=0.2), 0.32), (EXPOSED, 0.186), False),
        ((EXPOSED, 0.1), (replace(LATE, open=False, share=0.3), 0.3), False),
    ],
)
def test_what_can_be_mended_and_lasts_is_the_verdict(
    now: tuple[Incident, float], other: tuple[Incident, float], takes: bool
) -> None:
    standing, both = Standing(), [replace(one, gain=gain) for one, gain in (now, other)]
    for at, found in enumerate([both[:1], both, both]):
        standing.look(found, STEPS, 0.0, at * 10**9)
    assert [one.foremost for one in standing.judged(both, STEPS)] == [not takes, takes]


def test_of_the_same_ranks_incidents_the_one_that_lasts_is_the_verdict() -> None:
    standing, both = Standing(), [replace(LATE, open=False, share=0.2), replace(LATE, kind="intermittent")]
    standing.look(both, STEPS, 0.0, 0)
    assert [one.foremost for one in standing.judged(both, STEPS)] == [False, True]


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({}, 1),
        ({"since_step": 61 + AGAIN}, 2),
        ({"evidence": Evidence(late_ms=100.0)}, 2),
        ({"phase": "backward"}, 2),
        ({"phase": "backward", "steps": 1}, 1),  # one slow rank was two incidents for one step
        ({"ranks": (2,)}, 2),
        ({"kind": "pause"}, 2),
    ],
)
def test_what_comes_back_is_the_same(change: dict[str, object], count: int) -> None:
    again = replace(LATE, **{"since_step": 90, "until_step": 480, "cost_ns": 30, **change})
    found = rejoined([again, replace(LATE, open=False)])
    assert len(found) == count
    if count == 1:
        assert (found[0].since_step, found[0].until_step, found[0].cost_ns, found[0].open) == (20, 480, 40, True)
        assert found[0].spells == ((20, 60), (90, 480))
        assert found[0].occurrences == 2


def test_what_comes_back_keeps_the_figures_of_its_cause_for_the_next_step() -> None:
    starved = DeviceFigures(cause="wait", host="node", value=0.5, before=None, peers=None, figures={})
    evidence = Evidence(late_ms=30.0, watched_steps=40, device=starved)
    before = replace(LATE, open=False, device="CPU starved", evidence=evidence)
    again = replace(LATE, since_step=90, until_step=480, evidence=Evidence(late_ms=30.0, watched_steps=390))
    (found,) = rejoined([before, again])
    assert (found.device, found.evidence.device) == ("CPU starved", starved)
    assert found.evidence.watched_steps == 430  # of which it struck those of both
    assert "who has the cores" in next_step(found, JobPlaces())
    (found,) = rejoined([before, replace(again, cost_ns=before.cost_ns + 1)])
    assert (found.device, found.evidence.device) == ("", None)  # a brief spell's cause is not that of all


def test_the_tick_comes_back_once_little_is_lost() -> None:
    standing = Standing()
    for at, (factor, costly) in enumerate([(0.99, False), (1.0, True), (0.8, True), (OVER_SHARE - 0.01, False)]):
        standing.look([], STEPS, factor * COSTLY_SHARE, at * 10**9)
        assert standing.costly is costly


def test_a_rank_late_on_and_off_is_one_incident_in_real_steps() -> None:
    """40 ms late for 30 steps, on time for 30, and so on."""
    late = [(0, 40 * (n // 30 % 2)) for n in range(300)]
    found = [one for one in diagnosed(late).diagnosis.incidents() if one.ranks == (1,)]
    assert [one.occurrences for one in found] == [5]
    assert found[0].cost_ns == pytest.approx(150 * 30 * MS, rel=0.1)  # 10 of its 40 ms are hidden


def test_who_asks_and_when_changes_nothing() -> None:
    late = [(0, 40 * (n // 25 % 2)) for n in range(200)]
    messages = [hello(0), hello(1), layout(), *(one for ranks in synchronous(late) for one in ranks)]
    once, often = RunState(), RunState()
    for state in (once, often):
        for message, envelope in enveloped(messages):
            state.apply_message(message, envelope.received_ns)
            if state is often:
                state.diagnosis.incidents()
    assert once.diagnosis.incidents() == often.diagnosis.incidents() != []


def test_a_costly_info_is_the_verdict_and_no_tick_stands_beside_it() -> None:
    found = Standing().judged([replace(EXPOSED, severity="info", message="all ranks are slower", gain=0.234)], STEPS)
    said = verdict(Summary(), found, 2, finished_steps=60)
    assert (said.kind, said.severity) == ("exposed_comm", "warn")
    assert "a step would be 23 % shorter" in said.text
    assert state_of(list(run(40))).diagnosis.lost().costly


def test_a_ranks_collections_are_no_spell_of_its_being_late() -> None:
    collects = replace(LATE, kind="intermittent", phase="gc", since_step=30, until_step=42, steps=3)
    assert rejoined([LATE, collects]) == [LATE, collects]
