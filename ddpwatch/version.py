"""The version, in one place, and the versions of torch that it is tested with."""

from __future__ import annotations

import re

__version__ = "0.1.0"

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)  # `.ci/run` runs the tests with both
GROUPS_HAVE_HOOKS = (2, 14)  # from this torch on, process groups show what a job issues in them


def release_of(torch: str) -> tuple[int, int] | None:
    """Returns the release that a version of torch belongs to; None if it is not known."""
    found = re.match(r"(\d+)\.(\d+)", torch)
    return (int(found[1]), int(found[2])) if found else None


def untested(torch: str) -> str:
    """Says where a version of torch lies beyond those that are tested; empty if within, or if it is not known."""
    version = release_of(torch) or OLDEST_TORCH
    if version > NEWEST_TORCH:
        return f"newer than {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}, the newest tested"
    if version < OLDEST_TORCH:
        return f"older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, the oldest tested"
    return ""
