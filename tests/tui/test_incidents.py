"""Incidents on the screen: the strip, the list with its details, the lost time, what ranks cost."""

import re
from dataclasses import replace

import pytest

from ddpwatch.analysis.diagnosis.incident import Account, End, Evidence, Incident, LostTime, StackGroup
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.lost_time import lost_text
from ddpwatch.tui.models.incidents import Diagnosed, ListedIncident, incident_rows, strip, struck
from ddpwatch.tui.models.overview import Overview
from ddpwatch.tui.paint.ascii import ascii_text
from ddpwatch.tui.paint.canvas import Canvas, plain
from ddpwatch.tui.paint.incidents import paint_incidents, paint_strip, strip_legend
from ddpwatch.tui.paint.lost import lost_line, paint_lost
from ddpwatch.wire.messages import Group
from tests.support.dashboards import FakeJobs, live_app, screen_text, until
from tests.support.frames import layout, run, state_of

SECOND = 10**9
LATE = Incident(
    "straggler", "warning", "rank 1 is late", (1,), "backward", since_step=4, until_step=6, cost_ns=2 * SECOND
)
EXPOSED = Incident("exposed_comm", "warning", "exposed", (), since_step=0, until_step=9, cost_ns=9 * SECOND, open=True)
PAUSE = Incident("pause", "warning", "paused", (0,), since_step=2, until_step=8, steps=2, struck=(2, 8), cost_ns=SECOND)
EVERY = Incident("intermittent", "warning", "now and then", (3,), since_step=1, until_step=9, period=4)
STACK = "/a/very/long/path/" + "x" * 90 + "/train.py:7 in train_step"
STUCK = StackGroup([2], "train.py:7 in train_step", "", [STACK])
HANG = Incident(
    "hang", "error", "rank 2 stuck", (2,), "forward", since_step=11, until_step=11, steps=1, open=True,
    device="CPU stolen",
    evidence=Evidence(why="behind", stacks=[STUCK], call_sites={2: "train.py:7 in train_step"}, late_ms=12.5),
)  # fmt: skip
LOST = LostTime(
    rank_ns=100 * SECOND,
    accounts=(
        Account("compute", None, "backward", 60 * SECOND), Account("other", None, "other", 20 * SECOND),
        Account("waiting", 5, "backward", 12 * SECOND), Account("transfer", None, "exposed_comm", 5 * SECOND),
        Account("input", None, "data", 3 * SECOND),
    ),
    ranks=8,
)  # fmt: skip


def letters(incidents, steps, now_ns=0):
    return "".join("." if found is None else KINDS[found.kind].letter for found in strip(incidents, steps, now_ns))


def test_a_rank_s_incident_is_in_front_of_one_of_all_whatever_it_cost():
    assert letters([EXPOSED, LATE], range(12)) == "EEEESSSEEEEE"  # an open one lasts to the newest step
    assert letters([LATE, HANG], range(12)) == "....SSS....H"
    assert letters([], range(3)) == "..."


def test_only_steps_that_were_struck_as_far_as_known():
    assert letters([PAUSE], range(10)) == "..P.....P."
    assert letters([EVERY], range(10)) == ".I...I...I"
    assert list(struck(replace(LATE, since_step=None), 9)) == []


def test_a_step_that_is_not_drawn_has_its_letter_in_the_next():
    """As in a heatmap, which has watched steps only."""
    assert letters([PAUSE], [1, 3, 5, 9]) == ".P.P"
    assert letters([PAUSE], [3, 5, 7]) == "..."  # nor is the first column for all steps before
    hang = replace(HANG, found_ns=6 * SECOND)
    assert letters([hang], [7, 8, 9]) == "..."
    assert letters([hang], [7, 8, 9], now_ns=7 * SECOND) == "..H"  # step 11 never ended


def test_kinds_are_told_apart_without_colour_and_the_legend_names_what_is_drawn():
    letters_of = [kind.letter for kind in KINDS.values()]
    assert len(set(letters_of)) == len(letters_of)
    assert all(letter.isascii() for letter in letters_of)
    canvas, found = Canvas(24, 1), strip([EXPOSED, LATE], range(12))
    paint_strip(canvas, found, 0, 0, 2)
    assert plain(canvas.rows()) == ["EEEEEEEESSSSSSEEEEEEEEEE"]
    assert canvas.style_at(8, 0) != canvas.style_at(0, 0)
    legend = "".join(text for text, _ in strip_legend(found, 60))
    assert set(legend.split("   ")) == {"E exposed", "S straggler"}


