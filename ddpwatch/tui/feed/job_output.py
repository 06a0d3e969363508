"""Follows a text file that grows: a job's output, line by line, as a terminal would show it."""

from __future__ import annotations

import re
from pathlib import Path

MAX_READ_BYTES = 65_536  # per call; of a larger addition only the end is read
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[@-_])")


class OutputTail:
    """The lines that are added to a file.

    Attributes:
        unfinished: The last line while it has no end, such as a progress bar.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.unfinished = ""

    def lines(self) -> list[str]:
        """The lines completed since the last call. A line of its own reports bytes that were left out."""
        try:
            block, left_out = self._block()
        except OSError:
            return []
        if left_out:
            cut, newline, block = block.partition(b"\n")
            left_out += len(self._rest) + len(cut) + len(newline)
            self._rest = b""
        complete, newline, rest = (self._rest + block).rpartition(b"\n")
        self._rest = rest[-MAX_READ_BYTES:]
        self.unfinished = _shown(self._rest)
        gap = [f"… {left_out} bytes left out …"] if left_out else []
        return gap + ([_shown(line) for line in complete.split(b"\n")] if newline else [])

    def _block(self) -> tuple[bytes, int]:
        """The newest bytes, and the number of bytes skipped before them."""
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(self._offset, size - MAX_READ_BYTES)
            left_out, self._offset = start - self._offset, size
            file.seek(start)
            return file.read(size - start), left_out


def _shown(line: bytes) -> str:
    """A line as a terminal shows it: without escape sequences, a progress bar in its newest state."""
    text = _ESCAPES.sub("", line.decode("utf-8", "replace"))
    return text.rstrip("\r").rpartition("\r")[2].expandtabs()
