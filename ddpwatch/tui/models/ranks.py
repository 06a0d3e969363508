"""The Ranks view's model: a metric by rank and step as levels, many ranks combined in groups."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ddpwatch.state import StepAcrossRanks

SHADES = 6
_HIGH_QUANTILE = 0.98  # of the values shown; the highest level starts here, so that one outlier does not hide the rest


@dataclass(frozen=True, slots=True)
class Metric:
    """What a cell shows.

    Attributes:
        name: One of `ddpwatch.analysis.across_ranks.METRICS`.
        inverted: Low values stand out.
    """

    name: str
    title: str
    unit: str = "ms"
    inverted: bool = False


METRICS = (
    Metric("late", "lateness"),
    Metric("step", "step time"),
    Metric("exposed", "exposed communication"),
    Metric("overlap", "overlap", "%", True),
    Metric("data", "waiting for data"),
    Metric("between", "between optimizer and forward"),
)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Rows of ranks by columns of steps, oldest left.

    Attributes:
        groups: The ranks of each row; a cell is the worst of them.
        steps: The columns' step numbers.
        columns: Values per step and row (ns; overlap: a ratio), NaN if unknown.
        low, high: The values of the lowest and the highest level.
    """

    metric: Metric
    groups: Sequence[Sequence[int]]
    steps: Sequence[int]
    columns: Sequence[array[float]]
    low: float
    high: float

    def level(self, column: int, row: int) -> int | None:
        """0 to SHADES - 1, None if unknown."""
        value = self.columns[column][row]
        if math.isnan(value):
            return None
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        share = 1 - share if self.metric.inverted else share
        return min(max(math.ceil(share * (SHADES - 1) - 0.5), 0), SHADES - 1)


class HeatMaps:
    """Makes heatmaps. Keeps a step's column while rows and metric stay the same."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._columns: dict[int, tuple[int, array[float]]] = {}

    def build(self, steps: Sequence[StepAcrossRanks], metric: Metric, groups: Sequence[Sequence[int]]) -> HeatMap:
        """Makes the map of the given steps, oldest first."""
        key = (metric.name, len(groups), groups[0][0] if groups else None, sum(map(len, groups)))
        if key != self._key:
            self._key, self._columns = key, {}
        columns = [self._column(step, metric, groups) for step in steps]
        self._columns = {step.step: self._columns[step.step] for step in steps}
        low, high = _scale(columns, metric)
        return HeatMap(metric, groups, [step.step for step in steps], columns, low, high)

    def _column(self, step: StepAcrossRanks, metric: Metric, groups: Sequence[Sequence[int]]) -> array[float]:
        known = self._columns.get(step.step)
        if known is None or known[0] != len(step):
            known = self._columns[step.step] = (len(step), _column(step, metric, groups))
        return known[1]


def _column(step: StepAcrossRanks, metric: Metric, groups: Sequence[Sequence[int]]) -> array[float]:
    row = step.row(metric.name)
    index = {rank: position for position, rank in enumerate(sorted(step.members))}
    worst = min if metric.inverted else max
    column = array("d")
    for group in groups:
        values = [row[index[rank]] for rank in group if rank in index]
        column.append(worst((value for value in values if value == value), default=math.nan))
    return column


def _scale(columns: Sequence[array[float]], metric: Metric) -> tuple[float, float]:
    if metric.unit == "%":
        return 0.0, 1.0
    values = sorted(value for column in columns for value in column if value == value)
    if not values:
        return 0.0, 0.0
    low = values[0] if metric.name == "step" else 0.0
    return low, values[min(int(_HIGH_QUANTILE * len(values)), len(values) - 1)]


def groups_of(ranks: Sequence[int], rows: int) -> list[Sequence[int]]:
    """Divides the ranks into at most ``rows`` groups of neighbours."""
    each = max(math.ceil(len(ranks) / max(rows, 1)), 1)
    return [ranks[start : start + each] for start in range(0, len(ranks), each)]
