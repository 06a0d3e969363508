"""Where the dashboard's frames come from: a thread that reads a live run or a recording, and posts events.

Knows no screen. Live and replay post the same events.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpwatch.tui.feed.events import FeedEvent
from ddpwatch.tui.feed.live import AttachSpec, LiveFeed
from ddpwatch.tui.feed.playback import FrameList
from ddpwatch.tui.feed.replay import ReplayFeed, ReplaySpec

__all__ = ["AttachSpec", "FeedSpec", "FrameList", "LiveFeed", "ReplayFeed", "ReplaySpec", "open_feed"]

FeedSpec = AttachSpec | ReplaySpec


def open_feed(spec: FeedSpec, post: Callable[[FeedEvent], object]) -> LiveFeed | ReplayFeed:
    """Makes the feed that a spec describes. It does not run until ``start``."""
    return LiveFeed(spec, post) if isinstance(spec, AttachSpec) else ReplayFeed(spec, post)
