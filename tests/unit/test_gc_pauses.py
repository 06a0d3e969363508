"""Garbage collections that hold a rank up are marked, short ones are not."""

from __future__ import annotations

import gc

from ddpwatch.probe.gc_pauses import GcPauses
from ddpwatch.wire.messages import Mark
from tests.support.guards import noting

MS = 1_000_000


def collected(pause_ns: int) -> list[Mark]:
    """The marks of one forced collection, with a clock that advances by the pause at each reading."""
    marks: list[Mark] = []
    readings = iter(range(10**12, 10**15, pause_ns))
    pauses = GcPauses(3, marks.append, noting([]), lambda: next(readings))
    gc.collect()
    pauses.close()
    gc.collect()
    return marks


def test_a_long_collection_is_marked() -> None:
    (mark,) = collected(5 * MS)
    assert (mark.rank, mark.kind, mark.name) == (3, "gc", "garbage collection, generation 2")
    assert mark.end_ns is not None
    assert mark.end_ns - mark.start_ns == 5 * MS


def test_a_short_collection_is_not() -> None:
    assert collected(MS // 2) == []
