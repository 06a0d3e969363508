"""Charts for a terminal: step time and exposed communication over the run."""

from __future__ import annotations

import plotext

from ddpwatch.analysis.run_outline import Outline

FEWEST_POINTS = 8


def charts(outline: Outline, width: int) -> str:
    """Returns two charts, one above the other; "" for a run too short to draw.

    Args:
        outline: Of the run.
        width: In columns.
    """
    points = outline.points
    if len(points) < FEWEST_POINTS:
        return ""
    steps = [float(point.step) for point in points]
    drawn = [chart("step time (ms)", steps, [point.step_ms for point in points], width)]
    exposed = [(float(point.step), point.exposed_ms) for point in points if point.exposed_ms is not None]
    if len(exposed) >= FEWEST_POINTS:
        drawn.append(chart("exposed communication (ms)", [x for x, _ in exposed], [y for _, y in exposed], width))
    return "\n\n".join(drawn)


def chart(title: str, x: list[float], y: list[float], width: int) -> str:
    """Returns one chart, in columns of characters."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(max(40, min(width, 120)), 10)
    plotext.title(title)
    plotext.ylim(0, max(y) or 1)
    plotext.plot(x, y, marker="braille")
    lines = str(plotext.uncolorize(plotext.build())).splitlines()
    return "\n".join(line.rstrip() for line in lines)
