"""The Timeline shown's model: window arithmetic, and the exact values under the cursor."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.tui.models.lanes import step_lanes
from ddpwatch.tui.models.timeline import Cursor, Inspection, Window, inspect, timeline_of_seconds, timeline_of_step
from ddpwatch.tui.paint.canvas import plain
from ddpwatch.tui.paint.timeline import paint_timeline, ranks_in_view, timeline_axis
from ddpwatch.wire.messages import Mark
from tests.support.frames import MS, START_NS, bare, hello, layout, run, state_of, step, synchronous


def timeline(messages, number=None):
    state = state_of(list(messages))
    shown = state.newest_step() if number is None else state.steps[number]
    return timeline_of_step(shown, step_lanes(shown, state.ranks, 1, None, state.marks)), state


def text(fields):
    return " | ".join(field.full for field in fields)


class TestWindow:
    @given(st.integers(1, 10**9), st.lists(st.tuples(st.sampled_from("+-<>"), st.floats(0, 1)), max_size=30))
    def test_it_never_leaves_the_step(self, axis, moves):
        window = Window.all_of(axis)
        for move, share in moves:
            at = window.start_ns + int(share * window.length_ns)
            window = (
                window.pan(share if move == ">" else -share)
                if move in "<>"
                else window.zoom(2.0 if move == "+" else 0.5, at)
            )
            assert window.start_ns >= 0
            assert 0 < window.length_ns <= axis
            assert window.start_ns + window.length_ns <= axis

    def test_zoom_keeps_the_cursor_where_it_is(self):
        window = Window.all_of(100 * MS).zoom(2, 40 * MS)
        assert (window.start_ns, window.length_ns) == (20 * MS, 50 * MS)
        assert window.zoom(0.5, 40 * MS) == Window.all_of(100 * MS)

    def test_on_another_step_it_stays(self):
        window = Window.all_of(100 * MS).zoom(4, 50 * MS)
        assert window.fitted(90 * MS).start_ns == window.start_ns
        assert Window.all_of(100).fitted(90) == Window.all_of(90)
        assert window.showing(0).start_ns == 0


class TestInspection:
    def test_everything_under_the_cursor(self):
        model, state = timeline([hello(0), hello(1), layout(0), step(0), step(1, late_ms=10)])
        found = inspect(model, Cursor(85 * MS, 0, 60 * MS), state.layouts)
        assert text(found.position) == (
            "rank 0 at 85.0 ms | waits for its buckets 80.0–90.0 ms (10.0 ms) | gradient of a ready at 70.0 ms"
        )
        assert text(found.bucket) == (
            "bucket 1 | 4.0 MiB | ready 70.0 | launch 70.0 | done 90.0 ms | waited 10.0 ms for rank 1 | exposed 10.0 ms"
        )
        assert found.params == "2 parameters: a, b"
        assert found.measured == "measured 25.0 ms from 60.0 ms"

    def test_how_much_of_the_exposed_time_was_a_wait(self):
        """Rank 0 computes until 80, rank 1 launches at 82, all is done at 102."""
        model, state = timeline([hello(0), hello(1), *next(synchronous([[0, 12]]))])
        bucket = text(inspect(model, Cursor(85 * MS, 0), state.layouts).bucket)
        assert "waited 12.0 ms for rank 1 | exposed 22.0 ms, 2.0 of it waiting" in bucket
        last = text(inspect(model, Cursor(95 * MS, 1), state.layouts).bucket)
        assert "waited 0.0 ms, launched last | exposed 10.0 ms" in last
        assert "of it waiting" not in last

    def test_on_different_clocks_nobody_is_waited_for_within_the_error(self):
        """Transfers of 20 ms bound the offset to 10 ms either way."""
        for late_ms, waited in ((8, "waited – |"), (12, "waited 12.0 ms for rank 1 |")):
            ranks = next(synchronous([[0, late_ms]]))
            model, state = timeline([hello(0), hello(1, boot_id="other"), *ranks])
            found = text(inspect(model, Cursor(85 * MS, 0), state.layouts).bucket)
            assert waited in found
            assert f"exposed {late_ms + 10:.1f} ms" in found

    def test_where_nothing_is(self):
        model, state = timeline([hello(0, 1), step(0)])
        assert "idle" in text(inspect(model, Cursor(1 * MS, 0), state.layouts).position)
        assert text(inspect(model, Cursor(40 * MS, 0), state.layouts).bucket) == "no bucket in flight"
        assert inspect(model, Cursor(), state.layouts) == Inspection()

    def test_completion_not_measured(self):
        model, state = timeline([hello(0, 1), step(0, comm_done=[None, None])])
        assert "done – ms" not in text(inspect(model, Cursor(75 * MS, 0), state.layouts).bucket)
        assert "exposed –" in text(inspect(model, Cursor(75 * MS, 0), state.layouts).bucket)

    def test_a_bare_step_is_not_idle(self):
        model, state = timeline([hello(0, 1), bare(0)])
        found = inspect(model, Cursor(40 * MS, 0), state.layouts)
        assert "not watched" in text(found.position)
        assert found.bucket == ()
        rows = plain(paint_timeline(model, Window.all_of(model.length_ns), Cursor(), Inspection(), (111, 16), 0))
        assert "(duration only)" in rows[0]
        assert any("not watched" in row for row in rows)
        assert not any("··" in row for row in rows)

    def test_a_mark_is_drawn_and_named(self):
        start = START_NS + 20 * MS
        marks = [
            Mark(rank=0, name="eval\x1b[2J", start_ns=start),
            Mark(rank=0, kind="gc", name="gc", start_ns=start + 30 * MS, end_ns=start + 40 * MS),
            Mark(rank=0, kind="save", name="torch.save", start_ns=start + 50 * MS, end_ns=start + 60 * MS),
        ]
        model, state = timeline([hello(0, 1), step(0), *marks])
        assert "◆ eval[2J" in text(inspect(model, Cursor(20 * MS + 1, 0), state.layouts).position)
        rows = plain(paint_timeline(model, Window.all_of(model.length_ns), Cursor(0, 0), Inspection(), (111, 16), 0))
        assert "◆eval[2J" in rows[1]
        assert rows[1][10 + 50 :].startswith("◆gc╌")
        assert rows[1][10 + 70 :].startswith("◆torch.save")


class TestSeconds:
    def test_the_last_seconds_of_several_steps(self):
        state = state_of(run(30))
        model = timeline_of_seconds(list(state.steps.values()), 0.55, [0, 1], 1)
        assert [shown.step for shown in model.steps] == [24, 25, 26, 27, 28, 29]
        assert model.length_ns == 600 * MS
        assert [lane.offset_ns for lane in model.lanes_of(1)] == [n * 100 * MS for n in range(6)]
        assert inspect(model, Cursor(250 * MS, 1), state.layouts).position[0].full == "rank 1 at 250 ms"


class TestPaint:
    @pytest.mark.parametrize("size", [(0, 0), (0, 9), (1, 1), (5, 3), (20, 6), (80, 20), (200, 46)])
    @pytest.mark.parametrize("density", [0, 1, 2])
    def test_every_size_to_the_cell(self, size, density):
        for world in (1, 8, 64):
            model, state = timeline(run(3, world=world))
            cursor = Cursor(50 * MS, 0, 20 * MS)
            window = Window.all_of(model.length_ns).zoom(8, 50 * MS)
            rows = paint_timeline(model, window, cursor, inspect(model, cursor, state.layouts), size, 0, density)
            assert [sum(len(run_text) for run_text, _ in row) for row in rows] == [size[0]] * size[1]

    def test_a_zoomed_window_shows_its_part_only(self):
        model, _ = timeline([hello(0, 1), step(0)])
        window = Window(40 * MS, 20 * MS, model.length_ns)
        rows = plain(paint_timeline(model, window, Cursor(45 * MS, 0), Inspection(), (111, 16), 0))
        assert "forward" not in rows[2] + rows[3]
        assert "backward" in rows[2] + rows[3]
        assert "40–60" in rows[0].replace(".0", "")
        axis = timeline_axis(model, window, 111)
        assert axis.cell(45 * MS) == 10 + 25
        assert axis.time(axis.cell(45 * MS)) == pytest.approx(45 * MS, abs=0.2 * MS)

    def test_the_legend_names_whom_the_ranks_wait_for(self):
        model, _ = timeline([hello(0), hello(1), *next(synchronous([[0, 12]]))])
        for density in range(3):
            rows = plain(
                paint_timeline(model, Window.all_of(model.length_ns), Cursor(), Inspection(), (160, 16), 0, density)
            )
            assert "╲╲ waits for rank 1" in rows[0]

    def test_many_ranks_are_as_many_as_fit(self):
        model, _ = timeline(run(2, world=64))
        assert ranks_in_view(model, 46) * 3 <= 40 + 3
        assert ranks_in_view(model, 46, density=2) == 40

    def test_stamps_outside_the_step(self):
        wild = step(0, comm_launch=[-50 * MS, 70 * MS], comm_done=[60 * MS, 5000 * MS], hook_ns=[-1, 10**15, 0, 1])
        later = msgspec.structs.replace(step(1), start_ns=step(0).start_ns + 10**15)
        for messages in ([hello(0, 1), wild], [hello(0), hello(1, boot_id="x"), wild, later]):
            model, _ = timeline(messages)
            rows = paint_timeline(model, Window.all_of(model.length_ns), Cursor(0, 0), Inspection(), (80, 16), 0)
            assert all(sum(len(part) for part, _ in row) == 80 for row in rows)


def test_the_cursors_label_leaves_no_part_of_the_axiss_numbers():
    model, _ = timeline(run(3))
    everything = Window.all_of(model.length_ns)

    def axis_line(at_ns):
        rows = plain(paint_timeline(model, everything, Cursor(at_ns, 0), Inspection(), (80, 24), 0))
        return next(row for row in rows if "▲" in row)

    lines = [axis_line(model.length_ns * cell // 140) for cell in range(140)]
    numbers = {number for line in (lines[0], lines[-1]) for number in re.findall(r"╵([\d.]+)", line)}
    for line in lines:
        assert set(re.findall(r"╵([\d.]+)", line)) <= numbers
        assert not re.search(r"\d", re.sub(r"╵[\d.]+|▲[\d.]+ ms", "", line))
