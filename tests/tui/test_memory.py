"""What is no longer needed goes away by itself: the collector of cycles hardly ever looks at what is old."""

import gc
import weakref

import msgspec
import pytest

from ddpwatch.analysis.kept_steps import KEPT
from ddpwatch.tui.views.painted import RowStrip
from ddpwatch.viewer.state import RunState
from tests.support.dashboards import FakeJobs, live_app, until
from tests.support.frames import EPOCH_NS, bye, device, hello, layout, run, state_of, step


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
    for number in range(3, 3 + KEPT.steps):
        for rank in (0, 1):
            state.apply_message(step(rank, number), state.now_ns)
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


HOURS = 6


def hours():
    """Frames of six hours: hosts that come and go with their devices, and modules whose buckets change all the time."""
    for second in range(HOURS * 3600):
        now_ns = EPOCH_NS + second * 10**9
        yield device(second, index=second % 8, kind="cuda"), now_ns
        if second % 10 == 0:
            yield msgspec.structs.replace(device(second), host=f"node{second}"), now_ns
            yield msgspec.structs.replace(layout(second % 4), module=second % 3, epoch=second), now_ns
            yield hello(second % 4, boot_id=f"boot {second}"), now_ns
            yield step(second % 4, second // 40), now_ns
            yield bye(second % 4), now_ns


def test_hours_of_frames_are_bounded():
    state = RunState()
    for message, now_ns in hours():
        state.apply_message(message, now_ns)
    assert len(state.layouts) <= 64
    assert max(epoch for *_, epoch in state.layouts) == HOURS * 3600 - 10
    assert len(state.devices) <= 8 + 600 // 10 + 1  # those of the last ten minutes
    assert [len(state.devices["node1", "boot", "cuda", index]) for index in range(8)] == [600] * 8
    assert max(len(state.clocks._lowest), len(state.clocks._offsets)) <= 4
    assert (len(state.steps), len(state.marks), len(state.ends)) == (KEPT.steps, 0, 100)


def test_large_layouts_are_bounded_by_their_size():
    state = RunState()
    names = [f"{index:01000}" for index in range(4000)]
    for epoch in range(40):
        state.apply_message(msgspec.structs.replace(layout(), epoch=epoch, params=names), EPOCH_NS + epoch)
    assert sum(len(name) for kept in state.layouts.values() for name in kept.params) <= 32 << 20
    assert (0, 0, 39) in state.layouts
    for epoch in (40, 41):
        state.apply_message(msgspec.structs.replace(layout(), epoch=epoch, params=names * 16), EPOCH_NS + epoch)
    assert [epoch for *_, epoch in state.layouts] == [41]
