"""The key that explains why a rank is late: what it asks the run, and the screen with the answer."""

import re

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.tui.feed.events import Attached
from ddpwatch.tui.screens import ExplainScreen, HelpScreen
from ddpwatch.wire.messages import RankSample
from tests.support.dashboards import Clock, app_on, body, replay_app, until, watching
from tests.support.frames import START_NS, beat, bye, run
from tests.support.sampled import a_pair
from tests.support.scenes import hang

GIB, SECOND = 1 << 30, 1_000_000_000  # bytes, ns
EXPOSED = KINDS["exposed_comm"].name
SAID = "rank 1 spends 60.4 ms more a step in augment() (data.py:88), in the forward of blocks.2"


def shown(app):
    """The lines on the screen in front; none if that is not the one meant."""
    return str(app.screen.query_one("#explain Static").render()).splitlines() if has_screen(app) else []


def has_screen(app):
    return isinstance(app.screen, ExplainScreen)


def answered(order):
    """What the ranks of the order would send."""
    pair = a_pair(order=order.number)
    for samples, rank in zip(pair, (order.rank, order.peer), strict=True):
        samples.rank, samples.order, samples.explained, samples.peer = rank, order.number, order.rank, order.peer
    return pair


@pytest.mark.parametrize(("size", "keys"), [((80, 24), "x"), ((200, 50), "4x"), ((80, 24), "7x")])
async def test_the_late_rank_is_sampled_and_explained(size, keys):
    app = app_on(clock=(clock := Clock()))
    async with app.run_test(size=size) as pilot:
        await watching(pilot, run(60, late_rank=1))
        await pilot.press(*keys)
        assert shown(app) == ["sampling rank 1 and rank 0 for 24 steps, some 5 s: 0 s so far"]
        ordered = app.jobs.sources["run-1"].ordered
        await until(pilot, lambda: ordered)
        assert (ordered[0].rank, ordered[0].peer) == (1, 0)
        clock.now += 2
        await until(pilot, lambda: "2 s so far" in shown(app)[0])
        await watching(pilot, answered(ordered[0]))
        await until(pilot, lambda: "spends" in shown(app)[0])
        text = shown(app)
        assert SAID in " ".join(text)
        assert "yes" in next(line for line in text if "augment" in line and "60.4 ±" in line)
        assert max(map(len, text)) <= size[0] - 5
        assert len(text) <= size[1] - 2
        await until(pilot, lambda: ordered[1:] == [None])
        await pilot.press("escape")
        assert not has_screen(app)


async def test_the_late_rank_is_profiled():
    app = app_on(clock=Clock())
    async with app.run_test(size=(80, 24)) as pilot:
        await watching(pilot, run(60, late_rank=1))
        await pilot.press("X")
        assert shown(app) == ["profiling rank 1 and rank 0 for 20 steps, some 4 s: 0 s so far"]
        ordered = app.jobs.sources["run-1"].ordered
        await until(pilot, lambda: ordered)
        assert ordered[0].profiler


@pytest.mark.parametrize("view", ["2", "4"])
async def test_the_rank_that_a_view_marks_is_the_one_explained(view):
    """Though nobody is named late, and nobody has selected one: the cursor stands on rank 0."""
    app = app_on(clock=Clock())
    async with app.run_test(size=(80, 24)) as pilot:
        await watching(pilot, run(30))
        await pilot.press(view, "x")
        assert shown(app)[0].startswith("sampling rank 0 and rank 1 for ")


def growing():
    """Rank 1 takes more and more memory."""
    for second in range(120):
        at_ns = START_NS + second * SECOND
        for rank in (0, 1):
            used = GIB + rank * second * GIB // 16
            yield beat(rank, 60 + 10 * second, at_ns=at_ns)
            yield RankSample(rank=rank, at_ns=at_ns, span_ns=SECOND, memory_bytes=used, memory_left_bytes=GIB)


