"""What is no longer needed goes away by itself: the collector of cycles hardly ever looks at what is old."""

import gc
import weakref

import pytest

from ddpwatch.state import KEEP_STEPS
from ddpwatch.tui.views.painted import RowStrip
from tests.support.dashboards import FakeJobs, live_app, until
from tests.support.frames import run, state_of, step


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def strips():
    return sum(type(found) is RowStrip for found in gc.get_objects())


def test_a_step_that_is_dropped(no_collector):
    state = state_of(run(3))
    view = state.steps[2]
    view.skew, view.row("late"), view.figures[0]
    dropped = weakref.ref(view)
    del view
    for number in range(3, 3 + KEEP_STEPS):
        state.apply(step(0, number), state.now_ns)
    assert dropped() is None


async def test_a_row_that_is_painted_over(no_collector):
    jobs = FakeJobs("run-1")
    app = live_app(jobs)
    async with app.run_test(size=(80, 24)) as pilot:
        jobs.sources["run-1"].put(list(run(20, late_rank=1)))
        await until(pilot, lambda: app.session.state.frames >= 44)
        await pilot.press("left")
        before = strips()
        await pilot.press(*["left", "right"] * 5)
        assert app.view.size.height <= before
        assert strips() <= before + 3
