"""Records for the collector, on a thread of its own: a slow, full or vanished disk delays neither ranks nor viewers.

What does not get to the disk is counted. After an error the recorder tries again every few seconds and goes on in a new
part; what was written before stays readable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from ddpwatch.analysis.closing import Closing
from ddpwatch.errors import UsageError
from ddpwatch.messages import Message
from ddpwatch.recording.rotation import Limits, RotatingWriter
from ddpwatch.transport import Envelope

FLUSH_S = 0.25
RETRY_S = 2.0  # doubled after each failure
LONGEST_RETRY_S = 60.0
BACKLOG_BYTES = 64 * 1024 * 1024
CLOSE_S = 10.0
_log = logging.getLogger("ddpwatch.collector")


@dataclass(frozen=True, slots=True)
class RecorderState:
    """How the recording stands: size in bytes (None before the first byte), and what is wrong with it."""

    nbytes: int | None = None
    error: str = ""


class Recorder(threading.Thread):
    """Takes frames and writes them.

    Args:
        path: The recording.
        about: Kept as its metadata.
        limits: Of its size.
        retry_s: Pause between two tries after an error.

    Attributes:
        lost: Frames that did not get to the disk.
    """

    def __init__(self, path: str, about: Mapping[str, str], limits: Limits, retry_s: float = RETRY_S) -> None:
        super().__init__(name="ddpwatch-recorder", daemon=True)
        self._path = path
        self._about = dict(about)
        self._limits = limits
        self._retry_s = retry_s
        self._queue: deque[tuple[Message, Envelope]] = deque()
        self._queued_bytes = 0
        self._written_bytes = 0
        self._closing = Closing()
        self._stopping = threading.Event()
        self._failed = False
        self._writer: RotatingWriter | None = None
        self._broken_since: float | None = None
        self._error = ""
        self._nbytes: int | None = None
        self._unflushed = 0
        self.lost = 0

    # -- called by the collector -----------------------------------------------------------------------------

    def take(self, message: Message, envelope: Envelope) -> None:
        """Accepts a frame. Never waits; with too much waiting for the disk it is lost, and counted."""
        if self._failed or self._queued_bytes - self._written_bytes > BACKLOG_BYTES:
            self._error = self._error or "the disk is too slow"
            self.lost += 1
            return
        self._queued_bytes += len(envelope.frame)
        self._queue.append((message, envelope))

    @property
    def state(self) -> RecorderState:
        """How the recording stands."""
        lost = f"; {self.lost} frames lost" if self.lost else ""
        return RecorderState(self._nbytes, self._error + lost if self._error else "")

    def finish(self, timeout_s: float = CLOSE_S) -> None:
        """Writes what is left and the end; gives up on a disk that takes too long."""
        self._stopping.set()
        self.join(timeout_s)
        if self.is_alive():
            _log.error("recording not closed: the disk did not answer for %.0f s", timeout_s)

    # -- the thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Writes until told to finish. An error of our own ends the recording, not the collector, and is told."""
        try:
            self._serve()
        except Exception as error:
            _log.exception("the recorder failed")
            self._error = f"the recorder failed: {type(error).__name__}"
            self._failed = True
            if self._writer is not None:
                self._writer.abandon()

    def _serve(self) -> None:
        self._open()
        while not self._stopping.wait(FLUSH_S):
            self._turn()
        self._turn()
        self._close()

    def _turn(self) -> None:
        if self._broken_since is not None and time.monotonic() - self._broken_since >= self._retry_s:
            self._open()
        try:
            while self._queue:
                self._write(*self._queue.popleft())
            if self._writer is not None and self._broken_since is None:
                self._nbytes = self._writer.flush()
                self._unflushed = 0
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _open(self) -> None:
        self._broken_since = None
        try:
            if self._writer is None:
                self._writer = RotatingWriter(self._path, self._about, self._limits)
            else:
                self._writer.reopen()
        except UsageError as error:
            self._fail(error.message)
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _write(self, message: Message, envelope: Envelope) -> None:
        self._written_bytes += len(envelope.frame)
        self._closing.apply(message)
        if self._writer is None or self._broken_since is not None:
            self.lost += 1
            return
        self._unflushed += 1
        self._writer.write_message(message, envelope)

    def _fail(self, reason: str) -> None:
        """The disk is full or gone: the run goes on, and its viewers are told."""
        if not self._error:
            _log.error("not recording: %s", reason)
        self._error = reason
        self.lost += self._unflushed
        self._unflushed = 0
        self._broken_since = time.monotonic()
        self._retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s)
        if self._writer is not None:
            self._writer.abandon()

    def _close(self) -> None:
        if self._broken_since is not None:
            self._open()  # a last try
        if self._writer is None or self._broken_since is not None:
            return
        try:
            self._writer.close({"lost": str(self.lost)}, self._closing.documents())
        except OSError as error:
            self._fail(error.strerror or str(error))
