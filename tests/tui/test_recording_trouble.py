"""The header and the log report a recording that the disk does not accept."""

from ddpwatch.tui.models.log import RunLog
from tests.support.dashboards import FakeJobs, live_app, screen_text, until
from tests.support.frames import EPOCH_NS, run, status

FULL = "No space left on device; {} frames lost"


def troubled(lost):
    message = status()
    message.recording, message.recording_error = "/data/run.mcap", FULL.format(lost)
    return message


def test_once_in_the_log_however_many_frames_are_lost():
    log = RunLog()
    for message in (status(), troubled(1), troubled(2), troubled(300)):
        log.take_message(message, EPOCH_NS)
    assert [(line.text, line.severity) for line in log.lines] == [("recording: No space left on device", "bad")]


async def test_in_the_header_with_the_count():
    jobs = FakeJobs("run-1")
    app = live_app(jobs)
    async with app.run_test(size=(160, 40)) as pilot:
        jobs.sources["run-1"].put([*run(12), troubled(5)])
        await until(pilot, lambda: "recording: No space left on device; 5 frames lost" in screen_text(app))
