"""The view of collectives, by Pilot."""

import re

from ddpwatch.wire.messages import BucketLayout, Layout
from tests.support.dashboards import app_on, body, watching
from tests.support.frames import hello, light, run, step


def layout(module: int, names: list[str], base: int) -> Layout:
    buckets = [BucketLayout(0, 1 << 20, [0, 1])]
    return Layout(rank=0, module=module, epoch=2, params=names, param_base=base, buckets=buckets)


class TestCollectives:
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

    async def test_a_narrow_line_says_what_transfers_reach_and_cuts_no_word(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, [*run(20, late_rank=1), layout(0, ["", "blocks.9.attention.weight"], 0)])
            await pilot.press("3")
            (note,) = (line for line in body(app).splitlines() if "Enter: " in line)
            assert re.fullmatch(r" bucket 0: .+  1.0 MiB at \S+ GB/s  Enter: details", note.rstrip())

    async def test_completions_are_those_of_full_steps_however_long_ago(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, [hello(0, world=1), step(0, 1), step(0, 2), *(light(0, n) for n in range(3, 90))])
            await pilot.press("3")
            assert [row.done is not None for row in app.view.rows()] == [True, True]

    async def test_of_two_modules_each_bucket_has_its_own_parameters(self):
        app = app_on()
        two = [layout(0, ["gen.a", "gen.b"], 0), layout(1, ["disc.a", "disc.b"], 2)]
        steps = [step(0, n, comm_module=[0, 1], comm_label=[0, 0]) for n in range(3)]
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, [hello(0, world=1), *two, *steps])
            await pilot.press("3")
            assert [row.module for row in app.view.rows()] == [0, 1]
            assert "gen.a" in body(app)
            await pilot.press("down")
            assert "bucket 1:0: disc.a" in body(app)
            await pilot.press("enter")
            assert "bucket 1:0: 4.0 MiB, 2 parameters" in body(app)
            assert "disc.b" in body(app)
            assert "gen." not in body(app)
