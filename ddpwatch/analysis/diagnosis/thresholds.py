"""Where a figure becomes a finding: high enough to be worth an engineer's time."""

from __future__ import annotations

from ddpwatch.analysis.step import NS_PER_MS

LATE_MS = 2.0
LATE_NS = LATE_MS * NS_PER_MS
LATE_SHARE = 0.05  # of a step
EXPOSED_SHARE = 0.10  # of a step
INPUT_SHARE = 0.045  # of a step
STUCK_NS = 3_000_000_000  # in one phase, or without a sign of life

ENOUGH_STEPS = 8  # for a first verdict
STRAGGLER_STEPS = 16  # the newest; of these only the watched count. A slow rank is named, and cleared, within 20 steps
STRAGGLER_CERTAINTY = 0.95  # of the straggler's median, and of that of a typical rank
