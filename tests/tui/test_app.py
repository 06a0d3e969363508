import threading
from functools import partial

import pytest
from textual import events
from textual.geometry import Size
from textual.widgets import OptionList

from ddpwatch.errors import UsageError
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import FrameList, ReplaySpec
from ddpwatch.tui.feed import events as posted
from ddpwatch.tui.runs import RunPicker, RunsApp
from ddpwatch.tui.screens import HelpScreen
from tests.support.dashboards import Clock, FakeJobs, FakeSource, live_app, replay_app, screen_text, until
from tests.support.frames import bye, device, enveloped, hello, killed, run, step


def attached(app, frames=1):
    return lambda: app.session.state.frames >= frames


async def watching(pilot, jobs, messages=None):
    """Attaches to run-1 and applies a complete run."""
    messages = list(run(20)) if messages is None else messages
    jobs.sources["run-1"].put(messages)
    await until(pilot, attached(pilot.app, len(messages)))


class TestLive:
    async def test_waits_attaches_ends_and_attaches_again(self):
        jobs = FakeJobs()
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "looking in /run/ddpwatch" in screen_text(app))
            assert "WAITING" in screen_text(app)
            jobs.start("run-1")
            await watching(pilot, jobs)
            assert " LIVE " in screen_text(app)
            assert "rank 1" in screen_text(app)
            jobs.sources["run-1"].put([bye(0), bye(1), bye()])
            await until(pilot, lambda: "ENDED: finished" in screen_text(app))
            assert "step 19" in screen_text(app)
            jobs.end("run-1")
            jobs.start("run-2").put([hello(0, 1, run_id="run-2"), step(0, 3)])
            await until(pilot, lambda: "run-2" in screen_text(app))
            assert "ENDED" not in screen_text(app)
            assert list(app.session.state.steps) == [3]

    async def test_a_collector_that_falls_silent_is_gone_and_comes_back(self):
        jobs, clock = FakeJobs("run-1"), Clock()
        app = live_app(jobs, clock)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            clock.now += 6
            app.tick()
            assert "COLLECTOR GONE" in screen_text(app)
            assert app.view.stale
            jobs.sources["run-1"].put([step(0, 20)])
            await until(pilot, lambda: " LIVE " in screen_text(app))

    async def test_a_killed_rank(self):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs, [*run(20), killed()])
            assert "rank 1 was killed (SIGKILL) at step 39 in backward, bucket 1 in flight" in screen_text(app)
            assert "ended: killed SIGKILL" in screen_text(app)

    async def test_pause_freezes_the_view_not_the_stream(self):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            await pilot.press("space")
            jobs.sources["run-1"].put([step(rank, number) for number in range(20, 30) for rank in (0, 1)])
            await until(pilot, lambda: len(app.session.state.steps) == 30)
            shown = screen_text(app)
            assert "PAUSED" in shown
            assert "step 19 of 29 (paused)" in shown
            await pilot.press("space")
            assert "step 29" in screen_text(app)
            assert "paused" not in screen_text(app)

    @pytest.mark.parametrize(
        ("back", "forward"), [("left", "right"), ("h", "l"), ("left_square_bracket", "right_square_bracket")]
    )
    async def test_steps_back_and_forward(self, back, forward):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            await pilot.press(back, back, back)
            assert "step 16 of 19 (paused)" in screen_text(app)
            await pilot.press(forward)
            assert "step 17 of 19 (paused)" in screen_text(app)
            await pilot.press(forward, forward, forward, forward)
            assert "step 19 of 19 (paused)" in screen_text(app)

    async def test_home_and_end(self):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            await pilot.press("home")
            assert "step 0 of 19 (paused)" in screen_text(app)
            assert "step 0 (warm-up)" in screen_text(app)
            await pilot.press("left")
            assert "step 0 of 19 (paused)" in screen_text(app)
            await pilot.press("end")
            assert "paused" not in screen_text(app)

    async def test_keys_do_nothing_bad_before_the_first_frame(self):
        app = live_app(FakeJobs())
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("left", "right", "home", "end", "space", "space", "j", "k", "plus", "minus", "full_stop")
            assert app.is_running

    async def test_ranks_scroll_by_key_and_wheel(self):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs, list(run(3, world=64)))
            view = app.view
            await pilot.press("j", "down", "j", "k")
            assert view.first_rank == 2
            await pilot.press(*["pagedown"] * 9)
            assert "63" in screen_text(app)
            await pilot.press(*["pageup"] * 9, "up")
            assert view.first_rank == 0
            wheel = {"x": 5, "y": 10, "delta_x": 0, "button": 0, "shift": False, "meta": False, "ctrl": False}
            view.post_message(events.MouseScrollDown(view, delta_y=1, **wheel))
            await pilot.pause()
            assert view.first_rank == 1
            view.post_message(events.MouseScrollUp(view, delta_y=-1, **wheel))
            await pilot.pause()
            assert view.first_rank == 0

    async def test_of_many_ranks_the_late_one_is_shown_until_the_user_scrolls(self):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs, list(run(20, world=48, late_rank=41)))
            assert "rank 41 is" in screen_text(app)
            assert ", rank 41 and " in screen_text(app)
            await pilot.press("j")
            assert ", ranks 0–" in screen_text(app)
            await pilot.press("j", "k", "k")
            assert ", rank 41 and " in screen_text(app)

    async def test_help_opens_and_closes(self):
        app = live_app(FakeJobs())
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("question_mark")
            assert isinstance(app.screen, HelpScreen)
            await pilot.press("escape")
            assert not isinstance(app.screen, HelpScreen)

    async def test_several_runs_offer_a_choice(self):
        jobs = FakeJobs("run-1", "run-2")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: isinstance(app.screen, RunPicker))
            assert app.session.name == "run-2"
            listed = app.screen.query_one(OptionList)

            def prompt():
                return str(listed.get_option_at_index(1).prompt) if listed.option_count == 2 else ""

            await until(pilot, lambda: "✗ run-1 is slow" in prompt())
            assert "12.5" in prompt()
            await pilot.press("down", "enter")
            await until(pilot, lambda: app.session.name == "run-1")
            await pilot.press("a")
            assert isinstance(app.screen, RunPicker)
            await pilot.press("escape")
            assert app.session.name == "run-1"
            assert jobs.sources["run-2"].closed

    async def test_the_screen_of_all_runs_follows_them_and_gives_the_chosen_one(self):
        jobs = FakeJobs("run-1", "run-2")

        def look(note):
            if not jobs.runs:
                note("lost: no route")
            return [jobs.look_at(run) for run in jobs.runs]

        app = RunsApp(look, "dark", every_s=0.01)
        async with app.run_test(size=(80, 24)) as pilot:
            listed, below = app.query_one(OptionList), app.query_one("#below")

            async def shown(what):
                while not what():
                    await pilot.pause(0.01)

            await shown(lambda: listed.option_count == 2)
            await pilot.press("down")
            jobs.start("run-3")
            await shown(lambda: listed.option_count == 3)
            assert listed.highlighted == 2  # still run-1
            jobs.runs, kept = [], jobs.runs
            await shown(lambda: "no route" in str(below.render()))
            jobs.runs = kept
            await shown(lambda: listed.option_count == 3)
            await pilot.press("down", "enter")
            await pilot.pause()
        assert app.return_value.run_id == "run-2"

    async def test_resizing_repaints(self):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs, [*run(20), device(0), device(1)])
            for size in ((200, 50), (20, 6), (5, 3), (1, 1), (120, 36)):
                await pilot.resize_terminal(*size)
                await pilot.pause()
                tabs = size[1] >= 4  # a row below the view
                assert app.view.size == Size(size[0], size[1] - tabs)
                assert len(screen_text(app).splitlines()) == size[1]
            assert "where a step goes" in screen_text(app)

    async def test_nothing_is_painted_twice(self):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            before = app.session.overview
            app.tick()
            assert app.session.overview is before


