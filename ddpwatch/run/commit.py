"""Finds out which commit a job's code is at, from git's own files: no program is started."""

from __future__ import annotations

import re
from pathlib import Path

from ddpwatch.run.regular import read_regular

DIGITS = 12
_HASH = re.compile(r"[0-9a-f]{40,64}")


def commit_of(folder: Path) -> str:
    """Returns the start of the hash of the commit that is checked out there; empty if that is not known."""
    try:
        place = next(above / ".git" for above in (folder, *folder.parents) if (above / ".git").exists())
        git = place if place.is_dir() else place.parent / _text(place).removeprefix("gitdir: ")
        head = _text(git / "HEAD")
        found = _commit_named(git, head.removeprefix("ref: ")) if head.startswith("ref: ") else head
    except (OSError, StopIteration):
        return ""
    return found[:DIGITS] if _HASH.fullmatch(found) else ""


def _commit_named(git: Path, name: str) -> str:
    """Returns the hash that a branch has: in a file of its own, or packed with others. A worktree shares them."""
    common = git / _text(git / "commondir") if (git / "commondir").exists() else git
    if (file := common / name).exists():
        return _text(file)
    rows = (line.split() for line in _text(common / "packed-refs").splitlines())
    return next((row[0] for row in rows if row[1:] == [name]), "")


def _text(path: Path) -> str:
    return read_regular(path).decode(errors="replace").strip()
