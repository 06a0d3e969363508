"""The bounds of a median, against the exact binomial distribution."""

from __future__ import annotations

from math import comb

import pytest

from ddpwatch.analysis.bounds import median_bounds


def certainty(count: int, skipped: int) -> float:
    """How sure the median lies above the value that so many are less than: not so many tosses of a coin are heads."""
    return 1 - sum(comb(count, heads) for heads in range(skipped + 1)) / 2**count


@pytest.mark.parametrize("count", range(5, 300))
def test_the_median_lies_between_them_as_surely_as_they_say(count: int) -> None:
    low, high = median_bounds(range(count))
    assert low + high == count - 1
    assert certainty(count, int(low)) >= 0.96
    assert certainty(count, int(low) + 1) < 0.985  # and no nearer ones do, by much


def test_of_few_values_they_are_the_outermost() -> None:
    assert [median_bounds(range(count)) for count in (1, 2, 3, 4)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    with pytest.raises(IndexError):
        median_bounds([])
