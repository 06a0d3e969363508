"""The second view: one step or the last seconds, with zoom, cursor and measuring."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.tui.models.lanes import timeline_of
from ddpwatch.tui.models.timeline import Cursor, Trace, Window, inspect, trace_of_seconds, trace_of_step
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.timeline import paint_trace, ranks_in_view, trace_axis, trace_rows
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView

SECONDS = 3.0


class TimelineView(RunView):
    """One step, all ranks on one axis, or the rolling last seconds."""

    NAME = "Timeline"
    KEYS = (("←→", "cursor"), ("+ -", "zoom"), ("m", "measure"), ("[ ]", "step"), ("S", "slowest"), ("n", "finding"),
            ("r", "seconds"))  # fmt: skip
    DEFINITIONS = """\
  ←→ j k  cursor, by cell and rank    + - 0   zoom in, out, whole step
  H L     pan                         m       measure from here (again: off)
  S       to the slowest step         n N     next, previous finding
  g       to a step by its number     r       the rolling last seconds
  v       denser rows
  Numbers are buckets, dots are idle time, ▾ ▸ a launch, ⡇ a gradient,
  ◆ a mark, ╱╱ exposed communication. waited: until the last rank launched
  the bucket. Times are from the start of the first rank's step. In a
  shadow step collectives are not timed, to keep down what watching costs,
  and of an unwatched one only begin and end are known."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1)", "cursor left"),
        Binding("right,l", "move(1)", "cursor right"),
        Binding("shift+left,b", "move(-10)", "cursor far left"),
        Binding("shift+right,w", "move(10)", "cursor far right"),
        Binding("H", "pan(-0.5)", "pan left"),
        Binding("L", "pan(0.5)", "pan right"),
        Binding("plus,equals_sign", "zoom(1)", "zoom in"),
        Binding("minus", "zoom(-1)", "zoom out"),
        Binding("0", "whole", "whole step"),
        Binding("m", "measure", "measure"),
        Binding("r", "rolling", "rolling seconds"),
        Binding("v", "density", "denser rows"),
    ]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.span_s = SECONDS
        self.forget()

    def forget(self) -> None:
        """See `RunView.forget`."""
        self.window = Window.all_of(1)
        self.cursor = Cursor(at_ns=-1)
        self.first = 0
        self.density = 0
        self.seconds: float | None = None
        self._comm_rows = 1

    def body(self, width: int, height: int) -> list[Row]:
        """See `RunView.body`."""
        trace = self.trace()
        if trace is None:
            return []
        self._settle(trace, height)
        found = inspect(trace, self.cursor, self.session.state)
        return paint_trace(trace, self.window, self.cursor, found, (width, height), self.first, self.density)

    def trace(self) -> Trace | None:
        """What is on the axis now."""
        view, session = self.session.view, self.session
        if view is None:
            return None
        ranks = session.shown(view)
        timeline = timeline_of(view, session.state.ranks, self._comm_rows, set(ranks), session.marks)
        self._comm_rows = timeline.comm_rows
        if self.seconds is None or not view.comparable:
            return trace_of_step(view, timeline)
        steps = [other for other in session.steps if other.step <= view.step]
        return trace_of_seconds(steps, self.seconds, ranks, self._comm_rows, list(session.marks))

    def _settle(self, trace: Trace, height: int) -> None:
        """Keeps window, cursor and first rank inside what there is."""
        self.window = self.window.fitted(trace.length_ns)
        at = self.cursor.at_ns if self.cursor.at_ns >= 0 else trace.length_ns // 2
        wanted = self.session.followed_rank()
        rank = self.session.rank if wanted is None else wanted
        if rank not in trace.ranks:
            rank = trace.ranks[0] if trace.ranks else None
        self.session.rank = rank
        self.cursor = Cursor(min(at, trace.length_ns - 1), rank, self.cursor.mark_ns)
        room = ranks_in_view(trace, height, self.density)
        place = trace.ranks.index(rank) if rank is not None else 0
        self.first = min(max(self.first, place - room + 1), place)
        self.first = min(self.first, max(len(trace.ranks) - room, 0))

    # -- keys ------------------------------------------------------------------------------------------------

    def action_move(self, cells: int) -> None:
        """The cursor, by cells; the window follows."""
        trace = self.trace()
        if trace is None:
            return
        axis = trace_axis(trace, self.window, self.size.width)
        at = self.cursor.at_ns + round(cells * axis.length_ns / axis.width)
        self._point(min(max(at, 0), trace.length_ns - 1))

    def _point(self, at_ns: int) -> None:
        self.cursor = Cursor(at_ns, self.cursor.rank, self.cursor.mark_ns)
        self.window = self.window.showing(at_ns)
        self.repaint()

    def action_pan(self, share: float) -> None:
        """The window, by a share of itself; the cursor stays in it."""
        self.window = self.window.pan(share)
        end = self.window.start_ns + self.window.length_ns - 1
        self._point(min(max(self.cursor.at_ns, self.window.start_ns), end))

    def action_zoom(self, by: int) -> None:
        """Around the cursor."""
        self.window = self.window.zoom(2.0**by, self.cursor.at_ns)
        self.repaint()

    def action_whole(self) -> None:
        """The whole step."""
        self.window = Window.all_of(self.window.whole_ns)
        self.repaint()

    def action_measure(self) -> None:
        """Measures from here on, or no longer."""
        mark = self.cursor.at_ns if self.cursor.mark_ns is None else None
        self.cursor = Cursor(self.cursor.at_ns, self.cursor.rank, mark)
        self.repaint()

    def action_rolling(self) -> None:
        """One step, or the last seconds."""
        self.seconds = self.span_s if self.seconds is None else None
        self.window = Window.all_of(1)
        self.cursor = Cursor(at_ns=-1, rank=self.cursor.rank)
        self.repaint()

    def action_density(self) -> None:
        """More ranks at once."""
        self.density = (self.density + 1) % 3
        self.repaint()

    def scroll_ranks(self, by: int) -> None:
        """The cursor, by ranks."""
        trace = self.trace()
        if trace is None or self.cursor.rank not in trace.ranks:
            return
        self.session.follow_slowest = False
        place = trace.ranks.index(self.cursor.rank) + by
        self.session.rank = trace.ranks[min(max(place, 0), len(trace.ranks) - 1)]
        self.repaint()

    def clicked(self, x: int, y: int) -> None:
        """The cursor goes there."""
        trace = self.trace()
        if trace is None:
            return
        axis = trace_axis(trace, self.window, self.size.width)
        rows = trace_rows(trace, self.body_height, self.density)
        place = self.first + max(y - 1, 0) // rows.height
        if x >= axis.left and place < len(trace.ranks):
            self.session.rank = trace.ranks[place]
            self._point(min(max(axis.time(x), 0), trace.length_ns - 1))
