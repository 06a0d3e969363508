"""What the dashboard looks like, on synthetic frames and a clock that stands still."""

import pytest
from textual.pilot import Pilot

from tests.tui.fakes import FakeJobs, live_app, until
from tests.tui.frames import bye, device, killed, run

SMALL, MEDIUM, LARGE = (80, 24), (120, 36), (200, 50)


def devices():
    return [device(second, 20.0 + (second * 37) % 70) for second in range(40)]


def gpus():
    return [device(s, 50.0 + (s * 13 + 20 * i) % 50, "cuda", i) for s in range(40) for i in range(4)]


def terminated():
    return bye(0, "killed", detail="SIGTERM", signal=15)


SCENES = {
    "late-80x24": (SMALL, [*run(60, late_rank=1), *devices()], ()),
    "late-120x36": (MEDIUM, [*run(60, late_rank=1), *devices()], ()),
    "gpus-200x50": (LARGE, [*run(60, world=4), *gpus()], ()),
    "many-ranks-80x24": (SMALL, [*run(12, world=64), *devices()], ("j", "j", "left")),
    "killed-120x36": (
        MEDIUM,
        [*run(40), killed(), bye(0, "killed", detail="SIGTERM", signal=15), bye(None, "killed")],
        (),
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_overview(scene, snap_compare):
    size, messages, keys = SCENES[scene]
    jobs = FakeJobs("run-1")
    jobs.sources["run-1"].put(messages)

    async def shown(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: pilot.app.session.state.frames == len(messages))
        await pilot.press(*keys)
        await pilot.pause()

    assert snap_compare(live_app(jobs), terminal_size=size, run_before=shown)


def test_waiting(snap_compare):
    async def shown(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: pilot.app.session.overview.link.directory)

    assert snap_compare(live_app(FakeJobs()), terminal_size=SMALL, run_before=shown)


def test_help(snap_compare):
    async def shown(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: pilot.app.session.overview.link.directory)
        await pilot.press("question_mark")
        await pilot.pause()

    assert snap_compare(live_app(FakeJobs()), terminal_size=SMALL, run_before=shown)
