"""Names for recordings: a new one never takes the name of another, or of a part of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path


def reserve(path: Path) -> Path:
    """Creates an empty file for a recording, under another name (``NAME-2`` and so on) if there is one already.

    Returns:
        The file; ``path`` itself if it is no regular file (``/dev/null``).

    Raises:
        OSError: The file cannot be created.
    """
    if path.exists() and not path.is_file():
        return path
    for name in _names(path):
        if not parts_of(name):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
                return name
    raise AssertionError("names do not run out")


def parts_of(path: Path) -> list[Path]:
    """The older parts of a recording of that name."""
    part = re.compile(rf"{re.escape(path.stem)}\.\d{{4}}{re.escape(path.suffix)}")
    with contextlib.suppress(OSError):
        return [other for other in path.parent.iterdir() if part.fullmatch(other.name)]
    return []


def _names(path: Path) -> Iterator[Path]:
    return itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
