"""Every view and every key, by Pilot, on synthetic frames."""

import base64
import json
import re
from pathlib import Path

import pytest
from textual import events
from textual.command import CommandList
from textual.widgets import Static
from textual.widgets._toast import Toast

from ddpwatch.tui.screens import HELP, SIGNS, AskScreen, HelpScreen
from ddpwatch.tui.settings import Settings
from ddpwatch.tui.views import VIEWS
from ddpwatch.wire.messages import Mark, Step
from tests.support.dashboards import (
    FakeJobs,
    app_on,
    body,
    ended_recording,
    live_app,
    replay_app,
    screen_text,
    until,
    watching,
)
from tests.support.frames import MS, START_NS, bare, beat, bye, device, hello, killed, run, step

KEYS = {view.NAME: key for key, view in VIEWS.items()}


def whose(text):
    """A body without the words on what costs and shares are of: the run so far, or the recording."""
    return re.sub(r"of the (run so far|recording) *| {2,}", " ", re.sub("(cost|lost) (so far|in all)", r"\1", text))


class TestEveryView:
    async def test_takes_every_key_and_every_size(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press(*VIEWS)  # before the first frame
            await watching(pilot, [*run(12, world=3, late_rank=1), device(0), device(1, 70.0, "cuda")])
            for key in VIEWS:
                await pilot.press(key, "j", "k", "m", "v", "s", "o", "T", "pagedown")
                assert app.view is app.views.by_key[key]
                await pilot.press("enter", "j", "escape")
                for size in ((5, 3), (1, 1), (200, 50), (80, 24)):
                    await pilot.resize_terminal(*size)
                    await pilot.pause()
                    assert len(screen_text(app).splitlines()) == size[1]

    async def test_draws_a_bare_step(self):
        app = app_on()
        frames = [m for m in run(40) if not (isinstance(m, Step) and m.step % 4 == 3)]
        async with app.run_test(size=(120, 36)) as pilot:
            await watching(pilot, [*frames, *(bare(rank, n) for n in range(3, 40, 4) for rank in (0, 1))])
            for key in VIEWS:
                await pilot.press(key, "space", "left", "left", "left", "left", "left", "m", "m", "m", "m", "m")
                app.session.select(27)
                await pilot.press("r", "r", "j", "enter")
                assert app.view is app.views.by_key[key]
                await pilot.press("escape", "end")
            assert app.is_running

    @pytest.mark.parametrize("key", VIEWS)
    async def test_pause_freezes_it_and_the_stream_goes_on(self, key):
        app = app_on()
        async with app.run_test(size=(120, 36)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            await pilot.press(key, "space")
            await until(pilot, lambda: not app.view.pending)
            frozen = body(app)
            app.jobs.sources["run-1"].put([step(rank, n) for n in range(20, 60) for rank in (0, 1)])
            app.jobs.sources["run-1"].put([killed(1, 59)])
            await until(pilot, lambda: len(app.session.state.steps) == 60 and app.session.state.ends)
            assert body(app) == frozen
            await pilot.press("space")
            assert body(app) != frozen

    async def test_a_replay_looks_the_same(self):
        messages = [*run(20, late_rank=1), device(0)]
        live, replayed = app_on(), replay_app(messages, every_ms=1)
        async with live.run_test(size=(120, 36)) as pilot:
            await watching(pilot, messages)
            drawn = {key: await self.drawn(pilot, key) for key in VIEWS}
        async with replayed.run_test(size=(120, 36)) as pilot:
            await pilot.press("full_stop")
            await until(pilot, lambda: replayed.session.over and replayed.session.whole.ready)
            assert {key: await self.drawn(pilot, key) for key in VIEWS} == drawn

    async def drawn(self, pilot, key):
        await pilot.press(key)
        await until(pilot, lambda: not pilot.app.view.pending)
        text = re.sub(
            r"next: (key x|run the job with DDPWATCH_EXPLAIN=first-incident: that) (.*?) *$",
            r"next: \2",
            body(pilot.app),
            flags=re.M,
        )
        return whose(text)  # a recording's ranks cannot be asked

    async def test_hostile_names_reach_no_cell(self):
        evil = "\x1b[2J\x07\r\n\u202ex\u200b\x9b模e\u0301" * 20
        names = dict.fromkeys(("run_id", "host", "backend", "torch", "module", "script", "timing_source"), evil)
        sample, death = device(0), bye(1, "exception", detail=evil, phase=evil)
        sample.name = sample.host = evil
        mark = Mark(rank=0, name=evil, start_ns=START_NS + 20 * MS)
        frames = [hello(0, 2, **names), hello(1, 2, **names), step(0), step(1), sample, mark, beat(0, 1, evil), death]
        app = app_on()
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, frames)
            for key in VIEWS:
                for keys in ([key], ["enter"], ["A"], ["A", "escape"]):
                    await pilot.press(*keys)
                    assert all(line.isprintable() for line in screen_text(app).splitlines())

    async def test_the_header_names_a_torch_that_is_not_tested(self):
        app = app_on()
        async with app.run_test(size=(200, 30)) as pilot:
            await watching(pilot, [hello(0, 1, torch="99.1.0"), step(0)])
            assert "torch 99.1.0, newer than" in screen_text(app)

    async def test_a_replay_has_keys_of_its_own(self):
        live, replayed = app_on(), replay_app(run(12))
        async with live.run_test(size=(200, 30)) as pilot:
            await watching(pilot, run(12))
            bar = screen_text(live).splitlines()[-1]
            assert "speed" not in bar
            assert "runs" in bar
        async with replayed.run_test(size=(200, 30)) as pilot:
            await until(pilot, lambda: "speed" in screen_text(replayed).splitlines()[-1])
            assert replayed.check_action("runs", ()) is False

    async def test_keys_are_named_if_their_names_fit(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            for width, bar in ((80, "8 What if ?     "), (40, "8   ?  help       "), (100, " ?  help   ")):
                await pilot.resize_terminal(width, 24)
                await until(pilot, lambda bar=bar: screen_text(app).splitlines()[-1].endswith(bar))

    async def test_the_keys_below_a_view_are_those_that_work_in_it(self):
        app = app_on()
        async with app.run_test(size=(200, 30)) as pilot:
            await watching(pilot, run(12))
            for key, named in (("2", "m  measure"), ("4", "m  metric"), ("7", "m  next list"), ("1", "←→  step")):
                await pilot.press(key)
                await until(pilot, lambda named=named: named in screen_text(app).splitlines()[-1])

    async def test_a_click_on_a_key(self):
        app = app_on()
        async with app.run_test(size=(200, 30)) as pilot:
            await watching(pilot, run(12))
            await until(pilot, lambda: "pause" in screen_text(app).splitlines()[-1])
            x = screen_text(app).splitlines()[-1].index("pause")
            await pilot.click(offset=(x + 2, 29))
            await until(pilot, lambda: app.session.paused)

    async def test_a_click_on_a_tab(self):
        app = app_on()
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, run(12))
            x = screen_text(app).splitlines()[-1].index("3 Collectives")
            await pilot.click(offset=(x + 2, 29))
            await until(pilot, lambda: app.view is app.views.collectives)

    @pytest.mark.parametrize("view", VIEWS.values())
    def test_the_help_page_fits_on_80_columns(self, view):
        lines = f"{HELP}{view.DEFINITIONS}\n{SIGNS}".splitlines()
        assert max(len(re.sub(r"\[/?b\]|\\", "", line)) for line in lines) <= 72

    async def test_help_is_about_the_view(self):
        app = app_on()
        async with app.run_test(size=(100, 40)) as pilot:
            for name in ("Overview", "Collectives", "Log"):
                await pilot.press(KEYS[name], "question_mark")
                assert isinstance(app.screen, HelpScreen)
                assert name in app.export_screenshot()
                await pilot.press("escape")

    async def test_help_scrolls_and_view_keys_lead_out_of_it(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("question_mark", "j")
            box = app.screen.query_one("#help")
            assert box.scroll_y == 1
            await pilot.press(*"k" * 2, *"j" * 40)
            assert box.scroll_y == box.max_scroll_y > 1
            assert "Esc closes" in str(box.border_subtitle)
            await pilot.press(KEYS["Collectives"])
            assert not isinstance(app.screen, HelpScreen)
            assert app.view is app.views.collectives


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """The folder for what leaves the dashboard; nothing else is written, the working directory included."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "state/ddpwatch/saved"
    assert not list((tmp_path / "here").iterdir())


class TestEverywhere:
    async def test_filter(self):
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(12, world=8))
            await pilot.press("slash", *"2-3,7", "enter")
            assert "2-3,7: 3 shown" in screen_text(app)
            assert [row.rank for row in app.session.overview.ranks] == [2, 3, 7]
            await pilot.press("2")
            assert app.view.timeline().ranks == [2, 3, 7]
            await pilot.press("slash", *["backspace"] * 5, "enter")
            assert len(app.session.overview.ranks) == 8
            await pilot.press("slash", *"rank:1", "enter")  # no rank, state or host: it is asked for again
            await until(pilot, lambda: isinstance(app.screen, AskScreen))
            assert "rank:1 is not understood; show: ranks (0-7,12)" in str(app.screen.query_one(Static).render())
            await pilot.press("escape")
            assert len(app.session.overview.ranks) == 8
            await pilot.press("slash", "x", "escape")
            assert not isinstance(app.screen, AskScreen)
            assert len(app.session.overview.ranks) == 8

    async def test_a_filter_without_a_match_is_refused_with_what_there_is(self):
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(12, world=8))
            await pilot.press("slash", *"99", "enter")
            await until(pilot, lambda: isinstance(app.screen, AskScreen))
            asked = str(app.screen.query_one(Static).render())
            assert "99 selects no rank; show: there are ranks 0–7, states running, hosts node1" in asked
            await pilot.press("escape")
            assert len(app.session.overview.ranks) == 8

    async def test_a_filter_that_selects_no_rank_of_another_run(self):
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(12, world=2))
            app.session.filter = "99"
            app.tick()
            for key in VIEWS:
                await pilot.press(key)
                app.view.scroll_ranks(1)
                assert "0 shown" in screen_text(app)

    @pytest.mark.parametrize("size", [(80, 24), (120, 36)])
    async def test_messages_leave_the_table_of_ranks_alone(self, size):
        app = app_on()
        async with app.run_test(size=size, notifications=True) as pilot:
            await watching(pilot, run(12, late_rank=1))
            before = screen_text(app).splitlines()
            app.notify("copied")
            await until(pilot, lambda: app.screen.query(Toast))
            await pilot.pause()
            table = next(y for y, text in enumerate(before) if text.startswith(" rank  "))
            covered = app.screen.query_one(Toast).region
            assert covered.area
            assert not set(range(covered.y, covered.bottom)) & set(range(table, table + 3))

    async def test_follow_the_slowest_rank(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12, world=64, late_rank=50))
            assert re.search(r"^ +50◀ running", screen_text(app), re.MULTILINE)  # the worst comes first
            assert not re.search(r"^ +49 ", screen_text(app), re.MULTILINE)
            await pilot.press("f")
            assert re.search(r"^ +49 .*\n +50◀ running", screen_text(app), re.MULTILINE)
            await pilot.press("2")
            assert "rank 50 at" in body(app) or "r50 " in body(app)

    async def test_the_rank_that_the_verdict_names_is_in_sight_until_another_one_is_selected(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12, world=64, late_rank=50))
            await pilot.press("2")
            assert "rank 50 at" in body(app)
            await pilot.press("4", "v", "enter")
            assert " rank 50 on node1" in body(app)
            await pilot.press("escape", "k", "enter")
            assert " rank 49 on node1" in body(app)
            await pilot.press("2")
            assert "rank 49 at" in body(app)

    async def test_copy_is_what_the_terminal_is_sent(self, monkeypatch):
        app = app_on()
        sent = []
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            monkeypatch.setattr(app._driver, "write", sent.append)
            await pilot.press("y")
            await pilot.pause()
        copied = re.search(r"\x1b\]52;c;([A-Za-z0-9+/=]+)\a", "".join(sent))
        assert copied is not None
        assert base64.b64decode(copied[1]).decode().startswith("rank 1 is late by 40 ms in each step: its backward")

    async def test_a_picture_is_saved_in_the_state_directory(self, saved, monkeypatch):
        app = app_on()
        notices = []
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12))
            monkeypatch.setattr(app, "notify", lambda text, **_: notices.append(text))
            await pilot.press("P")
            (picture,) = saved.glob("ddpwatch-run-1-*.svg")
            assert "<svg" in picture.read_text()
        assert notices == [f"saved {picture}"]

    async def test_the_step_shown_is_exported(self, saved):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("E")
            mark = Mark(rank=0, name="evaluate", start_ns=START_NS + 9 * 100 * MS + 20 * MS)
            await watching(pilot, [*run(12), mark])
            await pilot.press("left", "left", "E")
            await until(pilot, lambda: not app.workers)
            trace = json.loads((saved / "ddpwatch-run-1-step9.json").read_text())
            await pilot.press("right", "E")
            await until(pilot, lambda: len(list(saved.iterdir())) == 2 and not app.workers)
            assert "evaluate" not in (saved / "ddpwatch-run-1-step10.json").read_text()
        names = {(event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] != "M"}
        assert {(0, "step 9"), (1, "step 9"), (0, "bucket 1"), (0, "evaluate"), (1, "d")} <= names
        assert not any(event["name"] == "step 8" for event in trace["traceEvents"])

    @pytest.mark.parametrize("key", ["P", "E"])
    async def test_what_cannot_be_saved_is_one_line(self, key, monkeypatch):
        app = app_on()
        notices = []
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12))
            monkeypatch.setattr(app, "_file", lambda end: Path("/proc/none") / end)
            monkeypatch.setattr(app, "notify", lambda text, **_: notices.append(text))
            await pilot.press(key)
            await until(pilot, lambda: notices)
        assert notices == ["not saved: /proc/none: No such file or directory"]

    async def test_the_command_palette(self):
        app = app_on()
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("colon", *"view: ranks")
            found = app.screen.query_one(CommandList)
            await until(pilot, lambda: found.option_count and "Ranks" in str(found.get_option_at_index(0).prompt))
            await pilot.press("down", "enter")
            await until(pilot, lambda: app.view is app.views.ranks)

    async def test_ascii_draws_nothing_else(self):
        app = app_on(settings=Settings(theme="none", ascii=True))
        async with app.run_test(size=(140, 40)) as pilot:
            await watching(pilot, [*run(20, late_rank=1), device(0)])
            for key in VIEWS:
                await pilot.press(key)
                assert screen_text(app).isascii()

    async def test_the_wheel_and_a_click_select(self):
        app = app_on()
        async with app.run_test(size=(140, 40)) as pilot:
            await watching(pilot, run(20, world=4))
            await pilot.press("4")
            await pilot.click(offset=(30, 8))
            first = app.session.rank
            wheel = {"x": 5, "y": 10, "delta_x": 0, "button": 0, "shift": False, "meta": False, "ctrl": False}
            app.view.post_message(events.MouseScrollDown(app.view, delta_y=1, **wheel))
            await pilot.pause()
            assert app.session.rank == first + 1


class TestAfterTheRun:
    async def test_the_last_run_is_shown_until_one_starts(self, tmp_path):
        jobs, ended = FakeJobs(), ended_recording(tmp_path / "old-run.mcap", [*run(20), bye(0), bye(1), bye()])
        app = live_app(jobs, list_ended=lambda: [ended], wall=lambda: ended.stat().st_mtime + 190)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: "LAST RUN, ended 3 min ago" in screen_text(app))
            await until(pilot, lambda: "step 19" in screen_text(app))
            assert app.view.stale
            await pilot.press("2", "left")
            jobs.start("run-1").put(list(run(12)))
            await until(pilot, lambda: " LIVE " in screen_text(app))
            assert "LAST RUN" not in screen_text(app)

    async def test_ended_runs_can_be_chosen(self, tmp_path):
        first = ended_recording(tmp_path / "first.mcap", [*run(20), killed(), bye(None, "killed")])
        jobs = FakeJobs("run-1")
        app = live_app(jobs, list_ended=lambda: [first])
        app.jobs = jobs
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("a", "down", "enter")
            await until(pilot, lambda: "LAST RUN, killed" in screen_text(app))
            await pilot.press("a", "enter")
            jobs.sources["run-1"].put(list(run(12)))
            await until(pilot, lambda: " LIVE " in screen_text(app))

    async def test_one_that_cannot_be_read_is_passed_over(self, tmp_path):
        broken = tmp_path / "broken.mcap"
        broken.write_bytes(b"nonsense")
        app = live_app(FakeJobs(), list_ended=lambda: [broken])
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: "looking in /run/ddpwatch" in screen_text(app))
            assert app.failure is None
