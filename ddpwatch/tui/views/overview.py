"""The first view: figures, verdict, lanes, ranks and devices on one screen."""

from __future__ import annotations

from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.lanes import capacity
from ddpwatch.tui.paint.overview import overview_layout, paint_overview
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView


class OverviewView(RunView):
    """Everything that matters most, on one screen."""

    NAME = "Overview"
    DEFINITIONS = """\
  overlap   share of communication time in which the rank also computed
            (forward or backward)
  exposed   communication time in which it did not, so training waits:
            a mean of ranks, of which a late one waits for nobody
  late      how long after the first rank it launched a bucket, at most
            (also if it waited for DDP's buffers)
  wait      how long its bucket waited for the last rank, at most
  mem       of the rank's host, without files' pages; of its GPU, what
            torch has reserved (4, Enter: and the peaks)
  slowest   the latest rank, if it is late beyond the noise
  overhead  the share of a step that watching adds: CPU time of watched
            steps against others beside them, twice what its hooks
            measure of themselves there, its thread and collector; 95 %
            interval"""

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.first_rank: int | None = None  # until the user scrolls, the lanes are of the ranks worth a look

    def body(self, width: int, height: int) -> list[Row]:
        if (followed := self.session.followed_rank()) is not None:
            self.first_rank = min(max(self._index(followed) - 1, 0), self._last_first())
        return paint_overview(self.session.overview, width, height, self.first_rank)

    def forget(self) -> None:
        self.first_rank = None

    def scroll_ranks(self, by: int) -> None:
        """Scrolls the ranks, if not all of them fit."""
        self.session.follow_slowest = False
        least = -1 if self.session.overview.worst else 0  # above the first rank are those worth a look
        before = least if self.first_rank is None else self.first_rank
        at = min(max(before + by, least), self._last_first())
        first = None if at < 0 else at
        if first != self.first_rank:
            self.first_rank = first
            self.repaint()

    def _index(self, rank: int) -> int:
        ranks = self.session.overview.ranks
        return next((index for index, line in enumerate(ranks) if line.rank == rank), 0)

    def _last_first(self) -> int:
        """Returns the highest first rank that still has the last rank in view, in lanes and table."""
        model = self.session.overview
        boxes = overview_layout(model, self.size.width, self.body_height)
        room = max(boxes.table.height - 1, 1)
        if model.lanes is not None:
            room = min(room, capacity(model.lanes, boxes.lanes.height))
        return max(len(model.ranks) - room, 0)