def test_no_letter_is_left_without_its_name():
    found = strip([EXPOSED, LATE], range(12))
    for width in range(40):
        named = [text for text, _ in strip_legend(found, width) if text.strip()]
        assert set(named) <= {"E exposed", "S straggler"}
        assert (len(named) == 2) == (width >= len("E exposed  S straggler"))


def listed(incidents, size, selected=0, position=None):
    found = Diagnosed(incidents, LOST, whole=position is not None)
    rows = incident_rows(found, position, state_of([layout()]).layouts)
    painted = paint_incidents(rows, found, size, 0, selected)
    return plain(painted), painted


@pytest.mark.parametrize("size", [(80, 19), (200, 45), (40, 8), (20, 3)])
def test_the_list_fits(size):
    _, painted = listed([HANG, EXPOSED, LATE, PAUSE], size)
    assert len(painted) == size[1]
    assert all(sum(len(text) for text, _ in row) == size[0] for row in painted)


def test_the_list_and_the_details_of_one():
    lines, _ = listed([HANG, EXPOSED, replace(LATE, param=1, share=0.02, gain=0.3, period=25)], (80, 19))
    assert re.match(r"▶ ● hang +2 +forward +11– ", lines[1])
    assert re.match(r"  ● exposed +all +– +0– +–$", lines[2].rstrip())
    assert re.match(r"  ✓ straggler +1 +backward b +4–6 +25th +2\.0 %$", lines[3].rstrip())
    details = "\n".join(lines[4:])
    assert "hang, ongoing since step 11: cost 0.00 process-seconds" in details
    assert "rank 2 stuck" in details
    assert "cause: CPU stolen" in details
    assert "rank 2 holds up the others at train.py:7 in train_step" in details
    assert re.search(r"^   …x+/train.py:7 in train_step$", details, re.MULTILINE)  # the end of a long path
    assert "blamed because others have issued more collectives" in details
    assert "late by 12 ms in such a step" in details
    lines, _ = listed([HANG, replace(LATE, gain=0.3, share=0.02)], (80, 19), selected=1)
    assert "straggler, over, steps 4–6: cost 2.0 % of all ranks' time" in lines[3]
    assert "without the wait for it, its steps would have been 30.0 % shorter" in lines[5]
    assert ascii_text("●").isascii()


@pytest.mark.parametrize(("position", "when"), [(3, "later"), (4, "now"), (5, "now"), (6, "over"), (9, "over")])
def test_what_comes_after_a_replay_s_position_is_dimmed(position, when):
    rows = incident_rows(Diagnosed([LATE], whole=True), position, state_of([layout()]).layouts)
    assert rows == [ListedIncident(LATE, "", when)]
    _, painted = listed([LATE], (80, 19), position=position)
    assert ("faint" in [style for _, style in painted[1]]) == (when == "later")


@pytest.mark.parametrize(("still", "at_118", "at_120"), [(True, "later", "now"), (False, "later", "over")])
def test_a_hang_is_now_while_its_step_has_not_ended(still, at_118, at_120):
    hang = replace(HANG, since_step=120, until_step=120, open=still)
    whens = [
        incident_rows(Diagnosed([hang], whole=True), position, state_of([layout()]).layouts)[0].when
        for position in (118, 119, 120)
    ]
    assert whens == [at_118, "now", at_120]


@pytest.mark.parametrize(("now_ns", "when"), [(0, "later"), (5 * SECOND, "later"), (7 * SECOND, "now")])
def test_a_hang_is_now_once_it_shows_also_where_not_all_ranks_have_sent_the_step_before(now_ns, when):
    found = Diagnosed([replace(HANG, since_step=120, until_step=120, found_ns=6 * SECOND)], whole=True)
    assert incident_rows(found, 118, state_of([layout()]).layouts, now_ns)[0].when == when


def test_a_death_is_not_later_than_its_step():
    death = replace(HANG, kind="death", open=False)
    found = Diagnosed([death], whole=True)
    assert [incident_rows(found, at, state_of([layout()]).layouts)[0].when for at in (9, 10, 11)] == [
        "later",
        "over",
        "over",
    ]


