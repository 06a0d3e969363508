"""Names for recordings: a new one never takes the name of another, or of a part of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

_RANK_FILE = re.compile(r"rank\d{5,}\.mcap")
_OLDER_PART = re.compile(r"(.+)\.\d{4,5}\.mcap")
STALE_S = 120.0  # a reservation is used within seconds; an older one is of a job that was killed


def reserve(path: Path) -> Path:
    """Reserves a name for a recording, another one (``NAME-2`` and so on) if it is taken.

    The reservation is an empty file under the name of the next part, so that a job that is killed at once leaves no
    empty recording. The recorder removes it when it has created its file.

    Returns:
        The name; ``path`` itself if it is no regular file (``/dev/null``).

    Raises:
        OSError: No file can be created there.
    """
    if path.exists() and not path.is_file():
        return path
    return next(name for name in _names(path) if _reserved(name))


def is_path(name: str) -> bool:
    """Returns whether a name can only be that of a recording, not of a live run."""
    return os.sep in name or name.endswith(".mcap")


def report_command(path: str | os.PathLike[str]) -> str:
    """Returns what to type for a recording's report, its name quoted as a shell needs it."""
    return f"ddpwatch report {shlex.quote(os.fspath(path))}"


def next_part(path: Path) -> Path:
    """Returns where the next part is written until it takes the recording's name."""
    return path.with_name(f"{path.name}.next")


def _reserved(path: Path) -> bool:
    """Reserves this name; False if it is taken."""
    place = next_part(path)
    with contextlib.suppress(FileNotFoundError):
        if not path.exists() and time.time() - place.stat().st_mtime > STALE_S:
            place.unlink()
    try:
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    if path.exists() or parts_of(path):
        place.unlink(missing_ok=True)
        return False
    return True


def older_part(path: Path, number: int) -> Path:
    """Returns where a part is once the recording's name has gone to the next one."""
    return path.with_name(f"{path.stem}.{number:04d}{path.suffix}")


def is_older_part(path: Path, number: int) -> bool:
    """Returns whether that is the path of an older part, of that number.

    A recording's own name may end in digits as well.
    """
    return path.stem.endswith(f".{number:04d}")


def parts_of(path: Path) -> list[Path]:
    """Returns the older parts of a recording of that name, oldest first."""
    part = re.compile(rf"{re.escape(path.stem)}\.(?:\d{{4}}|[1-9]\d{{4}}){re.escape(path.suffix)}")
    with contextlib.suppress(OSError):
        found = [other for other in path.parent.iterdir() if part.fullmatch(other.name)]
        return sorted(found, key=lambda other: (len(other.name), other.name))
    return []


def recordings_in(folder: Path) -> set[Path]:
    """Returns the recordings in a directory, and its directories of rank files; nothing if it is none.

    Older parts belong to the newest.
    """
    files = [*folder.glob("*.mcap"), *folder.glob("*/rank*.mcap")]
    return {file.parent if _RANK_FILE.fullmatch(file.name) else file for file in files if not _is_of_newer(file)}


def _is_of_newer(file: Path) -> bool:
    older = _OLDER_PART.fullmatch(file.name)
    return older is not None and file.with_name(f"{older[1]}.mcap").exists()


def _names(path: Path) -> Iterator[Path]:
    return itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
