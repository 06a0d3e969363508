"""Exact cells for steps of known geometry: at 100 columns of axis, one cell is one millisecond."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.tui.models.lanes import picked, step_lanes
from ddpwatch.tui.paint import palette
from ddpwatch.tui.paint.ascii import ascii_text
from ddpwatch.tui.paint.axis import Axis, nice_step
from ddpwatch.tui.paint.canvas import plain
from ddpwatch.tui.paint.glyphs import COMM, PHASES
from ddpwatch.tui.paint.lanes import LaneRows, capacity, lane_rows, paint_lanes
from ddpwatch.tui.views.painted import PaintedView
from tests.support.frames import MS, hello, light, run, state_of, step, synchronous

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
    later = light(1, start_ns=step(0).start_ns + 10**15)
    model = lanes_of(hello(0), hello(1, boot_id="other"), light(0), later)
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


def halves(rows, y, left):
    """Row y's cells as (upper, lower)."""
    return [tuple(style.split("/")) if "/" in style else (style, "none") for _, style in cells(rows, y)[left:]]


def test_one_row_per_rank_shows_compute_and_communication():
    model = lanes_of(*run(3, world=8))
    rows = paint_lanes(model, 4 + 100 + 1, 10)
    assert lane_rows(model, 8) == LaneRows(0, 1, 0, 0)
    line = halves(rows, 1, 4)
    for phase, expected in (("forward", range(2, 30)), ("backward", range(31, 80)), ("optimizer", range(91, 95))):
        assert [x for x, (upper, _) in enumerate(line) if upper == phase] == list(expected)
    for style, expected in (("comm-a", range(50, 60)), ("comm-b", range(70, 80)), ("exposed", range(80, 90))):
        assert [x for x, (_, lower) in enumerate(line) if lower == style] == list(expected)


def test_one_row_per_rank_shows_launches_where_nothing_else_is_known():
    ranks = [step(rank, 0, comm_done=[None, None]) for rank in range(8)]
    rows = paint_lanes(lanes_of(*(hello(rank, 8) for rank in range(8)), *ranks), 4 + 100 + 1, 10)
    assert [x for x, (char, _) in enumerate(cells(rows, 1)[4:]) if char == "▸"] == [50, 70]
    assert "▸ launch" in plain(rows)[0]
    assert "communication" not in plain(rows)[0]


class TestWaiting:
    def test_a_bucket_waits_for_the_last_rank_then_transfers(self):
        """Rank 1 launches bucket 1 at 82; rank 0 launched it at 70 and computes until 80."""
        rows = paint_lanes(lanes_of(hello(0), hello(1), *next(synchronous([[0, 12]]))), 9 + 112 + 1, 8)
        assert where(rows, 3, "waits") == list(range(70, 80))
        assert where(rows, 3, "waits-exposed") == [80, 81]
        assert where(rows, 3, "exposed") == list(range(82, 102))
        assert where(rows, 6, "waits", "waits-exposed") == []
        assert "╲╲ waits for rank 1" in plain(rows)[0]

    def test_a_wide_wait_is_labelled(self):
        rows = plain(paint_lanes(lanes_of(hello(0), hello(1), *next(synchronous([[0, 60]]))), 9 + 160 + 1, 8))
        assert "1 waits for rank 1" in rows[3]

    def test_a_wait_shorter_than_half_a_cell_is_not_drawn(self):
        ranks = [step(0), step(1, start_ns=step(0).start_ns + 400_000)]
        rows = paint_lanes(lanes_of(hello(0), hello(1), *ranks), WIDTH, 8)
        assert where(rows, 3, "waits", "waits-exposed") == []

    def test_on_different_clocks_nobody_is_waited_for_within_the_error(self):
        """Transfers of 20 ms bound the offset to 10 ms either way."""
        for late_ms, known in ((8, False), (12, True)):
            model = lanes_of(hello(0), hello(1, boot_id="other"), *next(synchronous([[0, late_ms]])))
            rows = paint_lanes(model, WIDTH, 8)
            assert bool(where(rows, 3, "waits", "waits-exposed")) == known
            assert ("waits for rank 1" in plain(rows)[0]) == known
            assert ("waits" in plain(rows)[0]) == known

    def test_in_one_row_a_wait_is_on_top_of_an_earlier_transfer(self):
        """Bucket 0 travels from 50 to 95; bucket 1, launched at 70, waits until 82 and travels until 102."""
        ranks = next(synchronous([[0, 12]], comm_done=[95 * MS, 102 * MS]))
        rows = paint_lanes(lanes_of(hello(0), hello(1), *ranks), 4 + 112 + 1, 4)
        lower = [below for _, below in halves(rows, 1, 4)]
        assert [x for x, style in enumerate(lower) if style == "waits"] == list(range(70, 80))
        assert [x for x, style in enumerate(lower) if style == "waits-exposed"] == [80, 81]
        assert [x for x, style in enumerate(lower) if style == "comm-a"] == list(range(50, 70))

    def test_the_legend_names_whom_most_waits_are_for(self):
        ranks = next(synchronous([[0, 3, 12]]))
        ranks[1].comm_launch[0] = 53 * MS
        messages = [*(hello(rank, 3) for rank in range(3)), *ranks]
        assert "waits, mostly for rank 2" in plain(paint_lanes(lanes_of(*messages), 200, 20))[0]


