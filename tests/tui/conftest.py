import os
import queue
import time

import pytest

from ddpwatch.job.output_copy import OutputBuffer
from ddpwatch.tui.feed import open_feed


@pytest.fixture
def utc(monkeypatch):
    """The log shows the time of day."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def output_buffer():
    """What a job prints. Ask for it before what reads it."""
    made = OutputBuffer.create()
    yield made
    os.close(made.descriptor)


@pytest.fixture
def feed_of():
    """Starts a feed and gives it with the queue of its events; stops it afterwards."""
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
        feed.join(60)
        assert not feed._thread.is_alive()
