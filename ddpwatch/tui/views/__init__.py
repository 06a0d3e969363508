"""The views on a session, one module each. A view holds what the user looks at in it; what it draws is in `paint`."""

from ddpwatch.tui.views.base import RunView
from ddpwatch.tui.views.buckets import BucketsView
from ddpwatch.tui.views.compare import CompareView
from ddpwatch.tui.views.devices import DevicesView
from ddpwatch.tui.views.log import LogView
from ddpwatch.tui.views.overview import OverviewView
from ddpwatch.tui.views.ranks import RanksView
from ddpwatch.tui.views.timeline import TimelineView

VIEWS: dict[str, type[RunView]] = {
    "1": OverviewView,
    "2": TimelineView,
    "3": BucketsView,
    "4": RanksView,
    "5": DevicesView,
    "6": CompareView,
    "7": LogView,
}

__all__ = [
    "VIEWS",
    "BucketsView",
    "CompareView",
    "DevicesView",
    "LogView",
    "OverviewView",
    "RanksView",
    "RunView",
    "TimelineView",
]
