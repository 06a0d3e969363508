"""The Ranks view's model: a metric by rank and step as levels, many ranks combined in groups."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.common.statistics import quantile
from ddpwatch.tui.models.incidents import strip
from ddpwatch.tui.models.overview import Overview
from ddpwatch.viewer.state import StepAcrossRanks

SHADES = 6
_HIGH_QUANTILE = 0.98  # of the values shown; the highest level starts here, so that one outlier does not hide the rest


@dataclass(frozen=True, slots=True)
class RankMetric:
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
    RankMetric("late", "lateness"),
    RankMetric("step", "step time"),
    RankMetric("exposed", "exposed communication"),
    RankMetric("overlap", "overlap", "%", True),
    RankMetric("data", "waiting for data"),
    RankMetric("between", "gap before the forward"),
)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Rows of ranks by columns of steps, oldest left.

    Attributes:
        groups: The ranks of each row; a cell is the worst of them.
        steps: The columns' step numbers.
        columns: Values per step and row (ns; overlap: a ratio), NaN if unknown.
        low, high: The values of the lowest and the highest level.
        struck: The worst incident in each step.
        costs: Rank-time (ns) that others waited for each row's ranks; empty if nobody was waited for.
        total_ns: The rank-time of the run.
        process_groups: The process groups of each row's first rank; empty if there is only one.
        hosts: Each row's host, or hosts; empty if there is only one.
        unseen: How many of each row's ranks are unseen; empty if all are seen.
        clock_error_ns: How far lateness may be off; None if it is not over several clocks.
        buffers: Lateness has waits for DDP's buffers in it.
    """

    metric: RankMetric
    groups: Sequence[Sequence[int]]
    steps: Sequence[int]
    columns: Sequence[array[float]]
    low: float
    high: float
    struck: Sequence[Incident | None] = ()
    costs: Sequence[int] = ()
    total_ns: int = 0
    process_groups: Sequence[str] = ()
    hosts: Sequence[str] = ()
    unseen: Sequence[int] = ()
    clock_error_ns: int | None = None
    buffers: bool = False

    def level(self, column: int, row: int) -> int | None:
        """Returns 0 to SHADES - 1, None if unknown."""
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

    def build(self, steps: Sequence[StepAcrossRanks], metric: RankMetric, groups: Sequence[Sequence[int]]) -> HeatMap:
        """Makes the map of the given steps, oldest first."""
        key = (metric.name, tuple(map(tuple, groups)))
        if key != self._key:
            self._key, self._columns = key, {}
        columns = [self._column(step, metric, groups) for step in steps]
        self._columns = {step.step: self._columns[step.step] for step in steps}
        low, high = _scale(columns, metric)
        return HeatMap(metric, groups, [step.step for step in steps], columns, low, high)

    def _column(self, step: StepAcrossRanks, metric: RankMetric, groups: Sequence[Sequence[int]]) -> array[float]:
        known = self._columns.get(step.step)
        if known is None or known[0] != len(step):
            known = self._columns[step.step] = (len(step), _column(step, metric, groups))
        return known[1]


def with_diagnosis(heat: HeatMap, overview: Overview) -> HeatMap:
    """Returns the heatmap with the incidents in its steps, what its rows cost, their process groups and their hosts."""
    found = overview.diagnosed
    cost = found.waited_for
    groups = [_groups_named(overview.groups.get(row[0], ())) for row in heat.groups] if overview.groups else []
    return replace(
        heat,
        struck=strip(found.incidents, heat.steps, overview.now_ns),
        costs=[sum(cost.get(rank, 0) for rank in row) for row in heat.groups] if cost else (),
        total_ns=found.lost.rank_ns,
        process_groups=groups,
        hosts=[_hosts_named(row, overview.hosts) for row in heat.groups] if overview.hosts else (),
        unseen=[len(overview.unseen.intersection(row)) for row in heat.groups] if overview.unseen else (),
        clock_error_ns=overview.clock_error_ns if heat.metric.name == "late" else None,
        buffers=overview.buffers and heat.metric.name == "late",
    )


def _hosts_named(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    first, last = _short(hosts.get(ranks[0], "")), _short(hosts.get(ranks[-1], ""))
    return first if first == last else f"{first}–{last}"


def _short(host: str) -> str:
    """Returns a host's name without its domain; an address as it is."""
    called, gap, ranks = host.partition(" ")
    name = called.partition(".")[0]
    return host if name.isdecimal() else f"{name}{gap}{ranks}"


def _groups_named(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids[:3])) + ("…" if len(ids) > 3 else "")


def costliest_first(
    groups: Sequence[Sequence[int]], cost: Mapping[int, int], unseen: frozenset[int] = frozenset()
) -> list[Sequence[int]]:
    """Returns the rows by what their ranks cost; of those that cost nothing, first those with ranks that are unseen."""
    return sorted(groups, key=lambda row: (-sum(cost.get(rank, 0) for rank in row), unseen.isdisjoint(row)))


def _column(step: StepAcrossRanks, metric: RankMetric, groups: Sequence[Sequence[int]]) -> array[float]:
    row = step.row(metric.name)
    index = {rank: position for position, rank in enumerate(sorted(step.members))}
    worst = min if metric.inverted else max
    column = array("d")
    for group in groups:
        values = [row[index[rank]] for rank in group if rank in index]
        column.append(worst((value for value in values if value == value), default=math.nan))
    return column


def _scale(columns: Sequence[array[float]], metric: RankMetric) -> tuple[float, float]:
    if metric.unit == "%":
        return 0.0, 1.0
    values = sorted(value for column in columns for value in column if value == value)
    if not values:
        return 0.0, 0.0
    low = values[0] if metric.name == "step" else 0.0
    high = quantile(values, _HIGH_QUANTILE)
    if len(columns[0]) * (1 - _HIGH_QUANTILE) > 1:  # one row that is always bad is beyond the quantile
        rows = ([value for value in row if value == value] for row in zip(*columns, strict=True))
        high = max(high, *(median(row) for row in rows if row))
    return low, high


def groups_of(ranks: Sequence[int], rows: int) -> list[Sequence[int]]:
    """Divides the ranks into at most ``rows`` groups of neighbours."""
    each = max(math.ceil(len(ranks) / max(rows, 1)), 1)
    return [ranks[start : start + each] for start in range(0, len(ranks), each)]