@pytest.mark.parametrize("height", [5, 20])
def test_the_legend_lists_only_what_is_drawn(height):
    empty = {f"comm_{name}": [] for name in ("module", "label", "bytes", "ready", "launch", "done")}
    messages = [hello(0), hello(1), *(step(rank, 0, data=None, **empty) for rank in range(2))]
    title = plain(paint_lanes(lanes_of(*messages), 200, height))[0]
    assert title.split("step 0")[1].split() == (
        ["▒▒", "forward", "▓▓", "backward", "░░", "optimizer"] + (["⡇", "gradient", "ready"] if height > 5 else [])
    )


MOMENTS = st.lists(st.integers(-5, 110), min_size=1, max_size=5)
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=5)


def crowd(launches, lengths, late):
    """A step of two ranks whose buckets overlap; the second launches each bucket later."""
    n = len(launches)
    columns = {"comm_module": [0] * n, "comm_label": list(range(n)), "comm_bytes": [1] * n, "comm_ready": [None] * n}
    at = [sorted(launches)[i] * MS for i in range(n)]
    done = [at[i] + (late[i % len(late)] + lengths[i % len(lengths)]) * MS for i in range(n)]
    other = [at[i] + late[i % len(late)] * MS for i in range(n)]
    return [step(r, 0, **columns, comm_launch=launch, comm_done=done) for r, launch in enumerate((at, other))]


def rasterised(lane, axis):
    """Each cell of a dense row as (upper, lower), from the plain rules."""

    def cell(ns):
        return round((ns - axis.start_ns) * (axis.width / axis.length_ns))

    def covers(x, start, end):
        first = min(max(cell(start), 0), axis.width - 1)
        seen = start < axis.start_ns + axis.length_ns and end >= axis.start_ns
        return seen and first <= x < min(max(cell(end), first + 1), axis.width)

    for x in range(axis.width):
        upper, lower = "idle", "none"
        for phase, start, end in lane.stretches():
            if phase != "sync" and covers(x, lane.offset_ns + start, lane.offset_ns + end):
                upper = phase
        shown = [bar for bar in lane.bars if covers(x, bar.start, bar.end)]
        long = [bar for bar in shown if bar.transfer - bar.start >= axis.length_ns / axis.width / 2]
        if any(x < cell(bar.transfer) for bar in long):
            lower = "waits"
        elif shown:
            lower = "comm-b" if shown[0].position % 2 else "comm-a"
        exposed = any(covers(x, lane.offset_ns + a, lane.offset_ns + b) for a, b in lane.figures.exposed)
        yield upper, {"waits": "waits-exposed", "none": "none"}.get(lower, "exposed") if exposed else lower


