"""The Timeline: cursor, zoom, jumps, seconds and clicks, by Pilot."""

from itertools import chain

from ddpwatch.wire.messages import Step
from tests.support.dashboards import app_on, body, watching
from tests.support.frames import MS, run, synchronous


class TestTimeline:
    async def test_cursor_zoom_pan_and_measure(self):
        app = app_on()
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("2", "space")
            assert "rank 0 at 50.0 ms" in body(app)
            await pilot.press("m", "right", "right", "l", "shift+right")
            assert "measured 13.0 ms from 50.0 ms" in body(app)
            assert "rank 0 at 63.0 ms" in body(app)
            await pilot.press("plus", "plus")
            assert app.view.window.length_ns == 25 * MS
            await pilot.press("H")
            assert app.view.window.start_ns < 63 * MS - 12 * MS
            await pilot.press("0", "m", "j")
            assert not app.view.window.zoomed
            assert "measured" not in body(app)
            assert "rank 1 at" in body(app)

    async def test_jumps(self):
        late = [(80, 80), *([(0, 0)] * 17), (300, 300), *([(0, 0)] * 9)]
        messages = [*run(12), *chain.from_iterable(synchronous(late, 12, statuses={12: "aborted"}))]
        app = app_on()
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, messages)
            await pilot.press("2", "S")
            assert "step 30" in body(app)
            await pilot.press("N")
            assert "step 12 (aborted)" in body(app)
            await pilot.press("n")
            assert "step 30" in body(app)
            await pilot.press("g", "7", "enter")
            assert "step 7" in body(app)
            assert app.session.paused

    async def test_rolling_seconds(self):
        app = app_on()
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, run(60))
            await pilot.press("2", "r")
            assert "steps 30–59, 3.0 s" in body(app)
            await pilot.press("r")
            assert "the last" not in body(app)

    async def test_a_pause_before_the_first_step_shows_none(self):
        app = app_on()
        first = list(run(3))
        known = [message for message in first if not isinstance(message, Step)]
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, known)
            await pilot.press("2", "r", "space")
            await watching(pilot, [message for message in first if isinstance(message, Step)])
            assert "no step" in body(app)
            await pilot.press("r")
            assert "no step" in body(app)
            await pilot.press("space")
            assert "step 2" in body(app)

    async def test_a_click_sets_the_cursor(self):
        app = app_on()
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("2")
            await pilot.click(offset=(10 + 72, 10))
            assert "at 72.5 ms" in body(app)