class TestQuit:
    @pytest.mark.parametrize("key", ["q", "ctrl+c"])
    async def test_leaves_and_closes_the_source(self, key):
        jobs = FakeJobs("run-1")
        app = live_app(jobs)
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            await pilot.press(key)
        assert app.return_code == 0
        app.feed.join(60)
        assert jobs.sources["run-1"].closed

    async def test_does_not_wait_for_a_source_that_hangs(self):
        released, source = threading.Event(), FakeSource()

        def hang(timeout_s, limit):
            released.wait(60)
            return []

        source.read = hang
        app = live_app(FakeJobs("run-1"), open_source=lambda _: source)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.session.name == "run-1")
            await pilot.press("q")
        assert app.return_code == 0
        assert app.feed._thread.is_alive()
        released.set()
        app.feed.join(60)
        assert source.closed

    @pytest.mark.parametrize("key", ["question_mark", "a"])
    async def test_ctrl_c_leaves_from_any_screen(self, key):
        app = live_app(FakeJobs())
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press(key, "ctrl+c")
            await pilot.pause()
            assert not app.is_running or app._exit

    @pytest.mark.parametrize(
        ("keys", "interrupted"),
        [(["q"], 0), (["ctrl+c"], 0), (["q", "ctrl+c"], 1), (["ctrl+c"] * 3, 0), (["ctrl+c", "q"], 0)],
    )
    async def test_ctrl_c_after_q_is_the_jobs(self, keys, interrupted):
        jobs, calls = FakeJobs("run-1"), []
        app = live_app(jobs, interrupt=partial(calls.append, "interrupted"))
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            for key in keys:  # all of them before the app takes the first
                app.post_message(events.Key(key, None))
            await until(pilot, lambda: app._exit)
        assert len(calls) == interrupted
        assert app.return_code == 0

    async def test_ctrl_c_of_a_dashboard_that_breaks_is_not_the_jobs(self):
        jobs, calls = FakeJobs("run-1"), []
        app = live_app(jobs, interrupt=partial(calls.append, "interrupted"))
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            app.action_interrupt()
            app.take_event(posted.Failed(UsageError("cut")))
            await until(pilot, lambda: app._exit)
        assert not calls

    async def test_ctrl_c_leaves_though_what_has_the_focus_is_closing(self, monkeypatch):
        jobs, calls = FakeJobs("run-1"), []
        app = live_app(jobs, interrupt=partial(calls.append, "interrupted"))
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, jobs)
            with monkeypatch.context() as closing:
                closing.setattr(app.focused or app.screen, "post_message", lambda message: False)
                app.action_interrupt()
            assert app._exit
        assert not calls

    async def test_a_feed_that_breaks_ends_the_app_with_its_error(self):
        class Broken(FrameList):
            def select(self, selection):
                yield from super().select(selection)
                raise UsageError("cut")

        app = DashboardApp(ReplaySpec("x", Broken(enveloped([step(0)]))), ticking=False)
        async with app.run_test() as pilot:
            while app.failure is None:
                await pilot.pause(0.01)
        assert isinstance(app.failure, UsageError)
        assert app.return_code == 1


