"""The fourth view: a figure by rank and step, and one rank in detail."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.analysis.step import StepFigures
from ddpwatch.state import StepAcrossRanks
from ddpwatch.tui.models.overview import DeviceLine
from ddpwatch.tui.models.ranks import METRICS, HeatMap, HeatMaps, groups_of
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.ranks import cell_size, columns_for, paint_heat, paint_rank
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.text import ms
from ddpwatch.tui.views.base import RunView

DETAIL_STEPS = 200


class RanksView(RunView):
    """Heatmap of ranks by steps; Enter shows one rank."""

    NAME = "Ranks"
    KEYS = (("↑↓", "select"), ("m", "figure"), ("v", "group"), ("Enter", "detail"))
    DEFINITIONS = """\
  m         lateness, step time, exposed, overlap, waiting for input
  v         all ranks in groups (a cell is the worst of them), or one a row
  lateness  how long after the first rank it launched a bucket, at most
  The colours go up to what only 2 % of the cells shown exceed; for
  overlap, little of it is what stands out."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "metric(1)", "another figure"),
        Binding("M", "metric(-1)", "the figure before"),
        Binding("v", "group", "groups or single ranks"),
        Binding("enter", "detail", "one rank"),
        Binding("escape", "back", "all ranks"),
    ]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.metric = 0
        self.grouped = True
        self.forget()

    def forget(self) -> None:
        """See `RunView.forget`."""
        self.maps = HeatMaps()
        self.first = 0
        self.detail = False

    def map(self, width: int, height: int) -> HeatMap | None:
        """The heatmap for a screen of that size; None before the first step."""
        views = [view for view in self.session.steps if view.counted][-columns_for(width) :]
        if not views:
            return None
        ranks = self.session.shown(views[-1])
        groups = groups_of(ranks, max(height - 2, 1) if self.grouped else len(ranks))
        return self.maps.build(views, METRICS[self.metric], groups)

    def body(self, width: int, height: int) -> list[Row]:
        """See `RunView.body`."""
        heat = self.map(width, height)
        if heat is None or not heat.groups:
            return []
        followed = self.session.followed_rank()
        rank = self.session.rank if followed is None else followed
        place = next((i for i, group in enumerate(heat.groups) if rank in group), None)
        if place is None:
            place, rank = 0, heat.groups[0][0]
        self.session.rank = rank
        if self.detail and rank is not None:
            return self._detail(rank, width, height)
        room = max((height - 2) // self._cell(heat, width, height)[1], 1)
        self.first = min(max(self.first, place - room + 1), place, max(len(heat.groups) - room, 0))
        slowest = self.session.overview.summary.straggler
        return paint_heat(heat, width, height, self.first, rank, slowest.rank if slowest else None)

    @staticmethod
    def _cell(heat: HeatMap, width: int, height: int) -> tuple[int, int]:
        return cell_size(len(heat.steps), len(heat.groups), width, height)

    def _detail(self, rank: int, width: int, height: int) -> list[Row]:
        row = next((row for row in self.session.overview.ranks if row.rank == rank), None)
        if row is None:
            return []
        steps = [view for view in self.session.steps if view.counted and rank in view.members][-DETAIL_STEPS:]
        return paint_rank(row, self._history(steps, rank), self._devices(rank), self._marks(rank), width, height)

    @staticmethod
    def _history(steps: list[StepAcrossRanks], rank: int) -> list[StepFigures]:
        return [view.figures[rank] for view in steps]

    def _devices(self, rank: int) -> list[DeviceLine]:
        return [row for row in self.session.overview.devices if rank in row.ranks]

    def _marks(self, rank: int) -> list[str]:
        """The newest of its marks, newest first."""
        own = [mark for mark in self.session.marks if mark.rank == rank]
        return [
            mark.name + ("" if mark.end_ns is None else f", {ms(mark.end_ns - mark.start_ns)} ms") for mark in own[::-1]
        ]

    def action_metric(self, by: int) -> None:
        """Another figure."""
        self.metric = (self.metric + by) % len(METRICS)
        self.repaint()

    def action_group(self) -> None:
        """All ranks in groups, or one rank a row."""
        self.grouped = not self.grouped
        self.first = 0
        self.repaint()

    def action_detail(self) -> None:
        """One rank."""
        self.detail = True
        self.repaint()

    def action_back(self) -> None:
        """All ranks."""
        self.detail = False
        self.repaint()

    def scroll_ranks(self, by: int) -> None:
        """Another rank, or another group of them."""
        heat = self.map(self.size.width, self.body_height)
        if heat is None or not heat.groups:
            return
        self.session.follow_slowest = False
        place = next((i for i, group in enumerate(heat.groups) if self.session.rank in group), 0)
        self.session.rank = heat.groups[min(max(place + by, 0), len(heat.groups) - 1)][0]
        self.repaint()

    def clicked(self, x: int, y: int) -> None:
        """Selects a rank; a second click on it shows it."""
        heat = self.map(self.size.width, self.body_height)
        if heat is None or self.detail:
            return
        place = self.first + (y - 1) // self._cell(heat, self.size.width, self.body_height)[1]
        if y < 1 or place >= len(heat.groups):
            return
        group = heat.groups[place]
        self.detail = self.session.rank in group
        self.session.rank = self.session.rank if self.detail else group[0]
        self.repaint()
