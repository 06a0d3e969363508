"""The colours of a heatmap: what is bad stands out, among few rows and among many."""

from __future__ import annotations

from array import array

import pytest

from ddpwatch.tui.models.ranks import RankMetric, _scale

LATE = RankMetric("late", "lateness")


@pytest.mark.parametrize("rows", [4, 128])
def test_one_row_that_is_always_bad_sets_the_scale(rows: int) -> None:
    columns = [array("d", [12.0, *[0.3] * (rows - 1)])] * 20
    assert _scale(columns, LATE) == (0.0, 12.0)


@pytest.mark.parametrize("rows", [4, 128])
def test_one_outlier_does_not(rows: int) -> None:
    columns = [array("d", [0.3] * rows) for _ in range(20)]
    columns[7][1] = 500.0
    assert _scale(columns, LATE)[1] == 0.3
    columns[3][2] = float("nan")
    assert _scale(columns, LATE)[1] == 0.3
