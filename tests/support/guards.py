"""Guards that note ddpwatch's errors."""

from __future__ import annotations

from ddpwatch.probe.guard import Guard


def noting(errors: list[Exception]) -> Guard:
    """A guard that notes the errors that it takes."""
    return Guard(lambda feature, error: errors.append(error))
