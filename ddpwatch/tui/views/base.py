"""What all views share: header and verdict above a body, and the session behind them."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.tui.models.overview import Overview
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.header import paint_header
from ddpwatch.tui.paint.page import HEADER_ROWS, paint_page, verdict_rows
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.painted import PaintedView

hidden = partial(Binding, show=False)  # a key that is not named below the view: another one's name covers it


class RunView(PaintedView, can_focus=True):
    """One view of the session.

    Attributes:
        NAME: The label of its tab.
        ID: The same in one lower-case word, as settings have it.
        BINDINGS: Its own keys, the most useful first; those below stand before them.
        DEFINITIONS: What its figures mean, for the help page.
    """

    NAME: ClassVar[str] = ""
    ID: ClassVar[str] = ""
    DEFINITIONS: ClassVar[str] = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "app.help", "help"),
        Binding("q", "app.quit", "quit"),
        Binding("x", "app.explain", "why"),
        Binding("down,j", "app.scroll(1)", "move", key_display="↑↓"),
        hidden("up,k", "app.scroll(-1)", "Up"),
    ]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.ID = cls.NAME.lower().replace(" ", "")

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(id=self.ID)
        self.session = session

    @property
    def stale(self) -> bool:
        """See `PaintedView.stale`."""
        return self.session.overview.link.stale

    @property
    def overview(self) -> Overview:
        """What header and verdict show."""
        return self.session.overview

    @property
    def shows_before_run(self) -> bool:
        """Whether there is something to show before the first frame of a run."""
        return False

    @property
    def marked_rank(self) -> int | None:
        """The rank that the view marks; None if it marks none."""
        return None

    @property
    def rank_in_question(self) -> int | None:
        """The rank to explain: the one marked, or else selected in another view; None for the late one."""
        return self.session.rank if self.marked_rank is None else self.marked_rank

    @property
    def incident_in_question(self) -> Incident | None:
        """The incident to explain; None if the view marks none."""
        return None

    @property
    def body_height(self) -> int:
        """Rows below the verdict."""
        return max(self.size.height - self._above, 0)

    @property
    def _above(self) -> int:
        return HEADER_ROWS + verdict_rows(self.overview, *self.size)

    def paint(self, width: int, height: int) -> list[Row]:
        """Paints header, verdict and body, from top to bottom; the header alone while a replay jumps."""
        if self.session.seeking and (height, width) == (len(self._rows), self._painted[0]):
            header = paint_header(self.overview, width, HEADER_ROWS)
            return header + self._rows[HEADER_ROWS:]
        return paint_page(self.overview, width, height, self.body, self.shows_before_run)

    def body(self, width: int, height: int) -> list[Row]:
        """Returns the rows below the verdict, as many as ``height``; that may be 0."""
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
        """Passes a click on the body on."""
        self.clicked(event.x, event.y - self._above)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scrolls down."""
        event.stop()  # the screen would forward it to the view again
        self.scroll_ranks(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scrolls up."""
        event.stop()
        self.scroll_ranks(-1)