def test_a_death_has_a_step_and_does_not_last():
    ended = Evidence(ends={1: End("killed", "SIGKILL", 9, 11, "forward", [1], 0)})
    lines, _ = listed([replace(HANG, kind="death", message="rank 2 was killed", evidence=ended)], (80, 19))
    assert re.match(r"▶ ● death +2 +forward +11 ", lines[1])
    assert lines[2].startswith(" death, at step 11: cost ")
    assert "it struck 1 step" in [line.strip() for line in lines]
    assert not any("reason" in line for line in lines)


def test_what_was_ongoing_at_the_end_of_a_run_that_is_over():
    found = Diagnosed([replace(LATE, open=True, gain=0.3)])
    rows = incident_rows(found, 9, state_of([layout()]).layouts)
    lines = plain(paint_incidents(rows, found, (80, 19), 0, 0, ended=True))
    assert lines[1].startswith("▶ ○ straggler")
    assert "straggler, from step 4 to the end: cost – of all" in lines[2]
    assert "its steps would have been 30.0 % shorter" in lines[4]


def test_what_is_not_known_yet_is_said():
    assert "diagnosing the recording: 42 %" in plain(paint_incidents([], Diagnosed(progress=0.42), (80, 10), 0, 0))[1]
    assert "where the time went: diagnosing … 42 %" in "\n".join(
        plain(paint_lost(Overview(diagnosed=Diagnosed(progress=0.42)), 60, 6))
    )


def test_lost_time_in_one_line_and_as_a_bar():
    model = Overview(diagnosed=Diagnosed(lost=LOST))
    whole = "20.0 % lost: 12.0 % waiting for rank 5 (backward), 5.0 % exposed transfer, 3.0 % input"
    assert lost_text(LOST) == whole
    assert lost_line(model, 100) == whole
    shorter = "20.0 % lost: 12.0 % waiting for rank 5 (backward), 5.0 % exposed transfer, 3.0 % more"
    assert lost_line(model, 85) == shorter  # what does not fit is summed up
    replayed = replace(model, diagnosed=replace(model.diagnosed, whole=True))
    assert lost_line(replayed, 120) == f"in the whole recording: {whole}"  # and not up to the position, as the verdict
    assert lost_line(replace(replayed, ended=True), 120) == whole
    assert plain(paint_lost(replayed, 102, 8))[0] == " in the whole recording: 20.0 % of 8 ranks × 12 s lost"
    lines = plain(paint_lost(model, 102, 8))
    assert lines[0] == " 20.0 % of 8 ranks × 12 s lost so far"
    assert [lines[1].count(glyph) for glyph in "╲╱≈▓·"] == [12, 5, 3, 60, 20]
    assert re.match(r" ╲╲ +12\.0 % waiting for rank 5 \(backward\) +12\.0 process-seconds", lines[2])
    assert re.match(r" ▓▓ +60\.0 % backward", lines[5])


async def test_ranks_by_cost_and_with_their_groups():
    groups = [
        Group(rank=rank, id=number, ranks=list(ranks), name="g", backend="gloo")
        for number, ranks in ((1, (0, 1)), (2, (2, 3)))
        for rank in ranks
    ]
    jobs, messages = FakeJobs("run-1"), [*groups, *run(30, world=4, late_rank=2)]
    jobs.sources["run-1"].put(messages, 50)
    app = live_app(jobs)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, lambda: app.session.state.frames == len(messages))
        await pilot.press("4")
        assert re.search(r"cost s   share +groups", screen_text(app))
        assert re.findall(r"^ +(\d)[◀ ] .* ms", screen_text(app), re.MULTILINE) == ["0", "1", "2", "3"]
        cost = app.session.overview.diagnosed.waited_for
        assert list(cost) == [2]
        assert re.search(rf"^ +2◀ .* {cost[2] / SECOND:.2f} +\d+\.\d % +1 *$", screen_text(app), re.MULTILINE)
        await pilot.press("s")
        assert re.findall(r"^ +(\d)[◀ ] .* ms", screen_text(app), re.MULTILINE)[0] == "2"


def test_one_that_came_back_is_drawn_where_it_struck():
    again = replace(LATE, since_step=2, until_step=9, spells=((2, 3), (8, 9)))
    assert list(struck(again, 12)) == [2, 3, 8, 9]
    assert list(struck(replace(again, open=True), 11)) == [2, 3, 8, 9, 10, 11]
