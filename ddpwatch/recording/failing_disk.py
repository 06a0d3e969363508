"""Records on a disk that may fail: when it is full, gone or read-only, recording resumes once it works again."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.recording.limits import Limits
from ddpwatch.recording.rotation import ContextMessages, RotatingWriter
from ddpwatch.wire.messages import Message
from ddpwatch.wire.transport import Envelope

RETRY_S = 2.0
_log = logging.getLogger("ddpwatch.recording")


class ResilientWriter:
    """Like `RotatingWriter`, but a failing disk raises nothing: lost frames are counted.

    It retries every few seconds and continues in a new part; what was written before stays readable. Not thread-safe.

    Args:
        path: The recording.
        about: Its metadata.
        limits: Its size limits.
        retry_s: Pause before each retry after an error.
        make_folder: Create the file's directory if it is missing.
        resume: See `RotatingWriter`.

    Attributes:
        lost: Frames that did not reach the disk.
        error: Why the disk failed last; empty if it never did.
        nbytes: Size of all parts; None before the first byte.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, str],
        limits: Limits,
        retry_s: float = RETRY_S,
        make_folder: bool = False,
        resume: bool = False,
    ) -> None:
        self.path = path
        self.lost = 0
        self.error = ""
        self.nbytes: int | None = None
        self._about = dict(about)
        self._limits = limits
        self._retry_s = retry_s
        self._make_folder = make_folder
        self._resume = resume
        self._context = ContextMessages()
        self._writer: RotatingWriter | None = None
        self._failed_at: float | None = None
        self._open()

    def write_message(self, message: Message, envelope: Envelope) -> None:
        """Adds a frame, or counts it as lost."""
        self._retry()
        if self._writer is None or self._failed_at is not None:
            self._context.apply_message(message, envelope.received_ns)  # otherwise the writer does it
            self.lost += 1
            return
        try:
            self._writer.write_message(message, envelope)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """Hands everything to the operating system; frames that it refuses are lost."""
        self._retry()
        if self._writer is None or self._failed_at is not None:
            return
        try:
            self.nbytes = self._writer.flush()
        except OSError as error:
            self._fail(error)

    def close(self, attachments: Mapping[str, bytes] | None = None, lost_before: int = 0) -> None:
        """Writes index and end; retries once more if the disk has failed.

        Args:
            attachments: See `RecordingWriter.close`.
            lost_before: Frames that were lost on the way here; the recording counts them as well.
        """
        self.flush()
        if self._failed_at is not None:
            self._open()
        if self._writer is None or self._failed_at is not None:
            return
        try:
            self._writer.close({"lost": str(self.lost + lost_before)}, attachments)
        except OSError as error:
            self._fail(error)

    def abandon(self) -> None:
        """Counts what was not flushed as lost; otherwise as `RecordingWriter.abandon`."""
        if self._writer is not None:
            self._writer.abandon()
            self.lost += self._writer.unflushed
            self._writer.unflushed = 0

    # -- inside ----------------------------------------------------------------------------------------------

    def _retry(self) -> None:
        if self._failed_at is not None and time.monotonic() - self._failed_at >= self._retry_s:
            self._open()

    def _open(self) -> None:
        self._failed_at = None
        try:
            if self._make_folder:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            lost = {"lost": str(self.lost)}
            if self._writer is None:
                about = {**self._about, **lost}
                self._writer = RotatingWriter(
                    self.path, about, self._limits, context=self._context, resume=self._resume
                )
                self.lost += self._writer.lost_before
            else:
                self._writer.reopen(lost)
        except (OSError, UsageError) as error:
            self._fail(error, again=self._writer is not None)

    def _fail(self, error: OSError | UsageError, again: bool = False) -> None:
        """Counts what is lost. What ended the recording says more than why a retry failed."""
        reason = error.message if isinstance(error, UsageError) else error.strerror or str(error)
        if not self.error:
            _log.error("ddpwatch does not record to %s until it can be written again: %s", self.path, reason)
        if not again:
            self.error = reason
        self._failed_at = time.monotonic()
        self.abandon()
