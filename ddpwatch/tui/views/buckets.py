"""The third view: what each bucket costs, and one bucket in detail."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.analysis.buckets import BucketSummary, BucketTable
from ddpwatch.state import newest
from ddpwatch.tui.paint.buckets import COLUMNS, paint_bucket, paint_buckets
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.grid import sort_rows
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView

NEWEST = 50


class BucketsView(RunView):
    """Table and bars per bucket, sortable; Enter shows one bucket's history and parameters."""

    NAME = "Buckets"
    KEYS = (("↑↓", "select"), ("Enter", "detail"), ("s", "sort by"), ("o", "order"))
    DEFINITIONS = """\
  ready, launch, done  from the start of the first backward, p50 over
            ranks and the newest 50 steps
  wait      from its first to its last launch on any rank
  transfer  from its last launch to its last completion
  exposed   part of launch to done in which the rank did not compute
  busbw     bytes / transfer x 2(n-1)/n, as nccl-tests defines it
  last rank launched it last most often, in that share of steps"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "sort by the next column"),
        Binding("o", "order", "rising or falling"),
        Binding("enter", "detail", "one bucket"),
        Binding("escape", "back", "all buckets"),
    ]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.forget()

    def forget(self) -> None:
        """See `RunView.forget`."""
        self.table = BucketTable()
        self.selected: tuple[int, int] | None = None
        self.detail = False
        self.sorted_by = 0
        self.falling = False
        self.first = 0
        self.complete = True

    @property
    def pending(self) -> bool:
        """See `PaintedView.pending`: a large job's steps are worked out a few at a time."""
        return not self.complete

    def rows(self) -> list[BucketSummary]:
        """The table's rows, sorted."""
        views = newest(NEWEST, (view for view in reversed(self.session.steps) if view.counted))
        complete = [view for view in views if len(view) >= len(self.session.state.ranks)] or views
        self.complete = self.table.update(complete)
        return sort_rows(self.table.rows(), COLUMNS[self.sorted_by], self.falling)

    def body(self, width: int, height: int) -> list[Row]:
        """See `RunView.body`."""
        rows = self.rows()
        place = self._place(rows)
        if self.detail and rows:
            return self._detail(rows[place], width, height)
        room = max(height - 2, 1)
        self.first = min(max(self.first, place - room + 1), place)
        layers = [self.session.state.bucket_layer(row.index) for row in rows]
        return paint_buckets(rows, layers, (width, height), self.first, place, COLUMNS[self.sorted_by].heading)

    def _place(self, rows: list[BucketSummary]) -> int:
        places = [(row.module, row.index) for row in rows]
        return places.index(self.selected) if self.selected in places else 0

    def _detail(self, row: BucketSummary, width: int, height: int) -> list[Row]:
        params = self.session.state.bucket_params(row.index)
        history = self.table.history((row.module, row.index))
        return paint_bucket(row, history, params, self._fired(set(params)), (width, height), self.first)

    def _fired(self, params: set[str]) -> list[tuple[str, float]]:
        """The bucket's parameters in the order of their gradients on the lowest rank."""
        view = self.session.view
        if view is None or not view.members:
            return []
        step = view.ranks[min(view.members)]
        origin = next((span.start for span in step.spans if span.phase == "backward"), 0)
        named = [
            (self.session.state.layer(p), float(at - origin))
            for p, at in zip(step.hook_param, step.hook_ns, strict=True)
        ]
        return [(name, at) for name, at in named if name in params]

    def action_sort(self, by: int) -> None:
        """By the next column."""
        self.sorted_by = (self.sorted_by + by) % len(COLUMNS)
        self.falling = COLUMNS[self.sorted_by].heading not in ("bucket", "ready ms", "launch ms", "done ms")
        self.repaint()

    def action_order(self) -> None:
        """The other way round."""
        self.falling = not self.falling
        self.repaint()

    def action_detail(self) -> None:
        """One bucket."""
        self.detail, self.first = True, 0
        self.repaint()

    def action_back(self) -> None:
        """All buckets."""
        self.detail, self.first = False, 0
        self.repaint()

    def scroll_ranks(self, by: int) -> None:
        """Another bucket; in detail, other parameters."""
        rows = self.rows()
        if self.detail:
            self.first = max(self.first + by, 0)
        elif rows:
            place = min(max(self._place(rows) + by, 0), len(rows) - 1)
            self.selected = (rows[place].module, rows[place].index)
        self.repaint()

    def clicked(self, x: int, y: int) -> None:
        """Selects; a heading sorts."""
        rows = self.rows()
        if y > 0 and not self.detail and self.first + y - 1 < len(rows):
            row = rows[self.first + y - 1]
            self.selected = (row.module, row.index)
            self.repaint()
