"""The view that compares with a recording, and what is behind it."""

import os
import re
import threading
from itertools import count

import pytest
from textual.widgets import Input

from ddpwatch.analysis.compare import RunSeries, changes, compare
from ddpwatch.analysis.step import PHASES
from ddpwatch.cli import main
from ddpwatch.errors import UsageError
from ddpwatch.tui.app import run_dashboard
from ddpwatch.tui.feed import AttachSpec
from ddpwatch.tui.models import compare as compare_model
from ddpwatch.tui.models.compare import RANK_STEPS_PER_CALL, CompareModel, LiveSeries, setups
from ddpwatch.tui.paint.compare import paint_compare
from ddpwatch.wire.messages import Status
from tests.support.dashboards import app_on, ended_recording, screen_text, until, watching
from tests.support.frames import hello, light, run, state_of, step


@pytest.fixture
def baseline(tmp_path):
    return ended_recording(tmp_path / "good.mcap", run(60))


async def compared(pilot):
    await until(pilot, lambda: pilot.app.views.compare.baseline.result and not pilot.app.views.compare.pending)
    return " ".join(screen_text(pilot.app).split())


async def asked_for(pilot, path):
    await pilot.press("b")
    await answered(pilot, path)


async def answered(pilot, path):
    pilot.app.screen.query_one(Input).value = str(path)
    await pilot.press("enter")


