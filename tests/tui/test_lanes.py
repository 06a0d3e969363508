"""Exact cells for steps of known geometry: at 100 columns of axis, one cell is one millisecond."""

import msgspec
import pytest

from ddpwatch.tui.models.lanes import step_lanes
from ddpwatch.tui.paint.axis import Axis, nice_step
from ddpwatch.tui.paint.canvas import plain
from ddpwatch.tui.paint.glyphs import COMM
from ddpwatch.tui.paint.lanes import LaneRows, capacity, lane_rows, paint_lanes
from tests.support.frames import MS, hello, run, shadow, state_of, step

WIDTH = 9 + 100 + 1  # gutter, axis, one blank


def lanes_of(*messages, number=None):
    state = state_of(list(messages))
    view = state.newest_step() if number is None else state.steps[number]
    return step_lanes(view, state.ranks)


def cells(rows, y):
    """Row y as one (character, style) per cell."""
    return [(char, style) for text, style in rows[y] for char in text]


def where(rows, y, *styles):
    """The cells of the axis, from its left end, that have one of the styles."""
    return [x - 9 for x, (_, style) in enumerate(cells(rows, y)) if style.removesuffix("-label") in styles]


def test_one_rank_at_one_cell_per_millisecond():
    rows = paint_lanes(lanes_of(hello(0, 1), step(0)), WIDTH, 5)
    # title, hooks, compute, comm, axis
    assert where(rows, 2, "forward") == list(range(2, 30))
    assert where(rows, 2, "backward") == list(range(31, 80))
    assert where(rows, 2, "optimizer") == list(range(91, 95))
    assert where(rows, 1, "hook") == [40, 50, 60, 70]
    assert where(rows, 3, "comm-a") == list(range(50, 60))
    assert where(rows, 3, "comm-b") == list(range(70, 80))


def test_exposed_communication_has_its_own_glyph_and_style():
    rows = paint_lanes(lanes_of(hello(0, 1), step(0)), WIDTH, 5)
    assert where(rows, 3, "exposed") == list(range(80, 90))
    assert [char for char, style in cells(rows, 3) if style == "exposed"][-4:] == [COMM["exposed"]] * 4


def test_buckets_carry_their_number():
    row = plain(paint_lanes(lanes_of(hello(0, 1), step(0)), WIDTH, 5))[3]
    assert row[9 + 50 : 9 + 60].strip("█ ") == "0"
    assert "1" in row[9 + 70 : 9 + 90]


def test_the_axis_is_labelled_in_milliseconds():
    axis = plain(paint_lanes(lanes_of(hello(0, 1), step(0)), WIDTH, 5))[4]
    assert axis[9:].startswith("╵0 ms")
    assert axis[9 + 50 :].startswith("╵50")


def test_ranks_on_one_clock_are_aligned_by_their_start():
    later = msgspec.structs.replace(step(1), start_ns=step(0).start_ns + 100 * MS)
    model = lanes_of(hello(0), hello(1), step(0), later)
    assert model.aligned
    assert [lane.offset_ns for lane in model.lanes] == [0, 100 * MS]
    rows = paint_lanes(model, WIDTH, 8)  # two milliseconds a cell
    assert where(rows, 2, "forward") == list(range(1, 15))
    assert where(rows, 5, "forward") == list(range(51, 65))


def test_ranks_on_different_clocks_start_at_zero_and_the_title_says_so():
    later = shadow(1, start_ns=step(0).start_ns + 10**15)
    model = lanes_of(hello(0), hello(1, boot_id="other"), shadow(0), later)
    rows = paint_lanes(model, WIDTH, 8)
    assert not model.aligned
    assert where(rows, 2, "forward") == where(rows, 5, "forward") == list(range(2, 30))
    assert "clocks differ" in plain(rows)[0]


def test_ranks_on_different_clocks_are_aligned_by_their_collectives():
    """Bucket 0 takes 10 ms from launch to done on either rank, so the offset is known to 10 ms."""
    later = step(1, start_ns=step(0).start_ns + 10**15)
    model = lanes_of(hello(0), hello(1, boot_id="other"), step(0), later)
    rows = paint_lanes(model, WIDTH, 8)
    assert model.aligned
    assert [abs(lane.offset_ns) < 0.1 * MS for lane in model.lanes] == [True, True]
    assert ", clocks ±10" in plain(rows)[0]


