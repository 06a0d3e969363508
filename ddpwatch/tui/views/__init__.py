"""The eight views of a run, one module each. A view holds the user's choices in it; `ddpwatch.tui.paint` draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView
from ddpwatch.tui.views.collectives import CollectivesView
from ddpwatch.tui.views.compare import CompareView
from ddpwatch.tui.views.devices import DevicesView
from ddpwatch.tui.views.log import LogView
from ddpwatch.tui.views.overview import OverviewView
from ddpwatch.tui.views.ranks import RanksView
from ddpwatch.tui.views.timeline import TimelineView
from ddpwatch.tui.views.whatif import WhatIfView

__all__ = ["VIEWS", "RunView", "Views"]

VIEWS: dict[str, type[RunView]] = {
    "1": OverviewView,
    "2": TimelineView,
    "3": CollectivesView,
    "4": RanksView,
    "5": DevicesView,
    "6": CompareView,
    "7": LogView,
    "8": WhatIfView,
}


class Views:
    """The views of one dashboard.

    Args:
        session: What they show.
        timeline_s: The length of the Timeline's rolling window.
        show_step: Shows a step in the Timeline.
    """

    def __init__(self, session: ViewerSession, timeline_s: float, show_step: Callable[[int, int | None], None]) -> None:
        self.overview = OverviewView(session)
        self.timeline = TimelineView(session, timeline_s)
        self.collectives = CollectivesView(session)
        self.ranks = RanksView(session)
        self.devices = DevicesView(session)
        self.compare = CompareView(session)
        self.log = LogView(session, show_step)
        self.whatif = WhatIfView(session)
        views = (
            self.overview, self.timeline, self.collectives, self.ranks, self.devices, self.compare, self.log,
            self.whatif,
        )  # fmt: skip
        self.by_key: dict[str, RunView] = dict(zip(VIEWS, views, strict=True))

    def __iter__(self) -> Iterator[RunView]:
        return iter(self.by_key.values())
