"""The seventh view: the log, its findings alone, and the output of a job started by `ddpwatch run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.tui.models.log import LogLine
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.log import paint_log
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView

LISTS = ("events and findings", "findings", "the job's output")


class LogView(RunView):
    """A list of lines: the log, its findings, or the job's output."""

    NAME = "Log"
    KEYS = (("↑↓", "select"), ("m", "next list"), ("Enter", "go to step"), ("y", "copy"))
    DEFINITIONS = """\
  m         events and findings, findings alone, the job's output
            (if ddpwatch run started it; its newest 2,000 lines)
  Enter     shows the line's step in the Timeline
  y         copies the line"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "next_list", "Next list"),
        Binding("enter", "show_step", "Go to the line's step"),
    ]

    def __init__(self, session: ViewerSession, show_step: Callable[[int], None]) -> None:
        super().__init__(session)
        self.chosen: int | None = None
        self._show_step = show_step
        self.forget()

    def forget(self) -> None:
        """See `RunView.forget`."""
        self.selected: int | None = None  # None follows the newest
        self._frozen: list[list[LogLine]] | None = None

    def position_changed(self) -> None:
        """See `RunView.position_changed`."""
        self.forget()

    @property
    def shows_before_run(self) -> bool:
        """See `RunView.shows_before_run`."""
        return bool(self.session.output.lines)

    def lines(self) -> list[LogLine]:
        """The lines of the present list; during a pause those of its start."""
        return self.lists()[self.list_shown]

    @property
    def list_shown(self) -> int:
        """An index into `LISTS`: the list chosen, or else the output as long as the log is empty."""
        if self.chosen is not None:
            return self.chosen
        log, _, output = self.lists()
        return 2 if output and not log else 0

    def lists(self) -> list[list[LogLine]]:
        """The lines of each of the `LISTS`."""
        if not self.session.paused:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = self._now()
        return self._now() if self._frozen is None else self._frozen

    def _now(self) -> list[list[LogLine]]:
        log = list(self.session.log.lines)
        return [log, [line for line in log if line.kind == "finding"], self.session.output.lines]

    @property
    def current(self) -> LogLine | None:
        """The selected line."""
        lines = self.lines()
        if not lines:
            return None
        return lines[-1 if self.selected is None else min(self.selected, len(lines) - 1)]

    def body(self, width: int, height: int) -> list[Row]:
        """See `RunView.body`."""
        lists = self.lists()
        lines = lists[self.list_shown]
        selected = len(lines) - 1 if self.selected is None else min(self.selected, len(lines) - 1)
        first = max(min(selected - (height - 1) // 2, len(lines) - (height - 1)), 0)
        headings = [(name, len(listed)) for name, listed in zip(LISTS, lists, strict=True)]
        return paint_log(lines, headings, self.list_shown, (width, height), first, selected)

    def action_next_list(self) -> None:
        """Shows the next of the `LISTS`."""
        self.chosen, self.selected = (self.list_shown + 1) % len(LISTS), None
        self.repaint()

    def action_show_step(self) -> None:
        """Shows the selected line's step in the Timeline."""
        if self.current is not None and self.current.step is not None:
            self._show_step(self.current.step)

    def scroll_ranks(self, by: int) -> None:
        """Selects another line. Selecting the last one follows new lines."""
        last = len(self.lines()) - 1
        index = min(max((last if self.selected is None else self.selected) + by, 0), max(last, 0))
        self.selected = None if index >= last else index
        self.repaint()
