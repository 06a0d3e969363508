"""The end of a text file that grows: a job's output, line by line, as a terminal would leave it."""

from __future__ import annotations

import re
from pathlib import Path

MOST_BYTES = 65_536  # taken at a time; where more has come, its beginning is left out
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]+[0-~]|[@-_])")


class OutputTail:
    """The lines that are added to a file.

    Attributes:
        begun: The line that has no end yet, a progress bar for instance.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.begun = ""

    def lines(self) -> list[str]:
        """The whole lines that came since the last call; what was left out is a line of its own."""
        try:
            block, left_out = self._block()
        except OSError:
            return []
        if left_out:
            cut, newline, block = block.partition(b"\n")
            left_out += len(self._rest) + len(cut) + len(newline)
            self._rest = b""
        whole, newline, rest = (self._rest + block).rpartition(b"\n")
        self._rest = rest[-MOST_BYTES:]
        self.begun = _shown(self._rest)
        said = [f"… {left_out} bytes left out …"] if left_out else []
        return said + ([_shown(line) for line in whole.split(b"\n")] if newline else [])

    def _block(self) -> tuple[bytes, int]:
        """The newest bytes, and how many came before them and are left out."""
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(self._offset, size - MOST_BYTES)
            left_out, self._offset = start - self._offset, size
            file.seek(start)
            return file.read(size - start), left_out


def _shown(line: bytes) -> str:
    """What a terminal shows of a line: no escape sequence, and of a progress bar the newest state."""
    text = _ESCAPES.sub("", line.decode("utf-8", "replace"))
    return text.rstrip("\r").rpartition("\r")[2].expandtabs()
