"""Records for the collector, on a thread of its own: a slow, full or vanished disk delays neither ranks nor viewers.

What does not get to the disk is counted; see `ddpwatch.recording.resilient` for what happens after an error.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.messages import Message
from ddpwatch.recording.resilient import RETRY_S, ResilientWriter
from ddpwatch.recording.rotation import Limits
from ddpwatch.transport import Envelope

FLUSH_S = 0.25
BACKLOG_BYTES = 64 * 1024 * 1024
CLOSE_S = 10.0
_log = logging.getLogger("ddpwatch.collector")


@dataclass(frozen=True, slots=True)
class RecordingState:
    """How the recording stands: size in bytes (None before the first byte), and what is wrong with it."""

    nbytes: int | None = None
    error: str = ""


class RecordingThread(threading.Thread):
    """Takes frames and writes them.

    Args:
        path: The recording.
        about: Kept as its metadata.
        limits: Of its size.
        retry_s: Pause before the first try after an error.
    """

    def __init__(self, path: str, about: Mapping[str, str], limits: Limits, retry_s: float = RETRY_S) -> None:
        super().__init__(name="ddpwatch-recorder", daemon=True)
        self._begin = partial(ResilientWriter, Path(path), about, limits, retry_s)
        self._writer: ResilientWriter | None = None
        self._queue: deque[tuple[Message, Envelope]] = deque()
        self._queued_bytes = 0
        self._written_bytes = 0
        self._closing = AttachmentBuilder()
        self._stopping = threading.Event()
        self._failure = ""
        self._refused = 0

    # -- called by the collector -----------------------------------------------------------------------------

    def take(self, message: Message, envelope: Envelope) -> None:
        """Accepts a frame. Never waits; with too much waiting for the disk it is lost, and counted."""
        if self._failure or self._queued_bytes - self._written_bytes > BACKLOG_BYTES:
            self._refused += 1
            return
        self._queued_bytes += len(envelope.frame)
        self._queue.append((message, envelope))

    @property
    def lost(self) -> int:
        """Frames that did not get to the disk."""
        return self._refused + (0 if self._writer is None else self._writer.lost)

    @property
    def state(self) -> RecordingState:
        """How the recording stands."""
        writer, lost = self._writer, f"; {self.lost} frames lost" if self.lost else ""
        slow = "the disk is too slow" if self._refused else ""
        error = self._failure or (writer and writer.error) or slow
        return RecordingState(None if writer is None else writer.nbytes, error + lost if error else "")

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
            self._writer = self._begin()
            self._serve(self._writer)
        except Exception as error:
            _log.exception("the recorder failed")
            self._failure = f"the recorder failed: {type(error).__name__}"
            if self._writer is not None:
                self._writer.abandon()

    def _serve(self, writer: ResilientWriter) -> None:
        while not self._stopping.wait(FLUSH_S):
            self._turn(writer)
        self._turn(writer)
        writer.close(self._closing.documents(), self._refused)

    def _turn(self, writer: ResilientWriter) -> None:
        while self._queue:
            message, envelope = self._queue.popleft()
            self._written_bytes += len(envelope.frame)
            self._closing.apply(message)
            writer.write_message(message, envelope)
        writer.flush()
