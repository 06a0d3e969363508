import queue
import threading

import pytest

from ddpwatch.errors import UsageError
from ddpwatch.tui.feed import AttachSpec, LiveFeed, open_feed
from ddpwatch.tui.feed.events import Attached, Failed, Frames, Note, Output, Over, Trouble, Waiting
from ddpwatch.tui.feed.thread import MAX_BATCHES_WAITING
from tests.support.dashboards import FakeJobs, ended_recording
from tests.support.frames import bye, hello, step


def after_waiting(events):
    """The next event that is not `Waiting`."""
    while isinstance(event := events.get(timeout=60), Waiting):
        pass
    return event


class TestLive:
    def test_waits_then_attaches_reads_and_ends(self, feed_of):
        jobs = FakeJobs()
        _, events = feed_of(jobs.feed())
        assert events.get(timeout=60) == Waiting("/run/ddpwatch")
        source = jobs.start("run-1")
        assert after_waiting(events) == Attached("run-1")
        source.put([hello(0), step(0)])
        assert len(events.get(timeout=60).frames) == 2
        source.put([bye()])
        assert isinstance(events.get(timeout=60), Frames)
        assert events.get(timeout=60) == Over()
        assert source.closed

    def test_attaches_to_the_next_run_only_after_the_present_one(self, feed_of):
        jobs = FakeJobs("old", "run-1")
        _, events = feed_of(jobs.feed())
        assert events.get(timeout=60) == Attached("run-1", several=True)
        jobs.start("run-2")
        jobs.sources["run-1"].put([bye()])
        jobs.end("run-1")
        assert [type(events.get(timeout=60)) for _ in range(2)] == [Frames, Over]
        assert events.get(timeout=60) == Attached("run-2")

    def test_goes_on_when_a_collector_vanished_without_a_word(self, feed_of):
        jobs = FakeJobs("run-1")
        _, events = feed_of(jobs.feed())
        assert events.get(timeout=60) == Attached("run-1")
        jobs.end("run-1")
        jobs.start("run-2")
        assert events.get(timeout=60) == Attached("run-2")

    def test_a_run_asked_for_by_name_is_the_only_one(self, output_buffer, feed_of):
        jobs = FakeJobs("run-1")
        feed, events = feed_of(jobs.feed(run=jobs.runs[0], output=output_buffer))
        assert events.get(timeout=60) == Attached("run-1")
        jobs.start("run-2")
        jobs.sources["run-1"].put([bye()])
        assert [type(events.get(timeout=60)) for _ in range(2)] == [Frames, Over]
        for line in ("one", "two"):  # posted once a round: between them it would have attached
            output_buffer.add_block(f"{line}\n".encode())
            assert events.get(timeout=60) == Output([line])
        feed.choose(jobs.runs[0])
        assert events.get(timeout=60) == Attached("run-2")

    def test_an_ended_run_that_was_chosen_stays_although_another_started_before(self, output_buffer, feed_of, tmp_path):
        ended = ended_recording(tmp_path / "old.last.mcap", [hello(0), step(0), bye()])
        jobs = FakeJobs("run-1")
        feed, events = feed_of(jobs.feed(output=output_buffer))
        assert events.get(timeout=60) == Attached("run-1")
        jobs.start("run-2")
        feed.choose(ended)
        assert (shown := events.get(timeout=60)).name == "old"
        assert isinstance(shown, Attached)
        assert [type(events.get(timeout=60)) for _ in range(2)] == [Frames, Over]
        for line in ("one", "two"):  # posted once a round: between them it would have attached
            output_buffer.add_block(f"{line}\n".encode())
            assert events.get(timeout=60) == Output([line])
        jobs.start("run-3")
        assert events.get(timeout=60) == Attached("run-3")

    def test_an_ended_run_that_is_gone_leaves_the_live_one(self, feed_of, tmp_path):
        jobs = FakeJobs("run-1")
        feed, events = feed_of(jobs.feed())
        assert events.get(timeout=60) == Attached("run-1")
        feed.choose(tmp_path / "old.last.mcap")
        assert events.get(timeout=60) == Note("old cannot be read: older recordings of ended runs are removed")
        assert events.get(timeout=60) == Attached("run-1")

    def test_an_endpoint(self, feed_of):
        jobs = FakeJobs("ipc:///x")
        _, events = feed_of(jobs.feed(endpoint="ipc:///x"))
        assert events.get(timeout=60) == Attached("ipc:///x")

    def test_what_is_wrong_with_the_connection(self, feed_of):
        jobs = FakeJobs("ssh://node")
        source = jobs.sources["ssh://node"]
        _, events = feed_of(jobs.feed(endpoint="ssh://node"))
        assert events.get(timeout=60) == Attached("ssh://node")
        source.trouble = "broken; trying again"
        assert events.get(timeout=60) == Trouble("broken; trying again")
        source.trouble = ""
        assert events.get(timeout=60) == Trouble("")
        source.put([step(0)])
        assert isinstance(events.get(timeout=60), Frames)
        source.trouble, source.over = "gone", True
        assert events.get(timeout=60) == Trouble("gone")

    def test_what_breaks_is_posted(self, feed_of):
        def broken(endpoint):
            raise UsageError("no")

        _, events = feed_of(FakeJobs("run-1").feed(open_source=broken))
        assert isinstance(events.get(timeout=60), Failed)

    def test_no_more_than_a_few_batches_wait(self, feed_of):
        jobs = FakeJobs("run-1")
        feed, events = feed_of(jobs.feed())
        for _ in range(MAX_BATCHES_WAITING + 2):
            jobs.sources["run-1"].put([step(0)])
        assert events.get(timeout=60) == Attached("run-1")
        taken = [events.get(timeout=60) for _ in range(MAX_BATCHES_WAITING)]
        assert len(taken) == MAX_BATCHES_WAITING
        with pytest.raises(queue.Empty):
            events.get(timeout=0.3)
        feed.taken()
        assert isinstance(events.get(timeout=60), Frames)

    def test_the_real_defaults_are_lazy(self):
        assert isinstance(open_feed(AttachSpec(), print), LiveFeed)


def test_no_thread_is_left():
    assert not [thread for thread in threading.enumerate() if thread.name == "ddpwatch-feed"]