async def test_what_time_says_nothing_of_has_its_next_step_and_samples_nothing():
    app = app_on()
    async with app.run_test(size=(80, 24)) as pilot:
        await watching(pilot, [*run(60), *growing()])
        await pilot.press("7", "x")
        assert " ".join(shown(app)).startswith("memory grows: rank 1 takes ")
        assert "Next: print sum(" in " ".join(shown(app))
        assert max(map(len, shown(app))) <= 75
        await pilot.press("escape", "down", "x")
        assert " ".join(shown(app)).startswith(f"{EXPOSED}: ")  # of all ranks
        await pilot.press("escape", "4", "x")
        assert shown(app)[0].startswith("sampling rank 1 and rank 0 for ")
        await until(pilot, lambda: app.jobs.sources["run-1"].ordered)
        assert [order.rank for order in app.jobs.sources["run-1"].ordered if order is not None] == [1]


async def test_what_was_asked_is_shown_again_once_the_run_is_over():
    app = app_on()
    async with app.run_test(size=(80, 24)) as pilot:
        await watching(pilot, run(30))
        await pilot.press("x")
        said = " ".join(shown(app))
        assert said.startswith(f"no rank is named late: choose one in view 4 (ranks), then press x; {EXPOSED}: ")
        assert " Next: key 8 (what-if) predicts " in said
        await pilot.press("escape")
        await watching(pilot, [*a_pair(order=4), *a_pair(order=5), bye(0), bye(1), bye()])
        await pilot.press("x")
        assert "rank 3 spends" in shown(app)[0]
        assert "Next: look at " in " ".join(shown(app))
        await pilot.press("left", "left", "right")
        assert app.screen.query_one("#explain").border_title == "← explanation 2 of 2 →"


async def test_a_recording_shows_what_it_holds():
    app = replay_app([*run(20), *a_pair()])
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.session.whole.ready)
        await pilot.press("x")
        assert "rank 3 spends" in shown(app)[0]
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape", "4")
        assert not has_screen(app)
        assert app.view is app.views.by_key["4"]


async def test_a_recording_in_which_no_rank_was_late_promises_no_samples():
    app = replay_app(run(20))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.session.whole.ready)
        await pilot.press("x")
        assert shown(app)[0] == "no stacks were sampled: no rank was late"


async def test_a_recording_that_ends_with_a_death_says_what_to_do_about_that():
    app = replay_app([*run(20), replace(bye(1), reason="killed", detail="SIGKILL", signal=9), bye(0), bye()])
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.session.whole.ready)
        await pilot.press("4", "x")
        assert re.match("death: rank 1 was killed .* Next: .*dmesg", " ".join(shown(app)))


@pytest.mark.parametrize("key", ["x", "7"])
async def test_ranks_that_hang_are_grouped_by_their_stacks(key):
    """64 of them are on one screen, with the calls of each group."""
    app = app_on()
    async with app.run_test(size=(80, 24)) as pilot:
        app.jobs.sources["run-1"].put_frames(frames := hang(world=64))
        await until(pilot, lambda: app.session.state.frames == len(frames))
        await pilot.press(key)
        lines = shown(app) or body(app).splitlines()
        text = " ".join(" ".join(lines).split())
        assert "rank 5 holds up the others at tokens.py:87 in read_shard" in text
        assert "63 ranks (0–4, 6–63) wait at train.py:115 in train_step (_engine_run_backward)" in text
        assert "ranks 0–4, 6–63, innermost call first:" in text
        assert max(map(len, lines)) <= 80 - 4 * (key == "x")
        assert len(lines) <= 22


async def test_without_an_answer_it_says_why():
    app = app_on(clock=(clock := Clock()))
    async with app.run_test(size=(80, 24)) as pilot:
        await watching(pilot, run(60, late_rank=1))
        await pilot.press("x")
        clock.now += 100
        await until(pilot, lambda: shown(app)[0].startswith("rank 1 has sent no samples: "))


@pytest.mark.parametrize("frames", [[], hang(world=4)], ids=["waiting", "hang"])
async def test_another_run_finds_it_open(frames):
    """The explanation is void then; the dashboard ended by an IndexError."""
    app = app_on()
    async with app.run_test(size=(80, 24)) as pilot:
        app.jobs.sources["run-1"].put_frames(frames)
        await until(pilot, lambda: app.session.state.frames == len(frames))
        await pilot.press("x")
        assert shown(app)
        app.take_event(Attached("run-2"))
        app.screen.show()
        assert shown(app) == ["there is nothing to explain any more: Esc closes this, and x asks again"]
        await pilot.press("escape")
        assert not has_screen(app)
