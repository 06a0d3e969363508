"""Units of time: stamps and durations are in ns everywhere, and in ms or s where people read them."""

from __future__ import annotations

NS_PER_MS = 1e6
NS_PER_S = 1e9
S_PER_HOUR = 3600
FOREVER_NS = 1 << 62  # beyond every stamp and duration


def to_ms(ns: float | None) -> float | None:
    """Converts to milliseconds, if it is known."""
    return None if ns is None else ns / NS_PER_MS
