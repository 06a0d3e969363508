import queue
import threading

import pytest

from ddpwatch.errors import UsageError
from ddpwatch.tui.feed import (
    IN_FLIGHT,
    Attached,
    AttachFeed,
    Failed,
    FileFeed,
    Frames,
    LiveFeed,
    Over,
    Pacer,
    ReplayFeed,
    Waiting,
    open_feed,
)  # fmt: skip
from tests.tui.fakes import Clock, FakeJobs
from tests.tui.frames import bye, enveloped, hello, run, step


@pytest.fixture
def feed_of():
    """Starts a feed and gives it with the queue of its events; stops it afterwards, within a second."""
    feeds = []

    def start(spec):
        events = queue.SimpleQueue()
        feed = open_feed(spec, events.put)
        feed.start()
        feeds.append(feed)
        return feed, events

    yield start
    for feed in feeds:
        feed.stop()
        feed.join(1.0)
        assert not feed._thread.is_alive()


def after_waiting(events):
    """The next event that is not `Waiting`."""
    while isinstance(event := events.get(timeout=5), Waiting):
        pass
    return event


class TestLive:
    def test_waits_then_attaches_reads_and_ends(self, feed_of):
        jobs = FakeJobs()
        _, events = feed_of(jobs.feed())
        assert events.get(timeout=5) == Waiting("/run/ddpwatch")
        source = jobs.start("run-1")
        assert after_waiting(events) == Attached("run-1")
        source.put([hello(0), step(0)])
        assert len(events.get(timeout=5).frames) == 2
        source.put([bye()])
        assert isinstance(events.get(timeout=5), Frames)
        assert events.get(timeout=5) == Over()
        assert source.closed

    def test_attaches_to_the_next_run_only_after_the_present_one(self, feed_of):
        jobs = FakeJobs("old", "run-1")
        _, events = feed_of(jobs.feed())
        assert events.get(timeout=5) == Attached("run-1", several=True)
        jobs.start("run-2")
        jobs.sources["run-1"].put([bye()])
        jobs.end("run-1")
        assert [type(events.get(timeout=5)) for _ in range(2)] == [Frames, Over]
        assert events.get(timeout=5) == Attached("run-2")

    def test_goes_on_when_a_collector_vanished_without_a_word(self, feed_of):
        jobs = FakeJobs("run-1")
        _, events = feed_of(jobs.feed())
        assert events.get(timeout=5) == Attached("run-1")
        jobs.end("run-1")
        jobs.start("run-2")
        assert events.get(timeout=5) == Attached("run-2")

    def test_a_run_asked_for_by_name_is_the_only_one(self, feed_of):
        jobs = FakeJobs("run-1")
        feed, events = feed_of(jobs.feed(run=jobs.runs[0]))
        assert events.get(timeout=5) == Attached("run-1")
        jobs.start("run-2")
        jobs.sources["run-1"].put([bye()])
        assert [type(events.get(timeout=5)) for _ in range(2)] == [Frames, Over]
        with pytest.raises(queue.Empty):
            events.get(timeout=0.7)
        feed.choose(jobs.runs[0])
        assert events.get(timeout=5) == Attached("run-2")

    def test_an_endpoint(self, feed_of):
        jobs = FakeJobs("ipc:///x")
        _, events = feed_of(jobs.feed(endpoint="ipc:///x"))
        assert events.get(timeout=5) == Attached("ipc:///x")

    def test_what_breaks_is_posted(self, feed_of):
        def broken(endpoint):
            raise UsageError("no")

        _, events = feed_of(FakeJobs("run-1").feed(open_source=broken))
        assert isinstance(events.get(timeout=5), Failed)

    def test_no_more_than_a_few_batches_wait(self, feed_of):
        jobs = FakeJobs("run-1")
        feed, events = feed_of(jobs.feed())
        for _ in range(IN_FLIGHT + 2):
            jobs.sources["run-1"].put([step(0)])
        assert events.get(timeout=5) == Attached("run-1")
        taken = [events.get(timeout=5) for _ in range(IN_FLIGHT)]
        assert len(taken) == IN_FLIGHT
        with pytest.raises(queue.Empty):
            events.get(timeout=0.3)
        feed.taken()
        assert isinstance(events.get(timeout=5), Frames)

    def test_the_real_defaults_are_lazy(self):
        assert isinstance(open_feed(AttachFeed(), print), LiveFeed)


class TestPacer:
    def pacer(self, speed=1.0):
        return Pacer(iter(enveloped([step(0, n) for n in range(5)], every_ms=100)), speed)

    def test_frames_come_at_the_pace_they_were_received(self):
        pacer = self.pacer()
        assert len(pacer.due(0.0)) == 1
        assert len(pacer.due(0.25)) == 2
        assert not pacer.over
        assert len(pacer.due(0.15)) == 2
        assert pacer.over

    def test_speed(self):
        assert len(self.pacer(2.0).due(0.1)) == 3
        assert len(self.pacer(0.5).due(0.1)) == 1

    def test_rest_comes_at_once_but_in_batches(self):
        pacer = self.pacer()
        assert [len(pacer.rest(limit=2)) for _ in range(3)] == [2, 2, 1]
        assert pacer.over

    def test_a_batch_is_bounded_and_the_rest_stays_due(self):
        pacer = self.pacer()
        assert len(pacer.due(10, limit=3)) == 3
        assert len(pacer.due(0, limit=3)) == 2

    def test_nothing_to_play(self):
        assert Pacer(iter([]), 1.0).over


class TestReplay:
    def test_plays_to_the_end(self, feed_of):
        clock = Clock()
        feed, events = feed_of(ReplayFeed("dir/x.mcap", iter(enveloped(run(5))), 1.0, clock))
        assert events.get(timeout=5) == Attached("x.mcap")
        frames = events.get(timeout=5).frames
        feed.jump_to_end()
        while isinstance(event := events.get(timeout=5), Frames):
            frames += event.frames
            feed.taken()
        assert event == Over()
        assert [envelope.seq for _, envelope in frames] == list(range(1, len(enveloped(run(5))) + 1))

    def test_holds_while_paused(self, feed_of):
        clock = Clock()
        feed, events = feed_of(ReplayFeed("x", iter(enveloped(run(5))), 1.0, clock))
        events.get(timeout=5)
        events.get(timeout=5)
        feed.pause(True)
        clock.now += 60
        feed.pause(True)
        with pytest.raises(queue.Empty):
            events.get(timeout=0.3)

    def test_speed_goes_up_and_down_in_steps(self):
        feed = FileFeed(ReplayFeed("x", iter([]), 1.0), print)
        speeds = []
        for by in (1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1):
            feed.faster(by)
            speeds.append(feed.speed)
        assert speeds == [2, 4, 8, 16, 16, 8, 4, 2, 1, 0.5, 0.25, 0.25]

    def test_a_recording_that_breaks_says_so(self, feed_of):
        def frames():
            yield from enveloped([step(0)])
            raise UsageError("cut")

        _, events = feed_of(ReplayFeed("x", frames(), 1.0))
        events.get(timeout=5)
        assert isinstance(events.get(timeout=5), Failed)


def test_no_thread_is_left():
    assert not [thread for thread in threading.enumerate() if thread.name == "ddpwatch-feed"]
