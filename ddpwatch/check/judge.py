"""Compares what ranks have measured with each other: who is slower than the median, by name.

All ranks measure at the same time, in rounds. In each round, a rank's figure is divided by the median of all; it is
slow if the median of these shares is surely below a limit. So a disturbance that passes names nobody, and none that
strikes all alike does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from ddpwatch.analysis.diagnosis.incident_json import Figures
from ddpwatch.common.statistics import median, median_bounds, p50
from ddpwatch.common.text import clean, percent, spans, three_digits

MeasureName = Literal["matrix products", "memory", "clock", "disk", "link", "all-reduce"]
CERTAINTY = 0.999
FEWEST_PAIRS = 3  # of which one can be the slow one


class Limit(msgspec.Struct, frozen=True):
    """The unit of a measure, and the share of the median below which it is slow."""

    unit: str
    slow: float


LIMITS: Mapping[MeasureName, Limit] = {
    "matrix products": Limit("GFLOP/s", 0.9),
    "memory": Limit("GB/s", 0.85),
    "clock": Limit("MHz", 0.95),
    "disk": Limit("MB/s", 0.5),
    "link": Limit("MB/s", 0.8),
    "all-reduce": Limit("MB/s", 0.0),  # busbw of all
}


class RankMeasures(msgspec.Struct, kw_only=True):
    """The measurements of one rank: a figure for each round, None where there is none.

    Attributes:
        links: By the other rank of the pair.
    """

    rank: int
    host: str
    device: str
    figures: dict[MeasureName, list[float | None]]
    links: dict[int, list[float | None]]


class MeasuredFigure(Figures, frozen=True):
    """A figure of a rank, of two, or of all: its median, and its share of the others' median."""

    measure: MeasureName
    ranks: Sequence[int]
    hosts: Sequence[str]
    value: float
    unit: str
    share: float | None
    slow: bool


class CheckResult(Figures, frozen=True):
    """All that was measured. ``slow``: what is wrong, in sentences."""

    hosts: Sequence[str]
    ranks: int
    device: str
    rounds: int
    figures: Sequence[MeasuredFigure]
    slow: Sequence[str]


@dataclass
class _Row:
    """The figures of a rank, or of a pair, by round."""

    ranks: tuple[int, ...]
    values: Sequence[float | None]


def judge(reports: Sequence[RankMeasures]) -> CheckResult:
    """Returns what ranks have measured, and who is slow. All have the same rounds."""
    reports = sorted(reports, key=lambda report: report.rank)
    hosts = {report.rank: clean(report.host) for report in reports}
    figures: list[MeasuredFigure] = []
    for measure in LIMITS:
        rows = [_Row((one.rank,), one.figures[measure]) for one in reports if measure in one.figures]
        if measure == "all-reduce":
            rows = [_Row(tuple(hosts), row.values) for row in rows[:1]]
        figures += _compared(measure, rows, hosts)
    figures += _links(reports, hosts)
    return CheckResult(
        hosts=sorted(set(hosts.values())),
        ranks=len(reports),
        device=clean(reports[0].device),
        rounds=max(len(values) for values in reports[0].figures.values()),
        figures=figures,
        slow=_sentences(figures, hosts),
    )


def _links(reports: Sequence[RankMeasures], hosts: Mapping[int, str]) -> list[MeasuredFigure]:
    """Judges each rank by the fastest of its pairs, then pairs of ranks that are not slow: within hosts, and between.

    A rank with a slow link has no fast pair, and the others have one, with each other.
    """
    by_pair = {(one.rank, peer): values for one in reports for peer, values in one.links.items()}
    pairs = [_Row(pair, _slower(values, by_pair[pair[::-1]])) for pair, values in by_pair.items() if pair[0] < pair[1]]
    found: list[MeasuredFigure] = []
    for within in (True, False):
        here = [row for row in pairs if (hosts[row.ranks[0]] == hosts[row.ranks[1]]) is within]
        ranks = sorted({rank for row in here for rank in row.ranks})
        best = [_Row((rank,), _fastest(row.values for row in here if rank in row.ranks)) for rank in ranks]
        judged = _compared("link", best, hosts) if len(here) >= FEWEST_PAIRS else []
        slow = {rank for figure in judged if figure.slow for rank in figure.ranks}
        found += [figure for figure in judged if figure.slow]
        found += _compared("link", [row for row in here if not slow & {*row.ranks}], hosts)
    return found


def _slower(a: Sequence[float | None], b: Sequence[float | None]) -> list[float | None]:
    return [None if x is None or y is None else min(x, y) for x, y in zip(a, b, strict=True)]


def _fastest(rows: Iterable[Sequence[float | None]]) -> list[float | None]:
    return [max((value for value in values if value is not None), default=None) for values in zip(*rows, strict=True)]


def _compared(measure: MeasureName, rows: Sequence[_Row], hosts: Mapping[int, str]) -> list[MeasuredFigure]:
    """Returns the rows' figures, with their shares of the median of all in each round."""
    limit, found = LIMITS[measure], []
    middles = [p50(values) for values in zip(*(row.values for row in rows), strict=True)]
    fewest = FEWEST_PAIRS if rows and len(rows[0].ranks) == 2 else 2
    for row in rows:
        known = [(value, middle) for value, middle in zip(row.values, middles, strict=True) if value and middle]
        if not known:
            continue
        shares = [value / middle for value, middle in known] if len(rows) >= fewest else []
        found.append(
            MeasuredFigure(
                measure=measure,
                ranks=row.ranks,
                hosts=list(dict.fromkeys(hosts[rank] for rank in row.ranks)),
                value=median(value for value, _ in known),
                unit=limit.unit,
                share=median(shares) if shares else None,
                slow=bool(shares) and median_bounds(shares, CERTAINTY)[1] < limit.slow,
            )
        )
    return found


def _sentences(figures: Sequence[MeasuredFigure], hosts: Mapping[int, str]) -> list[str]:
    """Names who is slow: a host, if all of its ranks are."""
    said = []
    for measure in LIMITS:
        slow = [figure for figure in figures if figure.measure == measure and figure.slow]
        single = {figure.ranks[0]: figure for figure in slow if len(figure.ranks) == 1}
        for host in dict.fromkeys(hosts[rank] for rank in single):
            ranks = [rank for rank in single if hosts[rank] == host]
            worst = min((single[rank] for rank in ranks), key=lambda figure: figure.share or 0.0)
            name = f"rank{'s'[: len(ranks) - 1]} {spans(ranks)} ({host})"
            if len(set(hosts.values())) > 1 and len(ranks) == sum(other == host for other in hosts.values()):
                name = f"{host} (rank{'s'[: len(ranks) - 1]} {spans(ranks)})"
            said.append(f"{name}: {_about(worst)}")
        said += [
            f"ranks {figure.ranks[0]} and {figure.ranks[1]} ({' and '.join(figure.hosts)}): {_about(figure)}"
            for figure in slow
            if len(figure.ranks) == 2
        ]
    return said


def _about(figure: MeasuredFigure) -> str:
    return f"{figure.measure} {three_digits(figure.value)} {figure.unit}, {percent(figure.share)} of the median"
