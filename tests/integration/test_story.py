"""The story that the dashboard is for: a real job gets into trouble, the overview says which, and that it is over."""

from __future__ import annotations

import re
from pathlib import Path

from ddpwatch import rundir
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import AttachFeed
from tests.integration.jobs import Job
from tests.tui.fakes import screen_text, until

SCRIPT = Path(__file__).parents[1] / "tui" / "story_job.py"
SOON = 20 + 8  # steps: 20, and what passes while the job reads the file and the screen is drawn
PATIENCE = (90.0, 0.05)  # seconds in all, and between two looks: the job needs both cores
HEALTHY = 60  # steps without trouble


def newest(app):
    return app.session.overview.newest_step or 0


def words(app):
    """What the overview says, in one line."""
    return " ".join(app.session.overview.verdict.text.split())


def late(app, rank):
    """Whether that rank is called late by more than what passing load on the machine brings about."""
    slowest = app.session.overview.summary.slowest
    return slowest is not None and slowest.rank == rank and slowest.late_ns > 80e6


async def steps_until(pilot, what):
    """Waits for it and gives the steps that passed."""
    begin = newest(pilot.app)
    await until(pilot, what, *PATIENCE)
    return newest(pilot.app) - begin


async def test_trouble_is_named_in_words_and_clears(run_directory, tmp_path):
    trouble = tmp_path / "trouble"
    trouble.write_text("none")
    app = DashboardApp(AttachFeed(list_ended=rundir.last_views), ticking=False)
    async with app.run_test(size=(200, 50)) as pilot:
        with Job(SCRIPT, str(trouble), log=tmp_path / "job.log") as job:
            await until(pilot, lambda: newest(app) >= HEALTHY, *PATIENCE)
            assert not late(app, 0)
            assert not late(app, 1)

            trouble.write_text("slow-backward")
            assert await steps_until(pilot, lambda: late(app, 1)) <= SOON
            said = re.match(
                r"rank 1 is late: launches bucket \d+ \((\d+)\.(?:weight|bias)\)(?: and later ones)? (\d+) ms after "
                r"the first rank \(p50 of \d+ steps\); its backward takes (\d+) ms longer, "
                r"from \d+\.(?:weight|bias) on",
                words(app),
            )
            assert said is not None, words(app)
            assert words(app) in " ".join(screen_text(app).split())

            trouble.write_text("none")
            assert await steps_until(pilot, lambda: not late(app, 1)) <= SOON

            trouble.write_text("slow-input")
            assert await steps_until(pilot, lambda: late(app, 0)) <= SOON
            assert re.search(r"rank 0 is late: .*; its input takes \d+ ms longer$", words(app)), words(app)
            trouble.write_text("stop")
            assert job.wait() == 0, job.output()
        await until(pilot, lambda: "ENDED: finished" in screen_text(app), *PATIENCE)
