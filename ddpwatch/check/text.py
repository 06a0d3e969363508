"""The result of a check as text: who is slow, then the median and the slowest of each measure."""

from __future__ import annotations

from ddpwatch.check.judge import LIMITS, CheckResult, MeasuredFigure
from ddpwatch.common.statistics import median
from ddpwatch.common.text import counted, percent, spans, table, three_digits

_HEADER = ["", "unit", "median", "slowest", "of the median", "ranks"]


def render_check(result: CheckResult) -> str:
    """Returns the result as text."""
    ranks, hosts = counted(result.ranks, "rank"), counted(len(result.hosts), "host")
    lines = [f"{ranks} on {hosts}, {result.device}: {result.rounds} rounds"]
    nobody = (
        "no rank, host or link is slower than the others"
        if result.ranks > 1
        else "there is no other to compare it with"
    )
    lines += [f"slow: {text}" for text in result.slow] or [nobody]
    by_measure = {
        name: found for name in LIMITS if (found := [figure for figure in result.figures if figure.measure == name])
    }
    return "\n".join([*lines, "", *table(_HEADER, [_row(name, found) for name, found in by_measure.items()])])


def _row(name: str, found: list[MeasuredFigure]) -> list[str]:
    worst = min(found, key=lambda figure: 1.0 if figure.share is None else figure.share)
    row = [name, worst.unit, three_digits(median(figure.value for figure in found))]
    return [
        *row,
        *([three_digits(worst.value), percent(worst.share), spans(worst.ranks)] if worst.share else ["–"] * 3),
    ]
