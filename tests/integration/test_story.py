"""The story that the dashboard is for: a real job gets into trouble, the overview says which, and that it is over."""

from __future__ import annotations

import re

from ddpwatch import rundir
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import AttachFeed
from tests.support.dashboards import screen_text, until
from tests.support.jobs import ROOT, Job

SCRIPT = ROOT / "demo" / "story_job.py"
SOON = 20 + 8  # steps: 20, and what passes while the job reads the file and the screen is drawn
PATIENCE = (90.0, 0.05)  # seconds in all, and between two looks
HEALTHY = 300  # steps without trouble


def newest(app):
    return app.session.overview.newest_step or 0


def verdict(app):
    return app.session.overview.verdict


def words(app):
    """What the overview says, in one line; it is on the screen."""
    said = " ".join(verdict(app).text.split())
    assert said in " ".join(screen_text(app).split())
    return said


def late(app, rank):
    """Whether that rank is called late by more than what passing load on the machine brings about."""
    slowest = app.session.overview.summary.slowest
    return slowest is not None and slowest.rank == rank and slowest.late_ns > 80e6


def findings(app):
    """Everything that was found so far, whether or not it still holds."""
    return [event.text for event in app.session.log.events if event.kind == "finding"]


def disturbed(job):
    """Whether other load has kept the ranks from running: then there is something to find."""
    overslept = sorted(float(ms) for ms in re.findall(r"overslept ([\d.]+) ms", job.output()))
    return overslept[len(overslept) * 9 // 10] > 4


async def steps_until(pilot, what):
    """Waits for it and gives the steps that passed."""
    begin = newest(pilot.app)
    await until(pilot, what, *PATIENCE)
    return newest(pilot.app) - begin


def watcher():
    return DashboardApp(AttachFeed(list_ended=rundir.last_views), ticking=False)


async def test_trouble_is_named_in_words_and_clears(run_directory, tmp_path):
    trouble = tmp_path / "trouble"
    trouble.write_text("none")
    app = watcher()
    async with app.run_test(size=(200, 50)) as pilot:
        with Job(SCRIPT, str(trouble), log=tmp_path / "job.log") as job:
            await until(pilot, lambda: newest(app) >= HEALTHY, *PATIENCE)
            assert findings(app) == [] or disturbed(job)
            assert not late(app, 0)
            assert not late(app, 1)

            trouble.write_text("slow-backward")
            assert await steps_until(pilot, lambda: late(app, 1)) <= SOON
            said = re.match(
                r"rank 1 is late: launches bucket \d+ \(4\.(?:weight|bias)\)(?: and later ones)? (\d+) ms after "
                r"the first rank \(p50 of \d+ steps\); its backward takes (\d+) ms longer, from 4\.(?:weight|bias) on$",
                words(app),
            )
            assert said is not None, words(app)
            walls = [
                row.summary.phases_ns["backward"] + row.summary.phases_ns["exposed_comm"]
                for row in app.session.overview.ranks
            ]
            assert max(walls) < 1.25 * min(walls)  # what a step timer sees: both backwards are alike

            trouble.write_text("none")
            assert await steps_until(pilot, lambda: not late(app, 1)) <= SOON

            trouble.write_text("slow-input")
            assert await steps_until(pilot, lambda: late(app, 0)) <= SOON
            assert re.search(r"rank 0 is late: .*; its input takes \d+ ms longer$", words(app)), words(app)
            trouble.write_text("stop")
            assert job.wait() == 0, job.output()
        await until(pilot, lambda: "ENDED: finished" in screen_text(app), *PATIENCE)


async def test_the_bucket_that_nothing_hides_is_named(run_directory, tmp_path):
    trouble = tmp_path / "trouble"
    trouble.write_text("none")
    app = watcher()
    async with app.run_test(size=(200, 50)) as pilot:
        with Job(SCRIPT, str(trouble), "--wide", log=tmp_path / "job.log") as job:
            await until(pilot, lambda: verdict(app).kind == "exposed", *PATIENCE)
            said = r"exposed communication \d+ ms of \d+ ms \(\d+ %\): last bucket \d+ \(0\.\w+\) alone \d+ ms$"
            assert re.match(said, words(app)), words(app)
            trouble.write_text("stop")
            assert job.wait() == 0, job.output()
