"""Follows a job's output, line by line, as a terminal would show it."""

from __future__ import annotations

import re

from ddpwatch.job.output_copy import BLOCK_BYTES, OutputBuffer

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[@-_])")


class OutputTail:
    """The lines that are added to a buffer; of more than `BLOCK_BYTES` since the last look, only the newest.

    Attributes:
        unfinished: The last line while it has no end, such as a progress bar.
    """

    def __init__(self, buffer: OutputBuffer) -> None:
        self._buffer = buffer
        self._offset = 0
        self._rest = b""
        self.unfinished = ""

    def lines(self) -> list[str]:
        """Returns the lines completed since the last call. A line of its own reports bytes that were left out."""
        start, block = self._buffer.newest(self._offset)
        left_out, self._offset = start - self._offset, start + len(block)
        if left_out:
            cut, newline, block = block.partition(b"\n")
            left_out += len(self._rest) + len(cut) + len(newline)
            self._rest = b""
        complete, newline, rest = (self._rest + block).rpartition(b"\n")
        self._rest = rest[-BLOCK_BYTES:]
        self.unfinished = _shown(self._rest)
        gap = [f"… {left_out} bytes left out …"] if left_out else []
        return gap + ([_shown(line) for line in complete.split(b"\n")] if newline else [])


def _shown(line: bytes) -> str:
    """Returns a line as a terminal shows it: without escape sequences, a progress bar in its newest state."""
    text = _ESCAPES.sub("", line.decode("utf-8", "replace"))
    return text.rstrip("\r").rpartition("\r")[2].expandtabs()
