"""Where exports and reports may be written: anywhere but over a recording."""

from __future__ import annotations

from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.recording.container import MAGIC


def check_output(path: Path) -> None:
    """Looks whether what would be written over is a recording, under whatever name, whole or a part of one.

    Raises:
        UsageError: It is. The recording may be the very one that is read.
    """
    try:
        if not path.is_file():  # nothing there, or a pipe, which must not be read
            return
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError:
        return  # the one who writes will tell
    if head == MAGIC:
        raise UsageError(f"{path} is a recording, and would be written over", "give the output another name")