def test_completion_not_measured_leaves_only_launch_marks():
    rows = paint_lanes(lanes_of(hello(0, 1), step(0, comm_done=[None, None])), WIDTH, 5)
    assert where(rows, 3, "launch") == [50, 51, 70, 71]
    assert where(rows, 3, "comm-a", "comm-b", "exposed") == []


def test_no_bucket_at_all():
    empty = {f"comm_{name}": [] for name in ("module", "label", "bytes", "ready", "launch", "done")}
    rows = paint_lanes(lanes_of(hello(0, 1), step(0, **empty)), WIDTH, 5)
    assert where(rows, 3, "comm-a", "comm-b", "exposed", "launch") == []


def test_overlapping_buckets_get_a_row_each():
    model = lanes_of(hello(0, 1), step(0, comm_launch=[50 * MS, 55 * MS]))
    rows = paint_lanes(model, WIDTH, 6)
    assert model.comm_rows == 2
    assert where(rows, 3, "comm-a") == list(range(50, 60))
    assert where(rows, 4, "comm-b") == list(range(55, 80))


def test_overlapping_buckets_share_one_row_where_there_is_no_other():
    rows = paint_lanes(lanes_of(hello(0, 1), step(0, comm_launch=[50 * MS, 55 * MS])), WIDTH, 5)
    assert where(rows, 3, "comm-a", "comm-b") == list(range(50, 80))


def test_a_short_bucket_and_a_short_exposure_still_show():
    rows = paint_lanes(lanes_of(hello(0, 1), step(0, comm_launch=[50 * MS, 89_999_000])), 40, 5)
    assert COMM["exposed"] in plain(rows)[3]


def test_one_row_per_rank_shows_launches_and_exposure():
    model = lanes_of(*run(3, world=8))
    rows = paint_lanes(model, 4 + 100 + 1, 10)
    assert lane_rows(model, 8) == LaneRows(0, 1, 0, 0)
    line = cells(rows, 1)[4:]
    assert [x for x, (char, _) in enumerate(line) if char == "▾"] == [50, 70]
    assert [x for x, (_, style) in enumerate(line) if style == "exposed"] == list(range(80, 90))


@pytest.mark.parametrize(
    ("ranks", "height", "rows"),
    [(2, 30, LaneRows(1, 3, 1, 1, 2)), (2, 10, LaneRows(1, 1, 1, 1)), (4, 14, LaneRows(1, 1, 1, 0)),
     (4, 10, LaneRows(0, 1, 1, 0)), (64, 20, LaneRows(0, 1, 0, 0))],
)  # fmt: skip
def test_lanes_are_compressed_as_ranks_grow(ranks, height, rows):
    assert lane_rows(lanes_of(*run(2, world=ranks)), height - 2) == rows


def test_scrolling_shows_other_ranks_and_stops_at_the_last():
    model = lanes_of(*run(2, world=64))
    assert capacity(model, 12) == 10
    assert plain(paint_lanes(model, 60, 12, first=20))[1].startswith("20")
    assert plain(paint_lanes(model, 60, 12, first=999))[10].startswith("63")
    assert "ranks 54–63 of 64" in plain(paint_lanes(model, 60, 12, first=999))[0]


def test_status_and_missing_ranks_are_named():
    model = lanes_of(hello(0), hello(1), step(0, 3, status="warmup"), number=3)
    assert model.status == "warm-up"
    assert model.missing == (1,)
    assert "step 3 (warm-up), 1 missing" in plain(paint_lanes(model, 120, 8))[0]


def test_stamps_outside_the_step_stay_on_the_axis():
    wild = step(0, comm_launch=[-50 * MS, 70 * MS], comm_done=[60 * MS, 5000 * MS], hook_ns=[-1, 10**15, 0, 1])
    rows = paint_lanes(lanes_of(hello(0, 1), wild), WIDTH, 5)
    assert all(sum(len(text) for text, _ in row) == WIDTH for row in rows)


def test_axis_snaps_to_cells():
    axis = Axis(10, 50, 100)
    assert axis.span(0, 100) == (10, 60)
    assert axis.span(50, 50) == (35, 36)
    assert axis.span(100, 200) == (59, 60)


@pytest.mark.parametrize(("length", "ticks", "step_ms"), [(110, 7, 20), (0.3, 5, 0.1), (9000, 4, 5000), (100, 10, 10)])
def test_axis_steps_are_round(length, ticks, step_ms):
    assert nice_step(length, ticks) == pytest.approx(step_ms)
