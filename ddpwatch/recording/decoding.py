"""Decodes the frames of a recording's chunks, and bounds what those cost that cannot be decoded."""

from __future__ import annotations

from collections.abc import Iterator

from ddpwatch.recording.container import MESSAGE, UNPACK_RATIO, UnpackedChunk
from ddpwatch.wire import node_step
from ddpwatch.wire.messages import FrameError, is_step
from ddpwatch.wire.transport import Envelope, Frame


class FrameDecoder:
    """Decodes the frames of a file, chunk by chunk.

    A frame that cannot be decoded takes time for nothing, and a hostile file of a few kilobytes may hold millions of
    them. So these may unpack to `UNPACK_RATIO` times what was read of the file; with more, the file counts as damaged.

    Attributes:
        skipped: Frames that could not be decoded so far, and those behind them in a chunk that was given up.
        is_damaged: There were too many.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.is_damaged = False
        self._allowed_bytes = 0

    def frames(self, chunk: UnpackedChunk, first: bool, ahead_ns: int = 0, steps_from_ns: int = 0) -> Iterator[Frame]:
        """Yields the frames of a chunk.

        Args:
            chunk: Its messages.
            first: False skips the frames that are repeated from the part before.
            ahead_ns: Taken from receive times.
            steps_from_ns: Steps that were received before that are skipped; they are most of what takes time.
        """
        self._allowed_bytes += UNPACK_RATIO * chunk.packed_bytes
        for number, raw in enumerate(chunk.messages):
            if (raw.sequence == 0 and not first) or (raw.log_time < steps_from_ns and is_step(raw.data)):
                continue
            try:
                frames = node_step.read(Envelope(raw.sequence, raw.log_time - ahead_ns, raw.data))
            except FrameError as error:
                self.skipped += 1
                self._allowed_bytes -= MESSAGE.size + len(raw.data) + error.unpacked_bytes
                if self._allowed_bytes < 0:
                    self.skipped += len(chunk.messages) - number - 1
                    self.is_damaged = True
                    return
            else:
                yield from frames
