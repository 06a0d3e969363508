"""What all views share: header, verdict and footer around a body, and the session behind them."""

from __future__ import annotations

from typing import ClassVar

from textual import events

from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.header import Tab
from ddpwatch.tui.paint.overview import framed, verdict_rows
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.painted import PaintedView

HEADER_ROWS, FOOTER_ROWS = 2, 1


class RunView(PaintedView, can_focus=True):
    """One view on the session.

    Attributes:
        NAME: What its tab says.
        KEYS: Its own keys for the footer, the most useful first.
        DEFINITIONS: What its figures mean, for the help page.
    """

    NAME: ClassVar[str] = ""
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = ()
    DEFINITIONS: ClassVar[str] = ""
    tabs: tuple[Tab, ...] = ()

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(id=self.NAME.lower())
        self.session = session

    @property
    def stale(self) -> bool:
        """See `PaintedView.stale`."""
        return self.session.overview.link.stale

    @property
    def early(self) -> bool:
        """Whether there is something to show before the first frame of a run."""
        return False

    @property
    def body_height(self) -> int:
        """Rows between verdict and footer."""
        return max(self.size.height - self._above - FOOTER_ROWS, 0)

    @property
    def _above(self) -> int:
        return HEADER_ROWS + verdict_rows(self.session.overview, *self.size)

    def paint(self, width: int, height: int) -> list[Row]:
        """See `PaintedView.paint`."""
        return framed(self.session.overview, (width, height), self.tabs, self.KEYS, self.body, self.early)

    def body(self, width: int, height: int) -> list[Row]:
        """What lies between verdict and footer."""
        raise NotImplementedError

    def scroll_ranks(self, by: int) -> None:
        """Other ranks, or other lines."""

    def forget(self) -> None:
        """Another run begins: what was selected in the one before means nothing."""

    def moved(self) -> None:
        """A replay has gone elsewhere: a frozen picture is of another moment."""

    def on_click(self, event: events.Click) -> None:
        """A click on a tab, or on what the view shows."""
        if event.y == self.size.height - 1:
            x = 0
            for tab in self.tabs:
                x += tab.width(self.size.width)
                if event.x < x:
                    self.run_worker(self.app.run_action(f"view('{tab.key}')"))
                    return
        else:
            self.clicked(event.x, event.y - self._above)

    def clicked(self, x: int, y: int) -> None:
        """A click into the body."""
