"""The view of buckets, by Pilot."""

from tests.support.dashboards import app_on, body, watching
from tests.support.frames import hello, run, shadow, step


class TestBuckets:
    async def test_sorted_by_any_column_and_drilled_into(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            await pilot.press("3")
            assert "bucket▼" in body(app)
            assert [row.index for row in app.view.rows()] == [0, 1]
            await pilot.press("s")
            assert [row.index for row in app.view.rows()] == [1, 0]
            await pilot.press("o")
            assert [row.index for row in app.view.rows()] == [0, 1]
            await pilot.press("down", "enter")
            assert "bucket 1: 4.0 MiB, 2 parameters" in body(app)
            fired = [line.split() for line in body(app).splitlines()[-25:] if line.strip().endswith((" a", " b"))]
            assert fired == [["0", "29.0", "1", "b"], ["1", "39.0", "0", "a"]]
            await pilot.press("escape")
            assert "bytes▼" in body(app)

    async def test_completions_are_those_of_full_steps_however_long_ago(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, [hello(0, world=1), step(0, 1), step(0, 2), *(shadow(0, n) for n in range(3, 90))])
            await pilot.press("3")
            assert [row.done is not None for row in app.view.rows()] == [True, True]
