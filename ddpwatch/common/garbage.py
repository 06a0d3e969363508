"""Rare garbage collections, or none, while frames are read: these hold no cycles, and a run keeps a million objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Young objects often, so that a screen never stops for long; all of them, for which it would, never
THRESHOLDS = (5_000, 50, 40_000)


@contextmanager
def few_collections() -> Iterator[None]:
    """Makes full collections next to never happen: Python's own thresholds spend up to half of the time on them."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def no_collections() -> Iterator[None]:
    """Collects nothing while a recording is read from front to back: there is no screen, and no cycle that could go."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
