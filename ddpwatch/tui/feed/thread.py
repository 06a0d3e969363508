"""The thread of a feed: how it starts and ends, and the bound on batches that wait for the dashboard."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from ddpwatch.tui.feed.events import Failed, FeedEvent, Frames
from ddpwatch.wire.transport import Frame

POLL_S = 0.1
MAX_BATCHES_WAITING = 4


class ThreadFeed(ABC):
    """What live and replay share. The public methods are for the dashboard's thread; all but `join` return at once.

    At most `MAX_BATCHES_WAITING` batches wait for the dashboard, so neither a long recording nor a busy terminal
    makes memory grow.
    """

    def __init__(self, post: Callable[[FeedEvent], object]) -> None:
        self._post_event = post
        self._stopped = threading.Event()
        self._slots = threading.Semaphore(MAX_BATCHES_WAITING)
        self._thread = threading.Thread(target=self._guarded, name="ddpwatch-feed", daemon=True)

    def start(self) -> None:
        """Starts the thread, which posts from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end, which takes at most one poll."""
        self._stopped.set()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end, if it was started."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def taken(self) -> None:
        """Acknowledges one batch, so that another may be posted."""
        self._slots.release()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._post(Failed(error))

    @abstractmethod
    def _run(self) -> None:
        """Reads and posts until `_stopped` is set."""

    def _post(self, event: FeedEvent) -> None:
        if not self._stopped.is_set():
            self._post_event(event)

    def _post_frames(self, frames: list[Frame]) -> None:
        while frames and not self._stopped.is_set():
            if self._slots.acquire(timeout=POLL_S):
                self._post_event(Frames(frames))
                return
