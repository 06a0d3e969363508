"""plotext, called rarely: a chart is built at most once per data and size, and the last few are kept."""

from __future__ import annotations

import re
from functools import lru_cache

from ddpwatch.tui.paint.canvas import Canvas, Row

Points = tuple[tuple[float, float], ...]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RUNS = re.compile("[⠀-⣿]+|[^⠀-⣿]+")
_SPANS = (30, 60, 120)


def paint_chart(canvas: Canvas, points: Points, box: tuple[int, int, int, int]) -> None:
    """Percent over the last seconds in (x, y, width, height); ``points`` are (-age s, %), oldest first."""
    x, y, width, height = box
    for line, runs in enumerate(chart_rows(points, width, height), start=y):
        canvas.put_runs(x, line, runs)


@lru_cache(maxsize=16)
def chart_rows(points: Points, width: int, height: int) -> list[Row]:
    """The chart's lines, curve and axes told apart."""
    return [
        [(text, "chart" if _is_curve(text[0]) else "dim") for text in _RUNS.findall(line)]
        for line in chart(points, width, height)
    ]


def _is_curve(char: str) -> bool:
    return "⠀" <= char <= "⣿"


def chart(points: Points, width: int, height: int) -> list[str]:
    """Percent over the last seconds as lines of text."""
    import plotext  # slow to import, and not needed for the first paint

    oldest = -points[0][0] if points else 0
    span = next((seconds for seconds in _SPANS if oldest <= seconds), _SPANS[-1])
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    plotext.frame(False)
    plotext.ylim(0, 100)
    plotext.xlim(-span, 0)
    plotext.yticks([0, 50, 100] if height >= 6 else [0, 100])
    plotext.xticks([-span, -span / 2, 0], [f"-{span} s", f"-{span // 2} s", "now"])
    if points:
        plotext.plot([x for x, _ in points], [y for _, y in points], marker="braille")
    return [_ANSI.sub("", line).rstrip() for line in plotext.build().splitlines()]
