"""A file that somebody else writes, line by line."""

from __future__ import annotations

from pathlib import Path

OUTPUT_BYTES = 65_536


class Tail:
    """The whole lines that are added to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[str]:
        """What came since the last call, at most `OUTPUT_BYTES` of it."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read(OUTPUT_BYTES)
        except OSError:
            return []
        whole, newline, _ = block.rpartition(b"\n")
        if not newline and len(block) < OUTPUT_BYTES:
            return []
        self._offset += len(whole) + len(newline) if newline else len(block)
        return (whole if newline else block).decode("utf-8", "replace").splitlines()
