"""What the dashboard looks like, on synthetic frames and a stopped clock."""

import re

import pytest
from pytest_textual_snapshot import SVGImageExtension
from rich.cells import cell_len
from textual.pilot import Pilot

from ddpwatch.common.text import ms, percent, three_digits
from ddpwatch.tui.bottom_bar import ROOMY, SHORT
from ddpwatch.tui.settings import Settings
from ddpwatch.tui.views import VIEWS
from ddpwatch.wire.messages import Mark
from tests.support.dashboards import FakeJobs, ended_recording, live_app, screen_text, until
from tests.support.frames import MS, START_NS, bye, device, killed, run
from tests.support.own_collectives import experts, mesh
from tests.support.sharded import hsdp_run
from tests.support.synthetic import Fleet
from tests.support.whatif import MadeUpJob

SMALL, MEDIUM, LARGE = (80, 24), (120, 36), (200, 50)


pytestmark = pytest.mark.usefixtures("utc")


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
HSDP = [*hsdp_run(20, late_ms=20)]
MESH, EXPERTS = [*mesh(20)], [*experts(20)]
REAL = [*MadeUpJob(backend="gloo", steps=60, late_ms=(0.0, 4.0)).messages()]  # with parameters and hook fires

WORLDS = {
    2: lambda: LATE,
    8: lambda: [*Fleet(8, late={5: 12.0}, gpus=True).frames(40)],
    64: lambda: [*Fleet(64, late={40: 12.0}, gpus=True).frames(16)],
    1024: lambda: [*run(10, world=1024, late_rank=700)],
}
SCENES = {
    "late-120x36": (MEDIUM, LATE, ()),
    "gpus-200x50": (LARGE, FOUR, ()),
    "many-ranks-80x24": (SMALL, MANY, ("j", "j", "left")),
    "many-ranks-one-late-80x24": (SMALL, [*run(20, world=48, late_rank=41)], ()),
    "killed-120x36": (MEDIUM, DEATH, ()),
    "timeline-200x50": (LARGE, EIGHT, ("2", "m", "shift+right", "l", "j", "plus")),
    "timeline-seconds-120x36": (MEDIUM, FOUR, ("2", "r")),
    "collectives-200x50": (LARGE, EIGHT, ("3", "s")),
    "bucket-120x36": (MEDIUM, LATE, ("3", "j", "enter")),
    "heat-64-80x24": (SMALL, MANY, ("4", "m")),
    "rank-120x36": (MEDIUM, FOUR, ("4", "f", "enter")),
    "devices-200x50": (LARGE, FOUR, ("5", "j")),
    "log-200x50": (LARGE, [*FOUR, killed(3)], ("7",)),
    "hsdp-timeline-80x24": (SMALL, HSDP, ("2",)),
    "hsdp-timeline-200x50": (LARGE, HSDP, ("2",)),
    "hsdp-groups-200x50": (LARGE, HSDP, ("3",)),
    "mesh-timeline-80x24": (SMALL, MESH, ("2",)),
    "experts-collectives-80x24": (SMALL, EXPERTS, ("3",)),
    "experts-collectives-200x50": (LARGE, EXPERTS, ("3",)),
    "whatif-80x24": (SMALL, REAL, ("8",)),
    "whatif-200x50": (LARGE, REAL, ("8", "k", "k")),
}
THEMES = {
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


async def every_view(app, pilot):
    """Shows every view in both sizes, and gives its name with the size once it is painted."""
    for width, height in (SMALL, LARGE):
        await pilot.resize_terminal(width, height)
        for view in app.views:
            app.show_view(view)
            await pilot.pause()
            view.repaint()
            await until(pilot, lambda: not app.view.pending)
            yield f"{view.id}-{width}x{height}"


async def test_every_view(snapshot, baseline):
    """All pictures of eight ranks, from one start of the app; and what holds in any world."""
    snapshot = snapshot.use_extension(SVGImageExtension)
    jobs, messages = FakeJobs("run-1"), WORLDS[8]()
    jobs.sources["run-1"].put(messages)
    app = live_app(jobs, baseline=baseline)
    different, wrong = [], []
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: app.session.state.frames == len(messages))
        async for name in every_view(app, pilot):
            if app.export_screenshot() != snapshot(name=name):
                different.append(name)
            wrong += wrong_in(app, 8, name)
    assert not different
    assert not wrong


def frame_shown(app, lines):
    """Header, verdict and tabs, with the figures of the session."""
    overview, summary = app.session.overview, app.session.overview.summary
    yield lines[0].startswith(" LIVE ")
    yield lines[0].endswith(f"step {overview.newest_step} ")
    yield " run-1 " in lines[0] or f" {overview.run_id} " in lines[0]
    yield len(lines[0]) < 100 or f"{overview.world_size} ranks" in lines[0]
    yield f"{ms(summary.step_ns)} ms" in lines[1]
    yield f"overlap {percent(summary.estimate.overlap)}" in lines[1]
    yield f"exposed {ms(summary.exposed_ns)} " in lines[1]
    slowest = overview.slowest
    yield slowest is None or f"{slowest.ranks[0]} +{three_digits(slowest.evidence.late_ms)} ms" in lines[1]
    verdict = " ".join(" ".join(lines[2:6]).split())
    yield any(sign + overview.verdict.text[:60] in verdict for sign in ("✗ ", "! ", "✓ ", "· "))
    short = SHORT if len(lines[0]) < ROOMY else {}
    yield all(f" {key} {short.get(view.NAME, view.NAME)} " in lines[-1] for key, view in VIEWS.items())


