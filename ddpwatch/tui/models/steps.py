"""Which steps are worth a look."""

from __future__ import annotations

from ddpwatch.viewer.state import StepAcrossRanks

SLOW_STEP = 1.5  # times the median: a step worth jumping to


def is_slow(step: StepAcrossRanks, median_ns: float | None) -> bool:
    """Returns whether a step that belongs in statistics took more than `SLOW_STEP` times the median."""
    return bool(median_ns) and step.counted and step.longest_ns > SLOW_STEP * (median_ns or 0)
