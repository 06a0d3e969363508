"""Records on a thread of its own, so that a slow, full or missing disk delays neither ranks nor viewers.

Frames that do not reach the disk are counted; `ddpwatch.recording.failing_disk` handles errors.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.collector.hub import size_of
from ddpwatch.recording.failing_disk import RETRY_S, ResilientWriter
from ddpwatch.recording.limits import Limits
from ddpwatch.wire.messages import Hello, Layout, Message, decode
from ddpwatch.wire.transport import Envelope

FLUSH_S = 0.25
BACKLOG_BYTES = 64 * 1024 * 1024  # of memory
DECODED_SHARE = 1 / 64  # of the backlog, that may wait decoded
RESERVED_BYTES = 64 * 1024 * 1024  # beyond the backlog, for hellos and layouts
CLOSE_S = 10.0
_log = logging.getLogger("ddpwatch.collector")


@dataclass(frozen=True, slots=True)
class RecordingState:
    """Size of the recording in bytes (None before the first byte), and what is wrong with it."""

    nbytes: int | None = None
    error: str = ""


class RecordingThread(threading.Thread):
    """Queues frames and writes them.

    If many wait, they wait encoded, and are decoded again to be written: a decoded step takes several times the memory.

    Args:
        path: The recording.
        about: Its metadata.
        limits: Its size limits.
        retry_s: Pause before each retry after an error.
        resume: Continue the recording of a collector that has died.
    """

    def __init__(
        self, path: str, about: Mapping[str, str], limits: Limits, retry_s: float = RETRY_S, resume: bool = False
    ) -> None:
        super().__init__(name="ddpwatch-recorder", daemon=True)
        self._open_writer = partial(ResilientWriter, Path(path), about, limits, retry_s, resume=resume)
        self._writer: ResilientWriter | None = None
        self._queue: deque[tuple[Message | None, Envelope]] = deque()
        self._queued_bytes = 0
        self._written_bytes = 0
        self._stopping, self._sums_up = threading.Event(), threading.Event()
        self._attachments = AttachmentBuilder()
        self._failure = ""
        self._refused = 0

    # -- called by the collector -----------------------------------------------------------------------------

    def take_frame(self, message: Message, envelope: Envelope) -> None:
        """Queues a frame and never waits. Once the backlog is full, frames are lost and counted.

        Hellos and layouts make all else readable, so they find room when nothing else does.
        """
        room = BACKLOG_BYTES + (RESERVED_BYTES if isinstance(message, (Hello, Layout)) else 0)
        waiting = self._queued_bytes - self._written_bytes
        if self._failure or waiting > room:
            self._refused += 1
            return
        self._queued_bytes += size_of(envelope)
        self._queue.append((message if waiting < DECODED_SHARE * BACKLOG_BYTES else None, envelope))

    @property
    def lost(self) -> int:
        """Frames that did not reach the disk."""
        waiting = len(self._queue) if self._failure else 0  # for ever
        return self._refused + waiting + (0 if self._writer is None else self._writer.lost)

    @property
    def state(self) -> RecordingState:
        """Size and errors so far. What collectors before this one have lost counts, too."""
        writer, lost = self._writer, f"{self.lost} frames lost" if self.lost else ""
        slow = "the disk is too slow" if self._refused else ""
        error = self._failure or (writer and writer.error) or slow
        return RecordingState(None if writer is None else writer.nbytes, "; ".join(filter(None, (error, lost))))

    def finish(self, timeout_s: float = CLOSE_S) -> None:
        """Writes the backlog and the end; gives up on a disk that takes too long."""
        self._stopping.set()
        self.join(timeout_s)
        if timeout_s >= CLOSE_S and self._sums_up.is_set():
            self.join(50.0)  # more, to diagnose the run: on a machine whose cores are taken, even the import may last
        if self.is_alive():
            _log.error("recording not closed: the disk did not answer for %.0f s", timeout_s)

    # -- the thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Writes until `finish`. A bug in ddpwatch ends the recording, not the collector, and shows in `state`."""
        try:
            self._writer = self._open_writer()
            self._serve(self._writer)
        except Exception as error:
            _log.exception("the recorder failed")
            self._failure = f"the recorder failed: {type(error).__name__}"
            if self._writer is not None:
                self._writer.abandon()

    def _serve(self, writer: ResilientWriter) -> None:
        imports = threading.Thread(target=import_module, args=("ddpwatch.analysis.report_builder",), daemon=True)
        while not self._stopping.wait(FLUSH_S):
            if self._write_backlog(writer) and imports.ident is None:
                imports.start()  # beside the first steps: that takes seconds on a busy machine, and a kill may come
        self._write_backlog(writer)
        writer.close(self._documents(), self._refused)

    def _documents(self) -> dict[str, bytes]:
        """Returns what the recording says of itself.

        Nothing after a bug in that: the recording has its end all the same.
        """
        self._sums_up.set()
        try:
            return self._attachments.documents()
        except Exception:
            _log.exception("the recording is not summed up")
            return {}
        finally:
            self._sums_up.clear()

    def _write_backlog(self, writer: ResilientWriter) -> bool:
        """Writes and flushes what waits now; returns whether anything did."""
        waiting = len(self._queue)
        for _ in range(waiting):
            message, envelope = self._queue[0]
            message = message or decode(envelope.frame)
            self._queue.popleft()
            self._written_bytes += size_of(envelope)
            writer.write_message(message, envelope)
            self._attachments.apply_message(message)
        writer.flush()
        return waiting > 0
