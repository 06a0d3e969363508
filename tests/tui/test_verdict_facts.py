"""The line below the verdict, and what it says in a hang."""

from dataclasses import replace

import pytest

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.verdict import verdict
from ddpwatch.analysis.window import Summary
from ddpwatch.tui.models.host_names import host_names
from ddpwatch.tui.models.incidents import Diagnosed
from ddpwatch.tui.models.overview import Overview, paused_overview, rank_status
from ddpwatch.tui.models.verdict_facts import standstill_ns, verdict_facts
from ddpwatch.tui.paint.header import line_below, paint_verdict
from ddpwatch.tui.paint.page import verdict_rows
from tests.support.frames import MS, START_NS, STEP_MS, beat, bye, hello, run, state_of, step

SECOND = 10**9
LATE = Incident(
    "straggler", "warning", "rank 1 is late", (1,), since_step=30, until_step=39, cost_ns=2 * SECOND, share=0.02,
    gain=0.1, open=True, counts=True,
)  # fmt: skip
HANG = Incident("hang", "error", "rank 1 stuck", (1,), since_step=40, until_step=40, open=True)
BEAT_NS = beat().at_ns


def found_of(incidents, **changes):
    state, found = state_of(list(run(40))), verdict(Summary(), incidents, 2, **changes)
    end = changes.get("end")
    facts = verdict_facts(found.incident, state, host_names(state))
    return Overview(verdict=found, facts=facts, end=end, ended=end is not None)


def shown(model):
    return "".join(text for text, _ in line_below(model, 200))


def test_the_facts_are_those_of_the_verdict_s_own_incident():
    """Costliest first comes one that is over, with the same sentence; another one's sentence starts like it."""
    over = replace(LATE, since_step=5, until_step=9, cost_ns=9 * SECOND, open=False, counts=False)
    longer = replace(LATE, message="rank 1 is late in each step", gain=0.2)
    assert found_of([over, LATE]).facts.incident == LATE
    assert found_of([LATE, longer]).facts.incident == longer
    assert found_of([over]).facts is None


def test_the_key_for_more_says_that_the_verdict_is_not_the_only_incident():
    """A checkpoint that cost a step as much was on no screen of 80 columns."""
    other = replace(LATE, kind="pause", ranks=(0,))
    for found, key in (([LATE], "7: details"), ([LATE, other], "7: 2 ongoing")):
        model = replace(found_of(found), diagnosed=Diagnosed(found), newest_step=39)
        assert shown(model).endswith(key)
        whole = replace(model, diagnosed=Diagnosed(found, whole=True))
        assert shown(whole).endswith(key)
        assert shown(replace(whole, newest_step=20)).endswith("7: details")  # of a replay: not there yet


def test_a_long_verdict_leaves_the_next_step_whole():
    found = found_of([LATE])
    model = replace(found, verdict=replace(found.verdict, text="a word and " * 34, next_step="stop what has its core"))
    rows = paint_verdict(model, 80, verdict_rows(model, 80, 24))
    assert "".join(text for text, _ in rows[-1]).strip() == "next: stop what has its core"


def test_what_lasts_has_no_final_cost_until_the_run_is_over():
    assert shown(found_of([LATE])).startswith(
        "since step 30, for 1 s   cost so far 2.00 process-seconds, 2.0 % of all ranks' time"
    )
    ended = shown(found_of([LATE], end=bye()))
    assert ended.startswith("from step 30 to the end   cost in all 2.00 process-seconds, 2.0 % of all ranks' time")


def test_the_line_says_what_a_hang_loses_in_all_and_in_the_run_so_far_however_narrow_it_is():
    """`ddpwatch ls` said that 80 % were lost, beside 40 % here: these were of those who wait."""
    hang = replace(HANG, cost_ns=4 * SECOND, stuck_ns=4 * SECOND, share=0.4)
    share = "40.0 % of all ranks' time, 80.0 % with that of rank 1"
    assert shown(found_of([hang])).startswith(f"cost so far 4.00 process-seconds, {share}")
    for incident, cost in ((LATE, "cost so far 2.0 %"), (hang, "lost so far 80.0 %")):
        narrow = "".join(text for text, _ in line_below(found_of([incident]), 79))
        assert f"{cost} of all ranks' time" in narrow


def test_a_run_that_ends_in_a_pause_changes_nothing_that_was_judged_before():
    frozen = found_of([LATE])
    assert shown(paused_overview(frozen, found_of([], end=bye()), None)) == shown(frozen)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"phase": "forward"}, "stuck in forward 74 s"),
        ({"phase": "input", "activity": "save", "activity_since_ns": BEAT_NS - 9 * SECOND}, "stuck saving 9 s"),
        (
            {"phase": "input", "activity": "data", "activity_since_ns": BEAT_NS - 9 * SECOND},
            "stuck waiting for data 9 s",
        ),
        ({"phase": ""}, "stuck 74 s"),
    ],
)
def test_where_and_for_how_long_a_rank_is_stuck(place, text):
    state = state_of([hello(0), beat(0, for_s=74, **place)])
    assert rank_status(state, state.ranks[0], stuck={0}) == (text, "bad")


def test_a_rank_in_a_bare_step_waits_for_the_one_that_is_stuck():
    """It was said to run: no phase says that it waits."""
    state = state_of([hello(0), beat(0, for_s=74, phase="")])
    assert rank_status(state, state.ranks[0], stuck={1}) == ("waiting 74 s", "warn")
    assert rank_status(state, state.ranks[0]) == ("running", "good")


def test_a_rank_that_saves_is_said_to_save():
    """It was said to run, while the others waited for its checkpoint."""
    saves = {"phase": "input", "activity": "save"}
    state = state_of([hello(0), beat(0, **saves, activity_since_ns=BEAT_NS - 9 * SECOND)])
    assert rank_status(state, state.ranks[0]) == ("saving 9 s", "warn")
    state = state_of([hello(0), beat(0, **saves, activity_since_ns=BEAT_NS - 10 * MS)])
    assert rank_status(state, state.ranks[0]) == ("running", "good")


class TestStandstill:
    """Ranks 0 and 1 ended their last step long before their heartbeats."""

    def after(self, messages):
        """The state when all heartbeats have just come."""
        state = state_of([*run(40), *messages])
        for rank in state.ranks.values():
            rank.seen_ns = state.now_ns
        return state

    STOOD_NS = BEAT_NS - START_NS - 40 * STEP_MS * MS

    def test_from_the_last_step_of_any_rank(self):
        state = self.after(beat(rank, 40) for rank in (0, 1))
        assert standstill_ns([HANG], state) == self.STOOD_NS
        assert standstill_ns([replace(HANG, open=False)], state) is None

    def test_none_while_another_group_goes_on(self):
        ended_ns = BEAT_NS - 50 * MS
        goes_on = step(2, 900, start_ns=ended_ns - STEP_MS * MS)
        state = self.after([goes_on, *(beat(rank, 40) for rank in (0, 1, 2))])
        assert standstill_ns([HANG], state) is None

    def test_a_silent_rank_stands_still_too(self):
        """Its last heartbeat may have come right after its last step."""
        last_ns = BEAT_NS - self.STOOD_NS + 100 * MS
        state = self.after([beat(0, 40), beat(1, 40, at_ns=last_ns)])
        state.ranks[1].seen_ns -= self.STOOD_NS - 100 * MS
        assert standstill_ns([HANG], state) == self.STOOD_NS
