"""The fourth view: a metric by rank and step, and one rank in detail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.tui.models.devices import DeviceLine
from ddpwatch.tui.models.host_names import by_host
from ddpwatch.tui.models.log import mark_duration
from ddpwatch.tui.models.overview import filtered
from ddpwatch.tui.models.ranks import METRICS, HeatMap, HeatMaps, costliest_first, groups_of, with_diagnosis
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.page import no_step
from ddpwatch.tui.paint.ranks import TOP_ROWS, cell_size, columns_for, paint_heat, paint_rank
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView, hidden
from ddpwatch.wire.messages import Mark

DETAIL_STEPS = 200
ROWS = ("hosts", "fit", "ranks")  # what is in a row; hosts only if there are several and more ranks than rows


class RanksView(RunView):
    """A heatmap of ranks by steps; Enter shows one rank."""

    NAME = "Ranks"
    DEFINITIONS = """\
  m         lateness, step time, exposed, overlap, data, gap
  data      waiting for the DataLoader (–: the loop uses none)
  gap       the rest of the time from optimizer to forward
  v         one host a row, as many rows as fit, or one rank a row; a
            cell shows the worst of its ranks
  ±         how far lateness may be off: hosts have clocks of their own
  unseen    nothing comes from the host's agent: nothing is known of its
            ranks, and nobody blames them
  s         by number, or by cost, highest first
  cost s    GPU-seconds (on CPUs process-seconds) that all others waited
            for the rank; share: that, of all ranks' time
  lateness  how long after the first rank it launches a bucket, at most;
            with waits for DDP's buffers, which are blamed on the rank
            waited for
  The colour scale ends at a value that only 2 % of the cells exceed.
  For overlap it is reversed: low values stand out."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "metric(1)", "metric"),
        hidden("M", "metric(-1)", "Previous metric"),
        Binding("v", "group", "group"),
        Binding("s", "sort", "sort"),
        Binding("enter", "detail", "detail", key_display="Enter"),
        hidden("escape", "back", "All ranks"),
    ]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.metric = 0
        self.rows = ROWS[0]
        self.by_cost = False
        self.forget()

    def forget(self) -> None:
        self.maps = HeatMaps()
        self.first = 0
        self.detail = False
        self.shown: int | None = None  # the selected rank, or what is in its place

    def map(self, width: int, height: int) -> HeatMap | None:
        """Returns the heatmap for a body of that size; None before the first step."""
        steps = [step for step in self.session.steps if step.counted][-columns_for(width, self.session.overview) :]
        if not steps:
            return None
        overview = self.session.overview
        ranks = filtered(self.session.state, self.session.state.ranks, self.session.filter)
        rows = max(height - TOP_ROWS - 1, 1)
        hosts = overview.hosts if self.rows == "hosts" and len(ranks) > rows else {}
        groups: Sequence[Sequence[int]] = (
            list(by_host(ranks, hosts).values()) if hosts else groups_of(ranks, self._most(rows, ranks))
        )
        if self.by_cost or hosts:
            groups = costliest_first(groups, overview.diagnosed.waited_for, overview.unseen)
        return with_diagnosis(self.maps.build(steps, METRICS[self.metric], groups), overview)

    def _most(self, rows: int, ranks: Sequence[int]) -> int:
        return len(ranks) if self.rows == "ranks" else rows

    def body(self, width: int, height: int) -> list[Row]:
        heat = self.map(width, height)
        if heat is None or not heat.groups:
            return no_step(width, height, "no step after the warm-up yet" if heat is None else "no such rank")
        rank = self.shown = self.session.rank_in_sight([rank for group in heat.groups for rank in group])
        row = next(i for i, group in enumerate(heat.groups) if rank in group)
        if self.detail and rank is not None:
            return self._detail(rank, width, height)
        room = max((height - TOP_ROWS - 1) // self._cell(heat, width, height)[1], 1)
        self.first = min(max(self.first, row - room + 1), row, max(len(heat.groups) - room, 0))
        slowest = self.session.overview.slowest
        return paint_heat(heat, width, height, self.first, rank, slowest.ranks[0] if slowest else None)

    @staticmethod
    def _cell(heat: HeatMap, width: int, height: int) -> tuple[int, int]:
        return cell_size(heat, width, height)

    @property
    def marked_rank(self) -> int | None:
        """See `RunView.marked_rank`."""
        return self.shown

    def _detail(self, rank: int, width: int, height: int) -> list[Row]:
        row = next((row for row in self.session.overview.ranks if row.rank == rank), None)
        if row is None:
            return []
        steps = [step for step in self.session.steps if step.counted and rank in step.members][-DETAIL_STEPS:]
        history = [step.figures[rank] for step in steps]
        return paint_rank(row, history, self._devices(rank), self._marks(rank), width, height)

    def _devices(self, rank: int) -> list[DeviceLine]:
        return [row for row in self.session.overview.devices if rank in row.ranks]

    def _marks(self, rank: int) -> list[str]:
        """Returns the newest of the rank's marks of each name, newest first, and how many of it are kept."""
        own: dict[str, list[Mark]] = {}
        for mark in reversed(self.session.state.marks):
            if mark.rank == rank:
                own.setdefault(mark.name, []).append(mark)
        return [
            f"{name}{mark_duration(marks[0])}" + (f": the newest of {len(marks)}" if marks[1:] else "")
            for name, marks in own.items()
        ]

    def action_metric(self, by: int) -> None:
        """Shows another metric."""
        self.metric = (self.metric + by) % len(METRICS)
        self.repaint()

    def action_group(self) -> None:
        """Shows hosts, ranks in groups, or one rank a row."""
        rows = ROWS if self.session.overview.hosts else ROWS[1:]
        self.rows = rows[(rows.index(self.rows) + 1) % len(rows)] if self.rows in rows else rows[1]
        self.first = 0
        self.repaint()

    def action_sort(self) -> None:
        """Sorts by number, or by cost."""
        self.by_cost = not self.by_cost
        self.first = 0
        self.repaint()

    def action_detail(self) -> None:
        """Shows the selected rank in detail."""
        self.detail, self.session.rank = True, self.shown
        self.repaint()

    def action_back(self) -> None:
        """Shows all ranks."""
        self.detail = False
        self.repaint()

    def scroll_ranks(self, by: int) -> None:
        """Selects another rank, or another group."""
        heat = self.map(self.size.width, self.body_height)
        if heat is None or not heat.groups:
            return
        self.session.follow_slowest = False
        row = next((i for i, group in enumerate(heat.groups) if self.shown in group), 0)
        self.session.rank = heat.groups[min(max(row + by, 0), len(heat.groups) - 1)][0]
        self.repaint()

    def clicked(self, x: int, y: int) -> None:
        """Selects a rank; a second click shows it in detail."""
        heat = self.map(self.size.width, self.body_height)
        if heat is None or self.detail:
            return
        row = self.first + (y - TOP_ROWS) // self._cell(heat, self.size.width, self.body_height)[1]
        if y < TOP_ROWS or row >= len(heat.groups):
            return
        group = heat.groups[row]
        self.detail = self.shown in group
        self.session.rank = self.shown if self.detail else group[0]
        self.repaint()
