"""The bounds of a median, against the exact binomial distribution, and how steadily values rise."""

from __future__ import annotations

from math import comb

import pytest

from ddpwatch.common.statistics import median_bounds


def exact(count: int, skipped: int) -> float:
    """How sure the median is no less than the value with so many below it: more tosses of a coin are heads."""
    return 1 - sum(comb(count, heads) for heads in range(skipped + 1)) / 2**count


@pytest.mark.parametrize("certainty", [0.95, 0.975])
def test_the_median_lies_between_them_as_surely_as_was_asked(certainty: float) -> None:
    for count in range(6, 400):
        skipped, high = median_bounds(range(count), certainty)
        assert skipped + high == count - 1
        assert exact(count, int(skipped)) >= certainty - 0.0005
        assert exact(count, int(skipped) + 2) < certainty, "they lie further apart than they need to"


@pytest.mark.parametrize(("late", "of"), [(5, 5), (7, 8), (12, 16)])
def test_so_many_of_the_values_have_to_be_beyond_a_bound(late: int, of: int) -> None:
    assert median_bounds([0] * (of - late) + [1] * late, 0.95)[0] == 1
    assert median_bounds([0] * (of - late + 1) + [1] * (late - 1), 0.95)[0] == 0


def test_of_few_values_they_are_the_outermost() -> None:
    assert [median_bounds(range(count), 0.975) for count in (1, 2, 3, 4)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
