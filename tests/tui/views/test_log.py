"""The log's view, and what a job prints in it, by Pilot."""

import re
from itertools import chain

from ddpwatch.wire.messages import Bye
from tests.support.dashboards import FakeJobs, app_on, body, live_app, screen_text, until, watching
from tests.support.frames import MS, bye, run, synchronous


class TestLog:
    async def test_an_incident_starts_and_ends_and_leads_to_its_step(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            await pilot.press("7")
            assert re.search(r"● straggler +1 +backward b +1–", body(app))
            assert "of the 19 steps that were timed" in body(app)
            hidden = list(synchronous([(0, 0)] * 110, 20, start_ms=20 * 140, comm_done=[60 * MS, 80 * MS]))
            app.jobs.sources["run-1"].put(chain.from_iterable(hidden[:70]), 10)
            await until(pilot, lambda: app.session.overview.verdict.kind != "straggler")
            app.jobs.sources["run-1"].put(chain.from_iterable(hidden[70:]), 50)
            await until(pilot, lambda: "✓ straggler" in body(app))
            assert "attached" not in body(app)
            assert re.search(
                r"straggler, over, steps 1–\d+: cost 0\.\d+ process-seconds, \d\.\d % of all ranks' time", body(app)
            )
            cost = re.search(r"cost (\S+) process-seconds", body(app))[1]  # its share falls as the run goes on
            await pilot.press("m")
            assert re.search(rf"step 19 +ended: rank 1 was late by 40 ms in each step: .*; cost {cost}", body(app))
            assert "cleared" not in body(app)
            assert len(re.findall("rank 1 (?:is|was) late", body(app).partition("attached")[2])) == 2  # start and end
            await pilot.press("m", "m", "enter")
            assert app.view is app.views.timeline
            assert app.session.paused
            assert "step 1 " in body(app)

    async def test_a_view_that_was_hidden_shows_the_step_chosen_meanwhile(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            await pilot.press("2", "space", "7", "m")
            app.view.chosen = 1
            await pilot.press("up")
            chosen = app.view.current.step
            await pilot.press("enter")
            assert chosen not in (None, 19)
            assert f"step {chosen}" in body(app)

    async def test_a_step_that_did_not_end_leads_to_the_last_that_did(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            kill = Bye(rank=1, by="collector", reason="killed", signal=9, at_ns=1, step=20, phase="backward")
            await watching(pilot, [*run(20), kill])
            await pilot.press("7")
            assert " death " in body(app)
            await pilot.press("enter")
            assert "step 19 " in body(app)
            said = [str(note.message) for note in app._notifications]
            assert said == ["step 20 did not end, so it has no timeline: this is step 19"]

    async def test_the_job_s_output(self, output_buffer):
        output_buffer.add_block(b"loss 3.2\n\x1b[31mloss 3.1\nunfinished")
        app = app_on(output=output_buffer)
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, run(3))
            await pilot.press("7", "m")
            await until(pilot, lambda: "loss 3.1" in body(app))
            assert "incidents 0   events and incidents 4   the job's output 3" in body(app)
            output_buffer.add_block(b" no more\n")
            await until(pilot, lambda: "unfinished no more" in body(app))
            await pilot.press("space")
            output_buffer.add_block(b"later\n")
            await until(pilot, lambda: "later" in app.session.output.lines[-1].text)
            assert "later" not in body(app)

    async def test_output_is_shown_before_the_run_starts_and_is_kept_then(self, output_buffer):
        output_buffer.add_block(b"downloading\n")
        jobs = FakeJobs()
        app = live_app(jobs, job="torchrun train.py", output=output_buffer)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: "torchrun train.py" in screen_text(app))
            await pilot.press("7")
            await until(pilot, lambda: "downloading" in screen_text(app))
            jobs.start("run-1").put(list(run(3)))
            await until(pilot, lambda: "rank 0 attached" in screen_text(app))
            await pilot.press("m")
            assert "downloading" in body(app)

    async def test_output_after_the_end_of_the_run(self, output_buffer):
        app = app_on(output=output_buffer)
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, [*run(3), bye(0), bye(1), bye()])
            await until(pilot, lambda: app.session.over)
            output_buffer.add_block(b"saved the model\n")
            await until(pilot, lambda: app.session.output.lines)