@given(MOMENTS, LENGTHS, LENGTHS, st.integers(20, 200))
def test_dense_cells_are_those_of_the_plain_rules(launches, lengths, late, width):
    model = lanes_of(hello(0), hello(1), *crowd(launches, lengths, late))
    rows = paint_lanes(model, 4 + width + 1, 4)
    axis = Axis(4, width, model.length_ns)
    for y, lane in enumerate(model.lanes, start=1):
        assert halves(rows, y, 4)[:width] == list(rasterised(lane, axis))


@pytest.mark.parametrize("theme", palette.SCHEMES)
def test_what_cells_show_differs_in_every_theme(theme):
    """By colour where there is one, by glyph in any case, also in ASCII."""
    glyphs = {**{name: COMM[name] for name in ("comm-a", "waits", "exposed", "waits-exposed")}, **PHASES}
    assert len(set(glyphs.values())) == len({ascii_text(glyph) for glyph in glyphs.values()}) == len(glyphs)
    if palette.SCHEMES[theme] is not None:
        styles = palette.styles(theme=theme)
        assert len({styles[name].bgcolor.name for name in COMM} - {"default"}) == len(COMM)
        assert styles["backward/waits"].color == styles["backward"].bgcolor
        assert styles["backward/waits"].bgcolor == styles["waits"].bgcolor


@pytest.mark.parametrize(("theme", "ascii_only", "shown"), [("dark", 0, "▀▀"), ("none", 0, "╲╲"), ("dark", 1, "\\\\")])
def test_half_cells_need_colour_and_half_blocks(theme, ascii_only, shown):
    class View(PaintedView):
        def paint(self, width, height):
            return [[("╲╲", "idle/waits-exposed")]]

    view = View()
    view.apply_theme(theme, bool(ascii_only))
    view.repaint()
    assert view.render_line(0).text == shown


@pytest.mark.parametrize(
    ("ranks", "height", "rows"),
    [(2, 30, LaneRows(1, 3, 1, 1, 2)), (2, 10, LaneRows(1, 1, 1, 1)), (4, 14, LaneRows(1, 1, 1, 0)),
     (4, 10, LaneRows(0, 1, 1, 0)), (64, 20, LaneRows(0, 1, 0, 0))],
)  # fmt: skip
def test_lanes_are_compressed_as_ranks_grow(ranks, height, rows):
    assert lane_rows(lanes_of(*run(2, world=ranks)), height - 2) == rows


@pytest.mark.parametrize(
    ("named", "peers", "room", "shown"),
    [
        ([41], (), 6, [41, 0, 11, 23, 34, 47]),
        ([41], (40, 41, 42, 43), 6, [41, 0, 40, 42, 43, 47]),
        ([40, 41, 42, 43], (), 4, [40, 41, 42, 0]),
        ([*range(40, 48)], (), 12, [*range(40, 48), 0, 13, 26, 39]),
        ([41], (), 1, [41]),
        ([99], (), 6, []),
        ([], (), 6, []),
    ],
)
def test_of_many_ranks_those_are_picked_that_the_verdict_names_and_some_to_compare_them_with(named, peers, room, shown):
    assert picked(range(48), named, peers, room) == shown


def test_the_rank_that_the_verdict_names_is_shown_first_if_not_all_fit():
    model = lanes_of(*run(2, world=48))
    rows = plain(paint_lanes(model, 60, 8, named=[41], peers=range(48)))
    assert rows[0].startswith(" step 1, rank 41 and 5 of 47 others ")
    assert [row.split()[0] for row in rows[1:7]] == ["41", "0", "11", "23", "34", "47"]
    assert "others" not in plain(paint_lanes(model, 60, 60, named=[41]))[0]


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
