"""Records a running job as one of its viewers."""

from __future__ import annotations

import os
import time

from ddpwatch.errors import DdpwatchError
from ddpwatch.messages import Bye, Step, type_name
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.sources import SILENCE_S, Source

FLUSH_S = 0.5


def capture(source: Source, path: str | os.PathLike[str], duration_s: float | None, steps: int | None) -> int:
    """Writes all frames of a source until it ends, or the limit or Ctrl-C is reached; returns their number.

    Raises:
        UsageError: The file cannot be written.
        DdpwatchError: No frame ever came.
    """
    writer = RecordingWriter(path)
    begun = flushed = heard = time.monotonic()
    first_step: int | None = None
    try:
        while duration_s is None or time.monotonic() - begun < duration_s:
            frames = source.read(0.2)
            now = time.monotonic()
            heard = now if frames else heard
            for message, envelope in frames:
                writer.write(envelope, type_name(message))
                if isinstance(message, Bye) and message.rank is None:
                    return writer.frames
                if isinstance(message, Step) and steps is not None:
                    first_step = message.step if first_step is None else first_step
                    if message.step - first_step >= steps:
                        return writer.frames
            if now - flushed >= FLUSH_S:
                writer.flush()
                flushed = now
            if now - heard > SILENCE_S:
                break
    except KeyboardInterrupt:
        pass
    finally:
        writer.close()
        source.close()
    if writer.frames == 0:
        raise DdpwatchError("the run said nothing", "is it still there? `ddpwatch ls` lists runs")
    return writer.frames
