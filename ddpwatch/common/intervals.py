"""Arithmetic on sets of half-open integer intervals, kept as sorted, disjoint, non-empty ``(start, end)`` pairs."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
Intervals = list[Interval]
_NEVER = (1 << 80, 1 << 80)  # beyond all stamps, absolute ones included


def union(intervals: Iterable[Interval]) -> Intervals:
    """Returns the points in any of the intervals, which may come in any order, be empty and overlap."""
    ordered = sorted(intervals)
    if not ordered:
        return []
    merged: Intervals = []
    start, reach = ordered[0]
    for low, high in ordered:
        if low > reach:
            if reach > start:
                merged.append((start, reach))
            start, reach = low, high
        elif high > reach:
            reach = high
    if reach > start:
        merged.append((start, reach))
    return merged


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Returns the points in both."""
    common: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Returns the points of ``a`` that are not in ``b``, whose intervals may touch."""
    if not a or not b or b[-1][1] <= a[0][0] or b[0][0] >= a[-1][1]:
        return a
    rest: Intervals = []
    holes = iter(b)
    low, high = next(holes)
    for start, end in a:
        while high <= start:
            low, high = next(holes, _NEVER)
        while low < end:
            if low > start:
                rest.append((start, low))
            start = high
            if high >= end:
                break
            low, high = next(holes, _NEVER)
        if start < end:
            rest.append((start, end))
    return rest


def total(intervals: Intervals) -> int:
    """Returns the summed length."""
    length = 0
    for start, end in intervals:
        length += end - start
    return length


def total_within(intervals: Intervals, start: int, end: int) -> int:
    """Returns the length of the part of the intervals in [start, end)."""
    length = 0
    for low, high in intervals:
        if low < end and high > start and start < end:
            length += min(high, end) - max(low, start)
    return length
