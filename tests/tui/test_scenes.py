"""What an engineer sees in three seconds: made-up runs, diagnosed by the engine, at both sizes."""

import re

import pytest
from pytest_textual_snapshot import SVGImageExtension

from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import FrameList, ReplaySpec
from tests.support.dashboards import FakeJobs, live_app, until
from tests.support.scenes import SCENES

pytestmark = pytest.mark.usefixtures("utc")

SIZES = ((80, 24), (200, 50))
KEYS = {  # the views that show what is wrong
    "healthy": "1", "constant": "1", "intermittent": "1", "hang": "17", "ended": "17", "two-hosts": "145",
    "many-hosts": "145",
}  # fmt: skip
LATE = ["✗ rank 5 is late by 30 ms", "from blocks.7.weight_3 on", "a step would be", "since step 60",
        "of all ranks' time", "node0, pid 4005", "5◀"]  # fmt: skip
PICTURED = {  # the looks of which there is a picture: at both sizes what differs in kind, not in a figure
    f"{look}-{width}x{height}"
    for looks, sizes in (
        (("healthy-overview", "constant-overview", "intermittent-overview", "hang-overview", "hang-log",
          "ended-overview", "ended-log", "two-hosts-ranks"), SIZES),
        (("two-hosts-devices", "many-hosts-overview", "many-hosts-ranks", "many-hosts-devices"), SIZES[1:]),
    )
    for look in looks
    for width, height in sizes
}  # fmt: skip
SAID = {  # at any size, in the view of that key
    ("healthy", "1"): ["% of all ranks' time lost: ", "no incident is ongoing", "next: "],
    ("constant", "1"): [*LATE, "in each step"],
    ("intermittent", "1"): [*LATE, "in every 4th step"],
    ("hang", "1"): ["✗ hang: rank 5 is stuck in forward of step 120 for 74 s (tokens.py:87 in read_shard)",
                    "ranks 0–4, 6, 7 wait for buckets 0–2", "no step for 75 s", "node0, pid 4005", "7: stacks",
                    "5 stuck in forward 74 s"],
    ("hang", "7"): ["hang, ongoing since step 120", "rank 5 holds up the others at tokens.py:87 in read_shard",
                    "rank 5, innermost call first:", "/home/ada/gpt/model.py:41 in forward"],
    ("ended", "1"): ["% of all ranks' time lost: ", "no incident is ongoing", "next: ",
                     "earlier: straggler (rank 5) in steps 60–119", "of all ranks' time"],
    ("ended", "7"): ["✓ straggler 5", "straggler, over, steps 60–119: cost 1", "of all ranks' time",
                     "rank 5 was late by 30 ms in each step: its backward took"],
    ("two-hosts", "1"): ["✗ rank 3 is late", "node1, pid 4003", "clocks ±", "3◀ node1"],
    ("two-hosts", "4"): ["node1 3◀", "clocks ±"],
    ("two-hosts", "5"): ["node1", "MiB/s"],
    ("many-hosts", "1"): ["✗ host node077 is slow: all of its ranks", "since step 1", "8 unseen", "ranks 616–6",
                          "622◀ node077"],
    ("many-hosts", "4"): ["node077 616–623◀", "node101 808–815 ", "unseen", "clocks ±"],
    ("many-hosts", "5"): ["node077 616–623", "node101 808–815 – – –", "unseen", "net ↑", "MiB/s", "CPU"],
}  # fmt: skip


async def looks(scene):
    """Gives the app for each of the scene's views at each size, with the key, the name of the look and its text."""
    frames, jobs = SCENES[scene](), FakeJobs("run-1")
    jobs.sources["run-1"].put_frames(frames)
    app = live_app(jobs)
    async with app.run_test(size=SIZES[0]) as pilot:
        await until(pilot, lambda: app.session.state.frames == len(frames), 60)
        for size in SIZES:
            await pilot.resize_terminal(*size)
            for key in KEYS[scene]:
                text = await words_of(pilot, app, key)
                yield app, key, f"{scene}-{app.view.id}-{size[0]}x{size[1]}", text


async def words_of(pilot, app, key):
    """The words of the view of that key."""
    await pilot.press(key)
    await until(pilot, lambda: not app.view.pending)
    app.view.repaint()
    await pilot.pause()
    return " ".join(" ".join("".join(part for part, _ in row) for row in app.view._rows).split())


@pytest.mark.parametrize("scene", SCENES)
async def test_scene(scene, snapshot):
    snapshot = snapshot.use_extension(SVGImageExtension)
    different, missing = [], []
    async for app, key, name, text in looks(scene):
        if name in PICTURED and app.export_screenshot() != snapshot(name=name):
            different.append(name)
        text = re.sub(r"(\d) ranks unseen", r"\1 unseen", text)
        missing += [(name, words, text) for words in SAID[scene, key] if words not in text]
    assert not missing
    assert not different


async def test_a_hang_in_a_replay():
    """It lasts at the end, although its step is later than the newest finished one."""
    app = DashboardApp(ReplaySpec("made-up", FrameList(SCENES["hang"]())), ticking=False)
    async with app.run_test(size=(120, 36)) as pilot:
        app.feed.play_to_end()
        await until(pilot, lambda: app.session.over and app.session.whole.ready, 60)
        for key in KEYS["hang"]:
            text = await words_of(pilot, app, key)
            assert [words for words in SAID["hang", key] if words not in text] == []
        assert "later" not in text
        assert "● hang 5 forward 120–" in text