class TestView:
    async def test_a_slower_run_is_distinguished_from_its_baseline(self, baseline):
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(40, late_rank=1))
            await pilot.press("6")
            assert "b asks for a recording" in screen_text(app)
            await asked_for(pilot, baseline)
            shown = await compared(pilot)
        assert "this run is 40.0 % slower than good" in shown
        assert "step ms 100 140 +40.0 ▲ +40.0 … +40.0" in shown
        assert "backward 49.0 69.0 +20.0 ▲" in shown
        assert "forward 28.0 28.0 +0.0 +0.0 … +0.0" in shown
        assert re.search(r"overlap 67 % \d+ % −\d+ pts ▼", shown)

    async def test_without_a_baseline_it_offers_the_recordings_here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for age, name in enumerate(("own.mcap", "new.mcap", "old.mcap", "other.txt")):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (1000 - age, 1000 - age))
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, [*run(40), Status(at_ns=0, frames=0, bytes=0, recording=str(tmp_path / "own.mcap"))])
            await pilot.press("6")
            shown = " ".join(screen_text(app).split())
            assert "newest first; b takes one of them, or the path of another new.mcap old.mcap" in shown
            assert "other.txt" not in shown
        rows = paint_compare(CompareModel(directory="/data/runs"), 80, 10)
        painted = "".join(text for row in rows for text, _ in row)
        assert "no other recording (*.mcap) in /data/runs: b takes a path elsewhere, too" in painted

    async def test_the_answer_follows_the_run(self, baseline):
        app = app_on(baseline=baseline)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("6")
            await watching(pilot, run(10))
            await until(pilot, lambda: "9 of the 20 steps that a verdict needs" in screen_text(app))
            app.jobs.sources["run-1"].put([step(rank, n) for n in range(10, 300) for rank in (0, 1)], every_ms=20)
            await until(pilot, lambda: "no difference between good and this run" in screen_text(app))
            await pilot.press("space")
            assert "this run (200)" in await compared(pilot)

    async def test_the_views_do_not_wait_for_a_slow_baseline(self, baseline, monkeypatch):
        released, reading = threading.Event(), threading.Event()

        class Slow(compare_model.Recording):
            def select(self, selection):
                reading.set()
                for number, frame in enumerate(super().select(selection)):
                    assert number < 50 or released.wait(60)
                    yield frame

        monkeypatch.setattr(compare_model, "Recording", Slow)
        app = app_on(baseline=baseline)
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(40))
            assert reading.wait(60)
            await pilot.press("6")
            await until(pilot, lambda: "reading good: " in screen_text(app))
            await pilot.press("2")
            assert app.view is app.views.timeline
            released.set()
            await pilot.press("6")
            assert "no difference between good and this run" in await compared(pilot)

    @pytest.mark.parametrize("made", ["missing", "nonsense", "empty"])
    async def test_a_bad_file_is_one_clear_line(self, made, tmp_path):
        path = tmp_path / "bad.mcap"
        if made == "nonsense":
            path.write_bytes(b"nonsense")
        if made == "empty":
            ended_recording(path, [hello(0)])
        app = app_on()
        async with app.run_test(size=(160, 40)) as pilot:
            await watching(pilot, run(40))
            await pilot.press("6")
            await asked_for(pilot, path)
            await until(pilot, lambda: app.views.compare.baseline and app.views.compare.baseline.failure)
            app.tick()
            (line,) = [line for line in screen_text(app).splitlines() if "bad.mcap" in line]
            assert line.lstrip().startswith("✗ ")
            assert "b takes another file" in " ".join(screen_text(app).split())

    async def test_no_name_of_a_file_is_drawn_as_it_is(self, tmp_path):
        path = ended_recording(tmp_path / "run.mcap", run(40)).rename(tmp_path / "\x1b[2J[bold]\u202e.mcap")
        app = app_on(baseline=path)
        async with app.run_test(size=(200, 40)) as pilot:
            await watching(pilot, run(40))
            await pilot.press("6")
            await compared(pilot)
            await asked_for(pilot, tmp_path / "none\x1b[2J[bold].mcap")
            await until(pilot, lambda: app.views.compare.baseline and app.views.compare.baseline.failure)
            app.notify(f"not saved: {path}")
            app.tick()
            await pilot.pause()
            assert "[2J[bold]" in screen_text(app)
            assert not {"\x1b", "\u202e"} & set(screen_text(app))
            assert [str(note.message) for note in app._notifications] == [f"not saved: {tmp_path}/[2J[bold].mcap"]

    async def test_another_set_up_is_marked(self, tmp_path):
        other = ended_recording(tmp_path / "eight.mcap", run(30, world=8))
        app = app_on(baseline=other)
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(40))
            await pilot.press("6")
            await compared(pilot)
            (row,) = [row for row in app.view._rows if "".join(text for text, _ in row).startswith(" ranks")]
            assert "not the same set-up: ranks 8 and 2" in " ".join(screen_text(app).split())
            assert [text.split() for text, style in row if style == "warn"]

    async def test_from_the_palette(self, baseline):
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(40))
            await app.run_action("baseline")
            await pilot.pause()
            await answered(pilot, baseline)
            assert "no difference" in await compared(pilot)
            assert app.view is app.views.compare

    def test_a_bad_baseline_is_named_before_anything_is_drawn(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DDPWATCH_DIR", str(tmp_path))
        with pytest.raises(UsageError, match=r"none\.mcap"):
            run_dashboard(AttachSpec(), baseline=tmp_path / "none.mcap")

    @pytest.mark.parametrize("verb", [[], ["attach"], ["replay", "x.mcap"]])
    def test_without_a_dashboard_there_is_nothing_to_compare_with(self, verb, baseline, monkeypatch, capsys):
        verb = [str(baseline) if word == "x.mcap" else word for word in verb]
        monkeypatch.setattr("sys.argv", ["ddpwatch", *verb, "--plain", "--baseline", str(baseline)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        assert "--baseline needs the dashboard" in capsys.readouterr().err

    def test_before_a_command_it_is_refused(self, baseline, monkeypatch, capsys):
        monkeypatch.setattr("sys.argv", ["ddpwatch", "--baseline", str(baseline), "replay", str(baseline)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        assert "--baseline comes before replay, which ignores it there" in capsys.readouterr().err

    @pytest.mark.parametrize("size", [(1, 1), (5, 3), (30, 10), (80, 19), (200, 46)])
    def test_any_size(self, size):
        rows = paint_compare(CompareModel(name="x" * 50, reading=3), *size)
        assert len(rows) == size[1]


class TestLiveSeries:
    def test_each_step_once_and_a_bounded_number_at_once(self):
        state = state_of(run(100, world=64))
        views, live, calls = list(state.steps.values()), LiveSeries(), count(1)
        while not live.update(views, 64):
            assert next(calls) * RANK_STEPS_PER_CALL <= 100 * 64
        assert live.update(views, 64)
        assert len(live.series.step) == 99  # without the warm-up
        assert next(calls) >= 100 * 64 // RANK_STEPS_PER_CALL - 1

    def test_a_step_that_a_rank_has_not_sent_waits(self):
        state = state_of([*run(30), step(0, 30)])
        live = LiveSeries()
        assert live.update(list(state.steps.values()), 2)
        assert live.newest == 29

    def test_only_the_newest_are_kept(self):
        state, live = state_of(run(400)), LiveSeries()
        views = list(state.steps.values())
        live.update(views[:300], 2)
        live.update(views, 2)
        assert len(live.series.step) == 200


class TestChanges:
    @staticmethod
    def series(values, overlap=0.5):
        made = RunSeries("x", list(values), overlap=[overlap] * len(values))
        made.phases = {phase: [value / len(PHASES) for value in values] for phase in PHASES}
        return made

    def test_what_is_beyond_chance_is(self):
        noise = [(7 * n) % 11 - 5 for n in range(200)]
        a, b = self.series([100 + x for x in noise]), self.series([103 + x for x in noise], 0.4)
        found = changes(a, b)
        assert found["step"].certain
        assert found["step"].low < 3 < found["step"].high
        assert found["overlap"].certain
        assert found["overlap"].by == pytest.approx(-0.1)
        assert not found["data"].certain  # half a millisecond of a step of 100
        assert not any(change.certain for change in changes(a, a).values())

    def test_wider_with_more_noise(self):
        widths = []
        for size in (1, 4):
            noise = [size * ((7 * n) % 11 - 5) * (1 + n % 3) for n in range(200)]
            change = changes(self.series([100 + x for x in noise]), self.series([100 - x for x in noise]))["forward"]
            widths.append(change.high - change.low)
        assert widths[1] == pytest.approx(4 * widths[0])

    def test_what_is_exposed_is_taken_from_steps_with_timed_collectives_alone(self):
        light_steps = [light(r, n) for n in range(30, 90) for r in (0, 1)]
        made = RunSeries("x")
        for view in state_of([*run(30), *light_steps]).steps.values():
            made.add_step(view)
        assert (len(made.step), len(made.phases["forward"]), len(made.phases["exposed_comm"])) == (89, 89, 29)
        assert set(made.phases["exposed_comm"]) == {10.0}
        assert compare(made, made).verdict == "same"

    def test_too_few_steps(self):
        assert changes(self.series([1.0] * 19), self.series([1.0] * 50))["step"] is None


def test_setups_name_the_flags_that_differ():
    a, b = (
        hello(ddp={"bucket_cap_mb": 25, "static_graph": False}),
        hello(ddp={"bucket_cap_mb": 50, "static_graph": False}),
    )
    assert [row for row in setups(a, b) if row[1] != row[2]] == [("ddp bucket_cap_mb", "25", "50")]
    assert all(row[1] == "–" for row in setups(None, b))
