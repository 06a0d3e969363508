"""A recording that outlives its disk: full, gone or read-only, it goes on as soon as there is room again."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.messages import Message
from ddpwatch.recording.rotation import Introductions, Limits, RotatingWriter
from ddpwatch.transport import Envelope

RETRY_S = 2.0  # doubled after each failure
LONGEST_RETRY_S = 60.0
_log = logging.getLogger("ddpwatch.recording")


class ResilientWriter:
    """Like `RotatingWriter`, but a disk that fails raises nothing: what does not get there is counted.

    It tries again every few seconds and goes on in a new part; what was written before stays readable. Call from one
    thread.

    Args:
        path: The recording.
        about: Kept as its metadata.
        limits: Of its size.
        retry_s: Pause before the first try after an error.
        make_folder: Create the file's directory where it is missing.

    Attributes:
        lost: Frames that did not get to the disk.
        error: What was wrong with the disk last; empty if nothing ever was.
        nbytes: Size of all parts; None before the first byte.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, str],
        limits: Limits,
        retry_s: float = RETRY_S,
        make_folder: bool = False,
    ) -> None:
        self.path = path
        self.lost = 0
        self.error = ""
        self.nbytes: int | None = None
        self._about = dict(about)
        self._limits = limits
        self._retry_s = retry_s
        self._make_folder = make_folder
        self._introductions = Introductions()
        self._writer: RotatingWriter | None = None
        self._broken_since: float | None = None
        self._unflushed = 0
        self._open()

    def write_message(self, message: Message, envelope: Envelope) -> None:
        """Adds one frame, or counts it as lost."""
        self._mend()
        if self._writer is None or self._broken_since is not None:
            self._introductions.apply(message, envelope.received_ns)  # else the writer does
            self.lost += 1
            return
        self._unflushed += 1
        try:
            self._writer.write_message(message, envelope)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """Hands everything to the operating system; what that refuses is lost."""
        self._mend()
        if self._writer is None or self._broken_since is not None:
            return
        try:
            self.nbytes = self._writer.flush()
            self._unflushed = 0
        except OSError as error:
            self._fail(error)

    def close(self, attachments: Mapping[str, bytes] | None = None, lost_before: int = 0) -> None:
        """Writes index and end, with a last try where the disk has failed.

        Args:
            attachments: See `RecordingWriter.close`.
            lost_before: Frames that were lost on their way here; the recording tells of them, too.
        """
        self.flush()
        if self._broken_since is not None:
            self._open()
        if self._writer is None or self._broken_since is not None:
            return
        try:
            self._writer.close({"lost": str(self.lost + lost_before)}, attachments)
        except OSError as error:
            self._fail(error)

    def abandon(self) -> None:
        """See `RecordingWriter.abandon`."""
        if self._writer is not None:
            self._writer.abandon()

    # -- inside ----------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        if self._broken_since is not None and time.monotonic() - self._broken_since >= self._retry_s:
            self._open()

    def _open(self) -> None:
        self._broken_since = None
        try:
            if self._make_folder:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            lost = {"lost": str(self.lost)}
            if self._writer is None:
                about = {**self._about, **lost}
                self._writer = RotatingWriter(self.path, about, self._limits, introductions=self._introductions)
            else:
                self._writer.reopen(lost)
        except (OSError, UsageError) as error:
            self._fail(error)

    def _fail(self, error: OSError | UsageError) -> None:
        reason = error.message if isinstance(error, UsageError) else error.strerror or str(error)
        if not self.error:
            _log.error("ddpwatch does not record to %s for now: %s", self.path, reason)
        self.error = reason
        self.lost += self._unflushed
        self._unflushed = 0
        self._broken_since = time.monotonic()
        self._retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s)
        self.abandon()
