"""The second view: one step or the last seconds, with zoom and a cursor that measures."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.tui.models.lanes import step_lanes
from ddpwatch.tui.models.timeline import Cursor, Timeline, Window, inspect, timeline_of_seconds, timeline_of_step
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.page import no_step
from ddpwatch.tui.paint.timeline import paint_timeline, ranks_in_view, timeline_axis, timeline_rows
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView, hidden


class TimelineView(RunView):
    """One step, all ranks on one axis, or the rolling last seconds."""

    NAME = "Timeline"
    DEFINITIONS = """\
  ←→ j k  cursor, by cell and rank    + - 0   zoom in, out, full step
  H L     pan                         m       measure from here, or stop
  S       slowest step                n N     next, previous incident
  g       go to a step                r       the rolling last seconds
  v       denser rows
  Numbers are buckets, dots are idle time, ▸ a launch, ⡇ a gradient
  that is ready, ◆ a mark. A bucket waits for the last rank to launch
  it, then its data travels: ██ hidden behind compute, ╱╱ exposed;
  ╍╍ waits behind compute, ╲╲ exposed. Dense rows show compute in the
  upper half of a cell, communication in the lower half. Times count
  from the start of the first rank's step. To keep the cost down, a
  step may be "timed in part" (without its collectives), or "duration
  only"."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1)", "cursor", key_display="←→"),
        hidden("right,l", "move(1)", "Cursor right"),
        hidden("shift+left,b", "move(-10)", "Cursor far left"),
        hidden("shift+right,w", "move(10)", "Cursor far right"),
        hidden("H", "pan(-0.5)", "Pan left"),
        hidden("L", "pan(0.5)", "Pan right"),
        Binding("plus,equals_sign", "zoom(1)", "zoom", key_display="+ -"),
        hidden("minus", "zoom(-1)", "Zoom out"),
        hidden("0", "zoom_reset", "Full step"),
        Binding("m", "measure", "measure"),
        Binding("r", "rolling", "seconds"),
        hidden("v", "density", "Denser rows"),
    ]

    def __init__(self, session: ViewerSession, window_s: float) -> None:
        super().__init__(session)
        self.window_s = window_s
        self.forget()

    def forget(self) -> None:
        self.window = Window.all_of(1)
        self.cursor = Cursor(at_ns=-1)
        self.first = 0
        self.density = 0
        self.seconds: float | None = None
        self._comm_rows = 1

    def body(self, width: int, height: int) -> list[Row]:
        timeline = self.timeline()
        if timeline is None:
            return no_step(width, height)
        self._fit(timeline, height)
        found = inspect(timeline, self.cursor, self.session.state.layouts)
        return paint_timeline(timeline, self.window, self.cursor, found, (width, height), self.first, self.density)

    @property
    def marked_rank(self) -> int | None:
        """See `RunView.marked_rank`."""
        return self.cursor.rank

    def timeline(self) -> Timeline | None:
        """Returns the steps on the axis; None before the first."""
        session, step = self.session, self.session.step_shown
        if step is None:
            return None
        ranks = session.ranks_of(step)
        lanes = step_lanes(step, session.state.ranks, self._comm_rows, set(ranks), session.state.marks)
        self._comm_rows = lanes.comm_rows
        lanes = replace(lanes, before_hang=session.overview.standstill_ns is not None)
        if self.seconds is None or not step.comparable:
            return timeline_of_step(step, lanes)
        steps = [other for other in session.steps if other.step <= step.step]
        seconds = timeline_of_seconds(steps, self.seconds, ranks, self._comm_rows, session.state.marks)
        return replace(seconds, title=f"{seconds.title}, before the hang") if lanes.before_hang else seconds

    def _fit(self, timeline: Timeline, height: int) -> None:
        """Keeps window, cursor and first rank within the timeline."""
        self.window = self.window.fitted(timeline.length_ns)
        at = self.cursor.at_ns if self.cursor.at_ns >= 0 else timeline.length_ns // 2
        rank = self.session.rank_in_sight(timeline.ranks)
        self.cursor = Cursor(min(at, timeline.length_ns - 1), rank, self.cursor.mark_ns)
        room = ranks_in_view(timeline, height, self.density)
        index = timeline.ranks.index(rank) if rank is not None else 0
        self.first = min(max(self.first, index - room + 1), index)
        self.first = min(self.first, max(len(timeline.ranks) - room, 0))

    # -- keys ------------------------------------------------------------------------------------------------

    def action_move(self, cells: int) -> None:
        """Moves the cursor by cells; the window follows."""
        timeline = self.timeline()
        if timeline is None:
            return
        axis = timeline_axis(timeline, self.window, self.size.width)
        at = self.cursor.at_ns + round(cells * axis.length_ns / axis.width)
        self._move_cursor(min(max(at, 0), timeline.length_ns - 1))

    def _move_cursor(self, at_ns: int) -> None:
        self.cursor = Cursor(at_ns, self.cursor.rank, self.cursor.mark_ns)
        self.session.rank = self.cursor.rank if self.session.rank is None else self.session.rank
        self.window = self.window.showing(at_ns)
        self.repaint()

    def action_pan(self, share: float) -> None:
        """Moves the window by a share of its length; the cursor stays in it."""
        self.window = self.window.pan(share)
        end = self.window.start_ns + self.window.length_ns - 1
        self._move_cursor(min(max(self.cursor.at_ns, self.window.start_ns), end))

    def action_zoom(self, by: int) -> None:
        """Zooms around the cursor."""
        self.window = self.window.zoom(2.0**by, self.cursor.at_ns)
        self.repaint()

    def action_zoom_reset(self) -> None:
        """Shows the complete axis."""
        self.window = Window.all_of(self.window.axis_ns)
        self.repaint()

    def action_measure(self) -> None:
        """Starts to measure from the cursor, or stops."""
        mark = self.cursor.at_ns if self.cursor.mark_ns is None else None
        self.cursor = Cursor(self.cursor.at_ns, self.cursor.rank, mark)
        self.repaint()

    def action_rolling(self) -> None:
        """Shows the last seconds, or one step again."""
        self.seconds = self.window_s if self.seconds is None else None
        self.window = Window.all_of(1)
        self.cursor = Cursor(at_ns=-1, rank=self.cursor.rank)
        self.repaint()

    def action_density(self) -> None:
        """Shows more ranks at once."""
        self.density = (self.density + 1) % 3
        self.repaint()

    def scroll_ranks(self, by: int) -> None:
        """Moves the cursor by ranks."""
        timeline = self.timeline()
        if timeline is None or self.cursor.rank not in timeline.ranks:
            return
        self.session.follow_slowest = False
        index = timeline.ranks.index(self.cursor.rank) + by
        self.session.rank = timeline.ranks[min(max(index, 0), len(timeline.ranks) - 1)]
        self.repaint()

    def clicked(self, x: int, y: int) -> None:
        """Moves the cursor there."""
        timeline = self.timeline()
        if timeline is None:
            return
        axis = timeline_axis(timeline, self.window, self.size.width)
        rows = timeline_rows(timeline, self.body_height, self.density)
        index = self.first + max(y - 1, 0) // rows.height
        if x >= axis.left and index < len(timeline.ranks):
            self.session.rank = timeline.ranks[index]
            self._move_cursor(min(max(axis.time(x), 0), timeline.length_ns - 1))
