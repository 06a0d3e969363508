"""What all views share: header, verdict and footer around a body, and the session behind them."""

from __future__ import annotations

from typing import ClassVar

from textual import events

from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.header import Tab, paint_footer, paint_header, paint_verdict
from ddpwatch.tui.paint.page import nothing_known, verdict_rows
from ddpwatch.tui.paint.waiting import paint_waiting
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.painted import PaintedView

HEADER_ROWS, FOOTER_ROWS = 2, 1
LEAST_HEIGHT = 4  # a lower screen has no footer


class RunView(PaintedView, can_focus=True):
    """One view of the session.

    Attributes:
        NAME: The label of its tab.
        KEYS: Its own keys for the footer, the most useful first.
        DEFINITIONS: What its figures mean, for the help page.
    """

    NAME: ClassVar[str] = ""
    KEYS: ClassVar[tuple[tuple[str, str], ...]] = ()
    DEFINITIONS: ClassVar[str] = ""
    tabs: tuple[Tab, ...] = ()

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(id=self.NAME.lower().replace(" ", ""))
        self.session = session

    @property
    def stale(self) -> bool:
        """See `PaintedView.stale`."""
        return self.session.overview.link.stale

    @property
    def shows_before_run(self) -> bool:
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
        """Paints header, verdict, body and footer, from top to bottom."""
        model, footer = self.session.overview, FOOTER_ROWS if height >= LEAST_HEIGHT else 0
        rows = paint_header(model, width, min(HEADER_ROWS, height))
        if nothing_known(model) and not self.shows_before_run:
            rows += paint_waiting(model.link, width, height - len(rows) - footer)
        else:
            rows += paint_verdict(model, width, verdict_rows(model, width, height))
            rows += self.body(width, max(0, height - len(rows) - footer))
        return rows[: height - footer] + paint_footer(model, width, footer, self.tabs, self.KEYS)

    def body(self, width: int, height: int) -> list[Row]:
        """Returns the rows between verdict and footer, as many as ``height``; that may be 0."""
        return []

    def scroll_ranks(self, by: int) -> None:
        """Scrolls to, or selects, another rank or line."""

    def forget(self) -> None:
        """Drops what the user selected in the run before, as another one is shown."""

    def position_changed(self) -> None:
        """Drops what was frozen at the old position, as a replay has jumped."""

    def clicked(self, x: int, y: int) -> None:
        """Handles a click on a cell of the body."""

    def on_click(self, event: events.Click) -> None:
        """Passes a click on the body on. The app handles those on the tabs."""
        if event.y < self.size.height - FOOTER_ROWS:
            self.clicked(event.x, event.y - self._above)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scrolls down."""
        event.stop()  # the screen would forward it to the view again
        self.scroll_ranks(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scrolls up."""
        event.stop()
        self.scroll_ranks(-1)
