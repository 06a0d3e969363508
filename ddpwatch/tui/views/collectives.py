"""The third view: what each collective costs, and one in detail."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.analysis.buckets import Bucket, BucketSummary, BucketTable
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.collectives import COLUMNS, kind_of, paint_bucket, paint_collectives
from ddpwatch.tui.paint.grid import Column, sort_rows
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView, hidden
from ddpwatch.viewer.state import newest

NEWEST = 50
NOTES, LEAST_DETAIL = 4, 10  # rows besides those of the table; rows of a detail that is worth them


class CollectivesView(RunView):
    """A sortable table with a bar per row; Enter shows one row's history, and its parameters."""

    NAME = "Collectives"
    DEFINITIONS = """\
  ready, launch, done  from the start of the first backward, p50 over
            the ranks, then over the newest 50 steps
  wait      from its first launch on any rank to its last, which is
            more than one rank waits; medians do not add up
  transfer  from its last launch to its last completion
  exposed   the part of launch to done without computation on the rank
  busbw     bytes / transfer x 2(n-1)/n, as nccl-tests defines it
  last rank the rank that launches it last most often, and how often;
            several where the error of their clocks leaves it open
  group     with FSDP2, a parameter group: its all-gather (b: in the
            backward), reduce-scatter, all-reduce; from the forward
  place     without DDP or FSDP2, the line that issues collectives: n in
            a step, in groups of that role and size"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "detail", "detail", key_display="Enter"),
        Binding("s", "sort(1)", "sort by"),
        Binding("o", "order", "order"),
        hidden("escape", "back", "All collectives"),
    ]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.forget()

    def forget(self) -> None:
        self.table = BucketTable()
        self.selected: Bucket | None = None
        self.detail = False
        self.columns = COLUMNS["bucket"]
        self.sorted_by = ""  # a heading
        self.descending = False
        self.first = 0
        self.complete = True

    @property
    def pending(self) -> bool:
        """See `PaintedView.pending`. A large job's steps are worked out a few at a time."""
        return not self.complete

    def rows(self) -> list[BucketSummary]:
        """Returns the table's rows, sorted."""
        steps = newest(NEWEST, (step for step in reversed(self.session.steps) if step.counted))
        complete = [step for step in steps if len(step) >= len(self.session.state.ranks)] or steps
        self.complete = self.table.update(complete)
        rows = self.table.rows(self.session.state.layouts)
        self.columns = COLUMNS[kind_of(rows)]
        return sort_rows(rows, self.sort_column, self.descends)

    @property
    def sort_column(self) -> Column[BucketSummary]:
        """The column that rows are sorted by: the first one, of places what they cost."""
        found = {column.heading: column for column in self.columns}
        return found.get(self.sorted_by) or (
            found["exposed ms"] if self.columns is COLUMNS["call"] else self.columns[0]
        )

    @property
    def descends(self) -> bool:
        """Whether the largest come first."""
        return self.descending if self.sorted_by else self.columns is COLUMNS["call"]

    def body(self, width: int, height: int) -> list[Row]:
        rows = self.rows()
        selected = self._selected_row(rows)
        if self.detail and rows:
            return self._detail(rows[selected], width, height, self.first)
        below = height - len(rows) - NOTES
        if rows and below >= LEAST_DETAIL:
            detail = self._detail(rows[selected], width, below)
            return [*self._table(rows, selected, width, height - below), *detail]
        return self._table(rows, selected, width, height)

    def _table(self, rows: list[BucketSummary], selected: int, width: int, height: int) -> list[Row]:
        room = max(height - 2, 1)
        self.first = min(max(self.first, selected - room + 1), selected)
        unseen = next((off.message for off in self.session.state.off.found() if off.feature == "collectives"), "")
        return paint_collectives(rows, (width, height), self.first, selected, self.sort_column.heading, unseen)

    def _selected_row(self, rows: list[BucketSummary]) -> int:
        keys = [row.bucket for row in rows]
        return keys.index(self.selected) if self.selected in keys else 0

    def _detail(self, row: BucketSummary, width: int, height: int, first: int | None = None) -> list[Row]:
        """Paints the row below the table, or instead of it, from that parameter on."""
        params = self.session.state.layouts.bucket_params(row.index, module=row.module)
        history = self.table.history(row.bucket)
        fired, alone = self._fired(set(params)), first is not None
        return paint_bucket(row, history, params, fired, (width, height), first or 0, alone)

    def _fired(self, params: set[str]) -> list[tuple[str, float]]:
        """Returns the bucket's parameters by their hook fires on the lowest rank, in ns from the backward."""
        shown = self.session.step_shown
        if shown is None or not shown.members:
            return []
        step = shown.ranks[min(shown.members)]
        origin = next((span.start for span in step.spans if span.phase == "backward"), 0)
        fires = zip(map(self.session.state.layouts.layer, step.hook_param), step.hook_ns, strict=True)
        return [(name, float(at - origin)) for name, at in fires if name in params]

    def action_sort(self, by: int) -> None:
        """Sorts by the next column."""
        names = [column.heading for column in self.columns if column.heading not in ("place", "operation")]
        self.sorted_by = names[(names.index(self.sort_column.heading) + by) % len(names)]
        self.descending = self.sorted_by not in ("bucket", "group", "ready ms", "launch ms", "done ms")
        self.repaint()

    def action_order(self) -> None:
        """Reverses the order."""
        self.sorted_by, self.descending = self.sort_column.heading, not self.descends
        self.repaint()

    def action_detail(self) -> None:
        """Shows the selected row in detail."""
        self.detail, self.first = True, 0
        self.repaint()

    def action_back(self) -> None:
        """Shows all rows."""
        self.detail, self.first = False, 0
        self.repaint()

    def scroll_ranks(self, by: int) -> None:
        """Selects another row; in detail, scrolls the parameters."""
        rows = self.rows()
        if self.detail:
            self.first = max(self.first + by, 0)
        elif rows:
            row = rows[min(max(self._selected_row(rows) + by, 0), len(rows) - 1)]
            self.selected = row.bucket
        self.repaint()

    def clicked(self, x: int, y: int) -> None:
        """Selects a row."""
        rows = self.rows()
        if y > 0 and not self.detail and self.first + y - 1 < len(rows):
            row = rows[self.first + y - 1]
            self.selected = row.bucket
            self.repaint()