def body_shown(app, name, world, lines):
    """What each view is for."""
    devices = app.session.overview.devices
    body, state, width = "\n".join(lines[3:-1]), app.session.state, len(lines[0])
    numbers = {int(number) for number in re.findall(r"(?<![\d.:–+-])\d+(?![\d.:%])", body)}
    shown = {
        "overview": lambda: (
            f"step {app.session.step_shown.step}" in body,
            re.search(r"rank  .*(?:status|more) .*late ms", body) is not None,
            {0, 1} <= numbers,
            "running" in body,
            width < 110 or "where a step goes, ms" in body,
        ),
        "timeline": lambda: (
            f"step {app.session.step_shown.step}" in body,
            "▶" in body and "▲" in body,
            len(re.findall(r"rank \d+", body)) > min(world, 2),
            f"rank {app.views.timeline.cursor.rank} at" in body or f"r{app.views.timeline.cursor.rank} " in body,
            "forward" in body and "backward" in body,
        ),
        "collectives": lambda: (
            "bucket▼" in body and "exposed ms" in body,
            _first_numbers(lines[4:-2], len(app.views.collectives.rows()))  # below may be a row in detail
            == [row.index for row in app.views.collectives.rows()][: app.view.body_height - 2],
        ),
        "ranks": lambda: (
            "lateness" in body,
            "╵step" in body,
            covered(body) == set(range(world)),
            app.session.overview.slowest is None or "◀" in body,
        ),
        "devices": lambda: (
            ("no sample yet" in body) == (not state.devices),
            not state.devices or re.search(r"(GPU\d|CPU) ", body) is not None,
            not state.devices or any(f"{line.device.utilization:.0f} %" in body for line in devices),
            not any(line.history for line in devices) or "busy % over the last seconds" in body,
        ),
        "compare": lambda: (
            "compared with baseline" in body,
            "baseline (29)" in body,
            f"this run ({min(app.session.overview.newest_step, 200)})" in body,
            all(phase in body for phase in ("gap", "forward", "backward", "exposed", "optim", "rest")),
        ),
        "log": lambda: (
            f"events and incidents {app.session.log.count}" in body or app.session.log.count > 2000,
            all(row.message[:20] in body for row in app.session.overview.diagnosed.incidents[:1]),
            "▶" in body,
        ),
        "whatif": lambda: (
            "what if: " in body,
            any(text in body for text in ("are needed", "not predicted", "not shown", "would gain", "is sure to help")),
        ),
    }
    yield from shown[name]()


def _first_numbers(lines, most):
    return [int(line[1:8]) for line in lines if line[1:8].strip().isdigit()][:most]


def covered(body):
    """The ranks that the heatmap's rows show."""
    rows = re.findall(r"^ +(\d+)(?:–(\d+))?[◀ ] ", body, re.MULTILINE)
    return {rank for first, last in rows for rank in range(int(first), int(last or first) + 1)}


@pytest.mark.parametrize("world", [world for world in WORLDS if world != 8])
async def test_every_view_of_any_world(world, baseline):
    jobs, messages = FakeJobs("run-1"), WORLDS[world]()
    jobs.sources["run-1"].put(messages)
    app = live_app(jobs, baseline=baseline)
    wrong = []
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: app.session.state.frames == len(messages))
        async for name in every_view(app, pilot):
            wrong += wrong_in(app, world, name)
    assert not wrong


def wrong_in(app, world, name):
    """Every cell is painted, the figures are those of the session, and painting again changes nothing."""
    rows, (width, height) = app.view._rows, app.size
    bar = screen_text(app).splitlines()[-1]
    lines = [*("".join(text for text, _ in row) for row in rows), bar]
    drawn = ["".join("▀" * len(text) if "/" in style else text for text, style in row) for row in rows] + [bar]
    widths = [cell_len(line) for line in lines]
    app.view.repaint()
    checks = {
        "cells": [widths == [width] * height, screen_text(app).splitlines() == drawn],
        "same again": [app.view._rows == rows],
        "frame": list(frame_shown(app, lines)),
        "body": list(body_shown(app, app.view.id, world, lines)),
    }
    return [(name, what, found) for what, found in checks.items() if not all(found)]


@pytest.mark.parametrize("theme", THEMES)
def test_themes(theme, snap_compare):
    jobs = FakeJobs("run-1")
    jobs.sources["run-1"].put(FOUR)
    app = live_app(jobs, settings=THEMES[theme])
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
