"""Records a running job as one of its viewers."""

from __future__ import annotations

import os
import time

from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.errors import DdpwatchError
from ddpwatch.messages import Bye, Message, Step
from ddpwatch.recording.rotation import Limits, RotatingWriter
from ddpwatch.sources import SILENCE_S, Source

FLUSH_S = 0.5


def capture(
    source: Source,
    path: str | os.PathLike[str],
    duration_s: float | None,
    steps: int | None,
    limits: Limits | None = None,
) -> int:
    """Writes all frames of a source until it ends, or the limit or Ctrl-C is reached; returns their number.

    Raises:
        UsageError: The file cannot be written.
        DdpwatchError: No frame ever came, or the disk is full or gone.
    """
    try:
        writer = RotatingWriter(path, {"recorder": "viewer"}, limits)
        _capture(source, writer, duration_s, steps)
    except OSError as error:
        writer.abandon()
        text = f"{path}: {error.strerror or error}; recorded {writer.frames} frames before that"
        raise DdpwatchError(text, "what was written is readable; the job is not affected") from error
    finally:
        source.close()
    if writer.frames == 0:
        raise DdpwatchError("the run said nothing", "is it still there? `ddpwatch ls` lists runs")
    return writer.frames


def _capture(source: Source, writer: RotatingWriter, duration_s: float | None, steps: int | None) -> None:
    closing, ending = AttachmentBuilder(), _Ending(steps)
    begun = flushed = heard = time.monotonic()
    try:
        while not ending.reached and (duration_s is None or time.monotonic() - begun < duration_s):
            frames = source.read(0.2)
            now = time.monotonic()
            heard = now if frames else heard
            for message, envelope in frames:
                writer.write_message(message, envelope)
                closing.apply(message)
                if ending.sees(message):
                    break
            if now - flushed >= FLUSH_S:
                writer.flush()
                flushed = now
            if now - heard > SILENCE_S:
                break
    except KeyboardInterrupt:
        pass
    writer.close({"lost": str(source.missed)}, closing.documents())


class _Ending:
    """Whether the run has ended, or as many steps as wanted have come."""

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._first: int | None = None
        self.reached = False

    def sees(self, message: Message) -> bool:
        if isinstance(message, Bye) and message.rank is None:
            self.reached = True
        elif isinstance(message, Step) and self._steps is not None:
            self._first = message.step if self._first is None else self._first
            self.reached = message.step - self._first >= self._steps
        return self.reached
