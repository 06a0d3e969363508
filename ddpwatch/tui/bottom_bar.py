"""The row below the views: a tab for each of them, and the keys that work in the one shown."""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Footer, Tab, Tabs
from textual.widgets._footer import FooterKey  # its only place

from ddpwatch.tui.paint.palette import bar_colours
from ddpwatch.tui.views.base import RunView

WIDTHS = [(0, "-tiny"), (70, "-narrow"), (100, "-wide")]  # of the screen: its class from each on
HEIGHTS = [(0, "-low"), (4, "-high")]
SHORT = {"Collectives": "Comm"}  # names of views, below this width
ROOMY = 84
BAR_CSS = """
    BottomBar { height: 1; background: $bar-background; }
    ViewTabs, ViewTabs > #tabs-scroll { width: auto; height: 1; }
    ViewTabs #tabs-list-bar, ViewTabs #tabs-list { min-width: 0; }
    ViewTabs Underline { display: none; }
    ViewTabs Tab { color: $bar-text; text-style: none; padding: 0 0 0 1; }
    ViewTabs Tab.-active { color: $bar-tab-text; background: $bar-tab; text-style: $bar-style; }
    .-wide ViewTabs Tab { padding: 0 1; }
    .-low BottomBar { display: none; }
    .-tiny ViewTabs Tab { width: 3; }
    BottomBar Footer { dock: none; width: 1fr; padding: 0 0 0 1; background: $bar-background; }
    BottomBar FooterKey { background: $bar-background; }
    BottomBar .footer-key--key { color: $bar-key-text; background: $bar-key; text-style: $bar-style; }
    BottomBar .footer-key--description {
        color: $bar-text; background: $bar-background; text-style: none; padding: 0 2 0 1;
    }
"""


class ViewTabs(Tabs, can_focus=False):
    """Tabs that leave the keys to the view."""


class Keys(Footer, can_focus=False):
    """The keys that fit with their names, and the first in any case, if need be without."""

    _composed: list[tuple[Binding, bool, str]] | None = None  # what the keys shown are made of

    def compose(self) -> ComposeResult:
        self._composed = self._active() if self._bindings_ready else None
        room = width = self.size.width
        for key in super().compose():
            assert isinstance(key, FooterKey)
            needed = cell_len(key.key_display + key.description) + 3
            if room == width and needed > room:
                key.description = ""
            key.set_reactive(FooterKey.compact, False)  # as the footer will: else each key is styled twice more
            if needed <= room or room == width:
                yield key
                room -= needed + 2

    def _active(self) -> list[tuple[Binding, bool, str]]:
        shown = (one for one in self.screen.active_bindings.values() if one.binding.show)
        return [(one.binding, one.enabled, self.app.get_key_display(one.binding)) for one in shown]

    def bindings_changed(self, screen: Screen[object]) -> None:
        """Makes keys only if there are others: textual says so twice whenever a view is shown."""
        if not self._bindings_ready or self._active() != self._composed:
            super().bindings_changed(screen)

    def on_resize(self) -> None:
        """Chooses the keys again."""
        self.refresh(recompose=True)


class BottomBar(Horizontal):
    """Tabs and keys on one line.

    Args:
        views: The views by their keys.
        shown: One of them.
    """

    def __init__(self, views: Mapping[str, RunView], shown: RunView) -> None:
        super().__init__()
        self._views = views
        tabs = (Tab(f"{key} {view.NAME}", id=view.ID) for key, view in views.items())
        self._tabs = ViewTabs(*tabs, active=shown.ID)

    def compose(self) -> ComposeResult:
        yield self._tabs
        yield Keys(show_command_palette=False)

    def on_resize(self) -> None:
        """Names the views as there is room."""
        for key, view in self._views.items():
            name = view.NAME if self.size.width >= ROOMY else SHORT.get(view.NAME, view.NAME)
            self._tabs.query_one(f"#{view.ID}", Tab).label = f"{key} {name}"

    def show_tab(self, view: RunView) -> None:
        """Marks the tab of a view."""
        self._tabs.active = view.ID


def bar_variables(theme: str) -> Mapping[str, str]:
    """Returns the colours that `BAR_CSS` names, in a theme; without colour, what stands out is reversed."""
    colours = bar_colours(theme)
    if colours is None:
        names = ("background", "text", "tab", "tab-text", "key", "key-text")
        return {"bar-style": "bold reverse", **{f"bar-{name}": "ansi_default" for name in names}}
    return {"bar-style": "bold", **{f"bar-{name}": colour for name, colour in colours.items()}}
