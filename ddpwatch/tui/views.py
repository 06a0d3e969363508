"""The views on a session. Each is a painted widget; the overview is the first."""

from __future__ import annotations

from ddpwatch.tui.canvas import Row
from ddpwatch.tui.paint.overview import overview_layout, paint_overview
from ddpwatch.tui.paint.timeline import capacity
from ddpwatch.tui.session import Session
from ddpwatch.tui.view import PaintedView


class OverviewView(PaintedView):
    """Figures, verdict, timeline, ranks and devices on one screen."""

    def __init__(self, session: Session, id: str | None = None) -> None:
        super().__init__(id=id)
        self._session = session
        self.first_rank = 0

    @property
    def stale(self) -> bool:
        """See `PaintedView.stale`."""
        return self._session.overview.link.stale

    def paint(self, width: int, height: int) -> list[Row]:
        """See `PaintedView.paint`."""
        return paint_overview(self._session.overview, width, height, self.first_rank)

    def scroll_ranks(self, by: int) -> None:
        """Shows other ranks, if not all of them fit."""
        first = min(max(self.first_rank + by, 0), self._last_first())
        if first != self.first_rank:
            self.first_rank = first
            self.repaint()

    def _last_first(self) -> int:
        """The first rank with which the last one is in view, in timeline and table."""
        model = self._session.overview
        boxes = overview_layout(model, *self.size)
        room = max(boxes.table.height - 1, 1)
        if model.timeline is not None:
            room = min(room, capacity(model.timeline, boxes.timeline.height))
        return max(len(model.ranks) - room, 0)