class TestReplay:
    async def test_to_the_end(self):
        app = replay_app([*run(20), bye(0), bye(1), bye()])
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, attached(app))
            assert "REPLAY 1×" in screen_text(app)
            await pilot.press("full_stop")
            await until(pilot, lambda: app.session.over)
            assert "REPLAY ENDED: finished" in screen_text(app)
            assert "step 19" in screen_text(app)
            assert not app.view.stale

    async def test_time_passes_at_the_speed_chosen(self):
        clock = Clock()
        app = replay_app([step(0, number) for number in range(100)], clock, every_ms=1000)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, attached(app))
            clock.now += 5
            await until(pilot, attached(app, 6))
            await pilot.press("plus", "plus")
            assert "REPLAY 4×" in screen_text(app)
            clock.now += 5
            await until(pilot, attached(app, 26))
            assert app.session.state.frames == 26

    async def test_pause_holds_the_recording_and_end_plays_the_rest(self):
        clock = Clock()
        app = replay_app([step(0, number) for number in range(100)], clock, every_ms=1000)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, attached(app))
            await pilot.press("space")
            await until(pilot, clock.advance(50))
            assert "REPLAY 1× PAUSED" in screen_text(app)
            assert app.session.state.frames == 1
            await pilot.press("end")
            await until(pilot, lambda: app.session.over)
            assert app.session.state.frames == 100
