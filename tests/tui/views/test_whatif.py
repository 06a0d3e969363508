"""The view that predicts, and the thread behind it."""

import re
import threading

import pytest
from msgspec.structs import replace

from ddpwatch.common.text import three_digits
from ddpwatch.errors import UsageError
from ddpwatch.tui.feed.events import Attached
from ddpwatch.tui.models import whatif as model
from ddpwatch.tui.models.whatif import ASKED, MOST_RANKS, Predictor, WhatIfModel, no_gain_last, observed_in
from ddpwatch.tui.paint.whatif import paint_whatif
from ddpwatch.whatif import answer as answers
from ddpwatch.whatif.command import answer, recorded_in
from ddpwatch.whatif.summary import best, gain_text
from ddpwatch.whatif.wording import name_of, statement_of
from ddpwatch.wire.messages import Layout, Step
from tests.support.dashboards import app_on, ended_recording, screen_text, until, watching
from tests.support.frames import run, state_of, status
from tests.support.whatif import MadeUpJob

JOB = MadeUpJob(backend="gloo", steps=60)


@pytest.fixture(scope="module")
def messages():
    return list(JOB.messages())


async def predicted(pilot):
    await until(pilot, lambda: pilot.app.views.whatif._model != WhatIfModel() and not pilot.app.view.pending)
    return screen_text(pilot.app)


async def asked(pilot, messages):
    await watching(pilot, messages)
    await pilot.press("8")
    return " ".join((await predicted(pilot)).split())


class TestView:
    async def test_the_figures_are_those_of_the_command(self, messages, tmp_path):
        said = answer(recorded_in(ended_recording(tmp_path / "run.mcap", messages))[0], []).as_json()
        app = app_on()
        async with app.run_test(size=(200, 50)) as pilot:
            text = await asked(pilot, messages)
            assert f"{said['steps']} steps timed in full" in text
            assert f"measured {three_digits(said['replayed']['measured_ms'])} " in text
            for row in said["scenarios"]:
                interval = f"{gain_text(row['gain_low_ms'])} … {gain_text(row['gain_high_ms'])}".replace("-", "−")
                least = "≥" if row["kind"] == "bound" else ""
                start = re.escape(f"{row['change']} {least}{three_digits(row['step_ms'])} ")
                assert re.search(rf"{start}[+−≤][\d.]+ {re.escape(interval)}", text.replace(" ◀", "")), row["change"]
            of_code = [row for row in said["scenarios"] if row["change"].startswith(("bucket cap", "fp16", "bf16"))]
            best = max(of_code, key=lambda row: row["gain_low_ms"])
            interval = f"{gain_text(best['gain_low_ms'])} to {gain_text(best['gain_high_ms'])}"
            assert f"{best['change']} would gain {gain_text(best['gain_ms'])} ms a step ({interval}; " in text
            shown = sorted((row["change"] for row in said["scenarios"]), key=lambda change: text.rindex(f" {change} "))
            assert shown == [row["change"] for row in said["scenarios"]]
            assert f"{best['change']} ◀" in text
            found = list(app.views.whatif._model.answer.scenarios)
            none = replace(found[0], gain_ms=-0.004)
            assert no_gain_last([none, *found]) == [*found, none]
            assert best["why"] in text

    async def test_another_change_in_detail(self, messages):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await asked(pilot, messages)
            rows = app.views.whatif._model.answer.scenarios
            await pilot.press(*["up"] * len(rows))
            first = rows[0]
            assert f"{first.change}: {statement_of(first.code)}"[:70] in screen_text(app)
            await pilot.press(*["down"] * len(rows))
            text = screen_text(app)
            assert f"▶ {rows[-1].change}"[:20] in text

    async def test_a_small_terminal_shows_the_best_change_and_columns_stay_apart(self, messages):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await asked(pilot, messages)
            answer = app.views.whatif._model.answer
            chosen = best(answer.scenarios)
            assert " ◀ " in screen_text(app)
            wide = replace(chosen, step_ms=12345.6, gain_low_ms=-12345.6, gain_high_ms=-0.0082, gain_ms=0.0123)
            shown = [wide if found is chosen else found for found in answer.scenarios]
            (line,) = (
                text
                for row in paint_whatif(WhatIfModel(replace(answer, scenarios=shown)), 80, 24)
                if "12346" in (text := "".join(run for run, _ in row))
            )
            assert re.search(r" {2}12346 +\+0\.01 {2}−12346 … −0\.01 {2}", line)

    async def test_no_name_is_cut_in_a_small_terminal(self, messages):
        app = app_on()
        async with app.run_test(size=(80, 34)) as pilot:
            await asked(pilot, messages)
            names = [line[:26].strip() for line in screen_text(app).splitlines()]
            assert "any cap, hook or link" in names
            assert not [name for name in names if name.endswith("…")]
            assert "accumulation over 2" in names

    async def test_it_follows_the_run_but_not_more_than_every_few_seconds(self, messages, monkeypatch):
        clock = [100.0]
        monkeypatch.setattr("ddpwatch.tui.views.whatif.Predictor", lambda: Predictor(lambda: clock[0]))
        early = [m for m in messages if not isinstance(m, Step) or m.step < 30]
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            assert "18 steps timed in full" in await asked(pilot, early)
            await watching(pilot, [m for m in messages if isinstance(m, Step) and m.step >= 30])
            await pilot.pause()
            assert "18 steps timed in full" in await predicted(pilot)
            clock[0] += model.PAUSE_S
            await watching(pilot, [status()])
            await until(pilot, lambda: "48 steps timed in full" in screen_text(app))

    async def test_nothing_is_predicted_unless_the_view_is_shown(self, messages):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, messages)
            for key in "1234567":
                await pilot.press(key)
            assert not app.views.whatif.predictor._thread.is_alive()

    async def test_the_views_do_not_wait_for_a_prediction(self, messages, monkeypatch):
        released, predicting = threading.Event(), threading.Event()

        class Slow(answers.WhatIf):
            def ask(self, changes):
                predicting.set()
                assert released.wait(60)
                return super().ask(changes)

        monkeypatch.setattr(model, "WhatIf", Slow)
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, messages)
            await pilot.press("8")
            assert predicting.wait(60)
            app.tick()
            assert "predicting …" in screen_text(app)
            await pilot.press("2")
            assert app.view is app.views.timeline
            released.set()
            await pilot.press("8")
            assert "would gain" in await predicted(pilot)
            thread = app.views.whatif.predictor._thread
        thread.join(60)
        assert not thread.is_alive()

    async def test_the_answer_about_another_run_is_not_shown(self, messages):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            assert "would gain" in await asked(pilot, messages)
            app._attached(Attached("another"))
            assert app.views.whatif._model == WhatIfModel()
            await watching(pilot, list(JOB.but(steps=4).messages()))
            assert "and 5 are needed" in await predicted(pilot)

    @pytest.mark.parametrize(
        ("job", "line"),
        [
            (JOB.but(steps=4), "3 steps timed in full on all ranks, and 5 are needed"),
            (JOB.but(cap_mib=100), "only one bucket size was seen"),
            (JOB.but(ranks=1), "one rank alone has nothing to reduce"),
        ],
    )
    async def test_what_the_steps_do_not_carry(self, job, line):
        app = app_on()
        async with app.run_test(size=(160, 24)) as pilot:
            text = await asked(pilot, list(job.messages()))
            assert line in text
            assert "bucket cap 1" not in text

    async def test_sharded_parameters(self, messages):
        app = app_on()
        sharded = [replaced(m) if isinstance(m, Step) else m for m in messages]
        async with app.run_test(size=(160, 24)) as pilot:
            assert "this job uses FSDP2" in await asked(pilot, sharded)

    @pytest.mark.parametrize("size", [(1, 1), (5, 3), (30, 10), (80, 19), (200, 46)])
    def test_any_size(self, size, messages):
        predictor = Predictor()
        state = state_of(messages)
        found = WhatIfModel(predictor._answer(observed_in(state, state.steps.values())))
        for shown in (found, WhatIfModel(), WhatIfModel(failure="x" * 300)):
            assert len(paint_whatif(shown, *size)) == size[1]


