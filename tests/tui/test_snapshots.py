"""What the dashboard looks like, on synthetic frames and a clock that stands still."""

import time

import pytest
from pytest_textual_snapshot import SVGImageExtension
from textual.pilot import Pilot

from benchmarks.synthetic import Fleet
from ddpwatch.messages import Mark
from ddpwatch.tui.settings import Settings
from tests.support.dashboards import FakeJobs, ended_recording, live_app, until
from tests.support.frames import MS, START_NS, bye, device, killed, run

SMALL, MEDIUM, LARGE = (80, 24), (120, 36), (200, 50)


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    """The log shows the time of day."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def devices():
    return [device(second, 20.0 + (second * 37) % 70) for second in range(40)]


def gpus():
    return [device(s, 50.0 + (s * 13 + 20 * i) % 50, "cuda", i) for s in range(40) for i in range(4)]


def mark():
    return Mark(rank=0, name="evaluate", start_ns=START_NS + 39 * 100 * MS + 20 * MS)


DEATH = [*run(40), killed(), bye(0, "killed", detail="SIGTERM", signal=15), bye(None, "killed")]
LATE = [*run(60, late_rank=1), *devices()]
FOUR = [*run(40, world=4, late_rank=2), *gpus(), mark()]
EIGHT = [*run(40, world=8, late_rank=5), *gpus()]
MANY = [*run(12, world=64), *devices()]

RECORDINGS = {
    2: lambda: LATE,
    8: lambda: [*Fleet(8, late={5: 12.0}, gpus=True).frames(40)],
    64: lambda: [*Fleet(64, late={40: 12.0}, gpus=True).frames(16)],
    1024: lambda: [*run(10, world=1024, late_rank=700)],
}
SCENES = {
    "late-120x36": (MEDIUM, LATE, ()),
    "gpus-200x50": (LARGE, FOUR, ()),
    "many-ranks-80x24": (SMALL, MANY, ("j", "j", "left")),
    "killed-120x36": (MEDIUM, DEATH, ()),
    "timeline-200x50": (LARGE, EIGHT, ("2", "m", "shift+right", "l", "j", "plus")),
    "timeline-seconds-120x36": (MEDIUM, FOUR, ("2", "r")),
    "buckets-200x50": (LARGE, EIGHT, ("3", "s")),
    "bucket-120x36": (MEDIUM, LATE, ("3", "j", "enter")),
    "heat-64-80x24": (SMALL, MANY, ("4", "m")),
    "rank-120x36": (MEDIUM, FOUR, ("4", "f", "enter")),
    "devices-200x50": (LARGE, FOUR, ("5", "j")),
    "log-200x50": (LARGE, [*FOUR, killed(3)], ("7",)),
}
LOOKS = {
    "light": Settings(theme="light"),
    "contrast": Settings(theme="contrast"),
    "ansi": Settings(theme="ansi"),
    "no-colour-ascii": Settings(theme="none", ascii=True),
}


def shows(messages, keys):
    async def shown(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: pilot.app.session.state.frames == len(messages))
        await pilot.press(*keys)
        await until(pilot, lambda: not pilot.app.view.pending)
        await pilot.pause()

    return shown


@pytest.mark.parametrize("scene", SCENES)
def test_overview(scene, snap_compare):
    size, messages, keys = SCENES[scene]
    jobs = FakeJobs("run-1")
    jobs.sources["run-1"].put(messages)
    assert snap_compare(live_app(jobs), terminal_size=size, run_before=shows(messages, keys))


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return ended_recording(tmp_path_factory.mktemp("recordings") / "baseline.mcap", run(30))


@pytest.mark.parametrize("ranks", RECORDINGS)
async def test_every_view(ranks, snapshot, baseline):
    """All of one recording's pictures from one start of the app."""
    snapshot = snapshot.use_extension(SVGImageExtension)
    jobs, messages = FakeJobs("run-1"), RECORDINGS[ranks]()
    jobs.sources["run-1"].put(messages)
    app = live_app(jobs, baseline=baseline)
    different = []
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: app.session.state.frames == len(messages))
        for width, height in (SMALL, LARGE):
            await pilot.resize_terminal(width, height)
            for key, view in app.views.by_key.items():
                app.show_view(key)
                await until(pilot, lambda: not app.view.pending)
                name = f"{view.NAME.lower()}-{width}x{height}"
                if app.export_screenshot() != snapshot(name=name):
                    different.append(name)
    assert not different


@pytest.mark.parametrize("look", LOOKS)
def test_looks(look, snap_compare):
    jobs = FakeJobs("run-1")
    jobs.sources["run-1"].put(FOUR)
    app = live_app(jobs, settings=LOOKS[look])
    assert snap_compare(app, terminal_size=MEDIUM, run_before=shows(FOUR, ()))


def test_stale(snap_compare):
    messages = [*run(40), bye(0), bye(1), bye()]
    jobs = FakeJobs("run-1")
    jobs.sources["run-1"].put(messages)
    assert snap_compare(live_app(jobs), terminal_size=SMALL, run_before=shows(messages, ()))


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
