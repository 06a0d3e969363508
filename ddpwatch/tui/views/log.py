"""The last view: what happened, findings, and the job's own output where it was started by `ddpwatch run`."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.tui.models.log import LogLine
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.log import paint_log
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView

KINDS = ("events and findings", "findings", "the job's output")


class LogView(RunView):
    """Events, findings, output."""

    NAME = "Log"
    KEYS = (("↑↓", "select"), ("m", "what"), ("Enter", "go to step"), ("y", "copy"))
    DEFINITIONS = """\
  m         events and findings, findings alone, the job's own output
            (where it was started by ddpwatch run; its newest 2,000 lines)
  Enter     shows the line's step in the Timeline
  y         copies the line"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "kind", "what is listed"),
        Binding("enter", "go", "to the line's step"),
    ]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.chosen: int | None = None
        self.forget()

    def forget(self) -> None:
        """See `RunView.forget`."""
        self.selected: int | None = None  # None follows the newest
        self._frozen: list[list[LogLine]] | None = None

    def moved(self) -> None:
        """See `RunView.moved`."""
        self.forget()

    @property
    def early(self) -> bool:
        """See `RunView.early`."""
        return bool(self.session.output.events)

    def events(self) -> list[LogLine]:
        """The lines; those of the moment of the pause while there is one."""
        return self.lists()[self.kind]

    @property
    def kind(self) -> int:
        """Which of the `KINDS` is listed: the one chosen, or else output as long as there is nothing but that."""
        if self.chosen is not None:
            return self.chosen
        events, _, output = self.lists()
        return 2 if output and not events else 0

    def lists(self) -> list[list[LogLine]]:
        """The lines of each of the `KINDS`."""
        if not self.session.paused:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = self._now()
        return self._now() if self._frozen is None else self._frozen

    def _now(self) -> list[list[LogLine]]:
        events = list(self.session.log.events)
        return [events, [event for event in events if event.kind == "finding"], self.session.output.events]

    @property
    def current(self) -> LogLine | None:
        """The selected line."""
        events = self.events()
        if not events:
            return None
        return events[-1 if self.selected is None else min(self.selected, len(events) - 1)]

    def body(self, width: int, height: int) -> list[Row]:
        """See `RunView.body`."""
        lists = self.lists()
        events = lists[self.kind]
        selected = len(events) - 1 if self.selected is None else min(self.selected, len(events) - 1)
        first = max(min(selected - (height - 1) // 2, len(events) - (height - 1)), 0)
        headings = [(name, len(lines)) for name, lines in zip(KINDS, lists, strict=True)]
        return paint_log(events, headings, self.kind, (width, height), first, selected)

    def action_kind(self) -> None:
        """Lists something else."""
        self.chosen, self.selected = (self.kind + 1) % len(KINDS), None
        self.repaint()

    async def action_go(self) -> None:
        """Shows the selected line's step."""
        if self.current is not None and self.current.step is not None:
            await self.app.run_action(f"to_step({self.current.step})")

    def scroll_ranks(self, by: int) -> None:
        """Another line; the last one follows."""
        last = len(self.events()) - 1
        place = min(max((last if self.selected is None else self.selected) + by, 0), max(last, 0))
        self.selected = None if place >= last else place
        self.repaint()
