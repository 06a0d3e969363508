"""Interval arithmetic against a rasteriser that counts points one by one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.common.intervals import Interval, Intervals, intersect, subtract, total, union

SPANS = st.lists(st.tuples(st.integers(-40, 40), st.integers(-40, 40)), max_size=12)


def raster(intervals: list[Interval]) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


def is_normal(intervals: Intervals) -> bool:
    """Sorted, not empty, with a gap between neighbours."""
    return all(start < end for start, end in intervals) and all(a[1] < b[0] for a, b in pairwise(intervals))


@given(SPANS)
def test_union(spans: list[Interval]) -> None:
    merged = union(spans)
    assert is_normal(merged)
    assert raster(merged) == raster(spans)
    assert total(merged) == len(raster(spans))


@given(SPANS, SPANS)
def test_intersection_and_difference(a: list[Interval], b: list[Interval]) -> None:
    common, rest = intersect(union(a), union(b)), subtract(union(a), union(b))
    assert raster(common) == raster(a) & raster(b)
    assert raster(rest) == raster(a) - raster(b)
    assert total(common) == len(raster(common))
    assert total(rest) == len(raster(rest))


@given(SPANS, SPANS)
def test_what_is_taken_away_may_touch(a: list[Interval], b: list[Interval]) -> None:
    points = [(at, at + 1) for start, end in union(b) for at in range(start, end)]
    assert subtract(union(a), points) == subtract(union(a), union(b))


@given(SPANS, SPANS)
def test_parts_of_a_set_add_up(a: list[Interval], b: list[Interval]) -> None:
    whole = union(a)
    assert total(intersect(whole, union(b))) + total(subtract(whole, union(b))) == total(whole)
