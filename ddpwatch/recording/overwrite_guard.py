"""Keeps exports and reports from overwriting a recording."""

from __future__ import annotations

from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.recording.container import MAGIC


def check_output(path: Path) -> None:
    """Checks that writing to the path overwrites no recording. It may be the one that is read, under another name.

    Raises:
        UsageError: It would.
    """
    try:
        if not path.is_file():  # a new file, or a pipe, which must not be read
            return
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError:
        return  # writing will report it
    if head == MAGIC:
        raise UsageError(f"{path} is a recording, and would be overwritten", "give the output another name")
