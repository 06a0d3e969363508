"""Line charts by plotext. A chart is built at most once per data and size; the last few are kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from ddpwatch.tui.models.devices import History
from ddpwatch.tui.paint.canvas import Canvas, Row

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RUNS = re.compile("[⠀-⣿]+|[^⠀-⣿]+")
_SPANS_S = (30, 60, 120)


def paint_chart(canvas: Canvas, points: History, box: tuple[int, int, int, int]) -> None:
    """Paints percent over the last seconds in (x, y, width, height); ``points`` are (age in s, %), oldest first."""
    x, y, width, height = box
    for line, runs in enumerate(chart_rows(points, width, height), start=y):
        canvas.put_runs(x, line, runs)


@lru_cache(maxsize=16)
def chart_rows(points: History, width: int, height: int) -> list[Row]:
    """Returns the chart's lines; curve and axes differ in style."""
    return [
        [(text, "chart" if _is_curve(text[0]) else "dim") for text in _RUNS.findall(line)]
        for line in chart(points, width, height)
    ]


def _is_curve(char: str) -> bool:
    return "⠀" <= char <= "⣿"


def chart(points: Sequence[tuple[int, float]], width: int, height: int) -> list[str]:
    """Returns the chart's lines as text."""
    import plotext  # slow to import, and not needed for the first paint

    oldest = points[0][0] if points else 0
    span = next((seconds for seconds in _SPANS_S if oldest <= seconds), _SPANS_S[-1])
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    plotext.frame(False)
    plotext.ylim(0, 100)
    plotext.xlim(-span, 0)
    plotext.yticks([0, 50, 100] if height >= 6 else [0, 100])
    plotext.xticks([-span, -span / 2, 0], [f"-{span} s", f"-{span // 2} s", "now"])
    if points:
        plotext.plot([-age for age, _ in points], [value for _, value in points], marker="braille")
    return [_ANSI.sub("", line).rstrip() for line in plotext.build().splitlines()]