def replaced(step):
    return replace(step, comm_op=["all_gather"] * len(step.comm_label))


class TestEvidence:
    def test_it_is_bounded_and_not_shared(self):
        state = state_of([*run(40, world=64)])
        found = observed_in(state, state.steps.values())
        assert len(found.steps) == ASKED.of(64) + 1  # and the warm-up
        mine = found.steps[-1]
        assert mine is not state.steps[mine.step]
        mine.unpack()
        assert mine.ranks == state.steps[mine.step].ranks
        for world, most in ((MOST_RANKS, ASKED.least + 1), (MOST_RANKS + 1, 0)):
            state = state_of([*run(12, world=world)])
            assert len(observed_in(state, state.steps.values()).steps) == most

    def test_too_many_ranks(self):
        state = state_of([*run(2, world=MOST_RANKS + 1)])
        with pytest.raises(UsageError, match="more than 256 ranks"):
            Predictor()._answer(observed_in(state, state.steps.values()))

    def test_old_steps_stay_packed_in_the_state(self, messages):
        state = state_of(messages)
        across = state.steps[20]
        across.pack()
        (copy,) = (step for step in observed_in(state, state.steps.values()).steps if step.step == 20)
        copy.unpack()
        assert all(isinstance(frame, bytes) for frame in across._frames.values())
        assert all(isinstance(frame, Step) for frame in copy._frames.values())

    def test_a_layout_of_any_rank_will_do(self, messages):
        state = state_of([m for m in messages if not (isinstance(m, Layout) and m.rank == 0)])
        names = [found.change for found in Predictor()._answer(observed_in(state, state.steps.values())).scenarios]
        assert name_of(answers.Change(cap_mib=1.0)) in names


async def test_frames_that_make_no_sense(messages, monkeypatch):
    def broken(_):
        raise ZeroDivisionError("at night")

    monkeypatch.setattr(model, "WhatIf", broken)
    app = app_on()
    async with app.run_test(size=(80, 24)) as pilot:
        assert "ZeroDivisionError: at night" in await asked(pilot, messages)
