"""``ddpwatch record``: records a running job as one of its viewers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.limits import Limits
from ddpwatch.recording.rotation import RotatingWriter
from ddpwatch.viewer.live_source import SILENCE_S, Source
from ddpwatch.wire.messages import Bye, Message, NodeStep, Status, Step

FLUSH_S = 0.5


def capture(
    source: Source,
    path: str | os.PathLike[str],
    duration_s: float | None,
    steps: int | None,
    limits: Limits | None = None,
    is_live: Callable[[], bool] = lambda: False,
    commit: str = "",
) -> int:
    """Writes the frames of a source until it ends, a limit is reached, or Ctrl-C.

    Args:
        source: Closed at the end.
        path: The recording.
        duration_s: Stops after so many seconds; None for no limit.
        steps: Stops after so many more steps; None for no limit.
        limits: Size limits of the recording.
        is_live: Whether to wait on, asked when no frame has come for a while.
        commit: What the job runs, if that is known.

    Returns:
        The number of frames written.

    Raises:
        UsageError: The file cannot be created.
        DdpwatchError: No frame arrived, or the disk is full or gone.
    """
    try:
        writer = RotatingWriter(path, {"recorder": "viewer", "commit": commit}, limits)
        _capture(source, writer, duration_s, steps, is_live)
    except OSError as error:
        writer.abandon()
        text = f"{path}: {error.strerror or error}; recorded {writer.frames} frames before that"
        raise DdpwatchError(text, "the file is readable up to there; the job is not affected") from error
    finally:
        source.close()
    if writer.frames == 0:
        raise DdpwatchError("no frame arrived from the run", "`ddpwatch ls` shows whether it is still live")
    return writer.frames


def _capture(
    source: Source,
    writer: RotatingWriter,
    duration_s: float | None,
    steps: int | None,
    is_live: Callable[[], bool],
) -> None:
    attachments, ending = AttachmentBuilder(), _Ending(steps)
    started = flushed = last_frame = time.monotonic()
    try:
        while not ending.reached and (duration_s is None or time.monotonic() - started < duration_s):
            frames = source.read(0.2)
            now = time.monotonic()
            last_frame = now if frames else last_frame
            for message, envelope in frames:
                writer.write_message(message, envelope)
                attachments.apply_message(message)
                if ending.reached_by(message):
                    break
            if now - flushed >= FLUSH_S:
                writer.flush()
                flushed = now
            if source.over or (now - last_frame > SILENCE_S and not is_live()):
                break
    except KeyboardInterrupt:
        pass
    writer.close({"lost": str(source.missed)}, attachments.documents())


class _Ending:
    """Whether the run has ended, or the wanted number of steps has arrived.

    What comes before the first status is the snapshot: its steps are older.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._first: int | None = None
        self._is_live = False
        self.reached = False

    def reached_by(self, message: Message) -> bool:
        if isinstance(message, Bye) and message.rank is None:
            self.reached = True
        elif isinstance(message, Status):
            self._is_live = True
        elif isinstance(message, (Step, NodeStep)) and not self._is_live:
            self._first = max(self._first or 0, message.step + 1)
        elif isinstance(message, (Step, NodeStep)) and self._steps is not None:
            self._first = message.step if self._first is None else self._first
            self.reached = message.step - self._first >= self._steps
        return self.reached
