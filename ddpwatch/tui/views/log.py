"""The seventh view: the incidents, the log, and the output of a job started by `ddpwatch run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.incident_news import cost_text, message_text
from ddpwatch.tui.models.incidents import ListedIncident, incident_rows, struck
from ddpwatch.tui.models.log import LogLine
from ddpwatch.tui.models.overview import Overview
from ddpwatch.tui.models.whole import Place
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.incidents import list_height, paint_incidents
from ddpwatch.tui.paint.log import paint_lines, paint_lists
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView

LISTS = ("incidents", "events and incidents", "the job's output")
INCIDENTS, EVENTS, OUTPUT = range(3)
Entry = LogLine | ListedIncident


class LogView(RunView):
    """A list: the incidents, the log, or the job's output."""

    NAME = "Log"
    DEFINITIONS = """\
  m         incidents, events and incidents, the job's output
            (if ddpwatch run started it; its newest 2,000 lines)
  incidents worst first; ● ongoing, ○ until the run ended, ✓ over,
            · comes later in a replay
  cost s    GPU-seconds lost (on CPUs process-seconds): what all other
            ranks waited, or all ranks spent; share: of all ranks' time
  Enter     shows the step in the Timeline; in a replay, one that never
            ended at that moment, in the Overview
  y         copies the line"""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "next_list", "next list"),
        Binding("enter", "show_step", "go to step", key_display="Enter"),
        Binding("y", "app.copy", "copy"),
    ]

    def __init__(self, session: ViewerSession, show_step: Callable[[int, int | None], None]) -> None:
        super().__init__(session)
        self.chosen: int | None = None
        self._show_step = show_step
        self.forget()

    def forget(self) -> None:
        self.selected: int | None = None  # None follows the newest line, or the worst incident
        self._frozen: list[Sequence[Entry]] | None = None

    def position_changed(self) -> None:
        self.forget()

    @property
    def overview(self) -> Overview:
        """See `RunView.overview`."""
        return replace(self.session.overview, in_log=True)

    @property
    def shows_before_run(self) -> bool:
        """See `RunView.shows_before_run`."""
        return bool(self.session.output.lines)

    def entries(self) -> Sequence[Entry]:
        """Returns what the present list holds; during a pause what it held when that began."""
        return self.lists()[self.list_shown]

    @property
    def list_shown(self) -> int:
        """An index into `LISTS`: the list chosen, or else the first that is not empty."""
        if self.chosen is not None:
            return self.chosen
        return next((index for index, entries in enumerate(self.lists()) if entries), EVENTS)

    def lists(self) -> list[Sequence[Entry]]:
        """Returns what each of the `LISTS` holds."""
        if not self.session.paused:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = self._now()
        if self._frozen is None:
            return self._now()
        return [self._incidents(), *self._frozen[1:]]

    def _now(self) -> list[Sequence[Entry]]:
        return [self._incidents(), list(self.session.log.lines), self.session.output.lines]

    def _incidents(self) -> list[ListedIncident]:
        session = self.session
        shown = session.step_shown if session.paused else None
        position = session.overview.newest_step if shown is None else shown.step
        if shown is None and session.over:  # also steps that no rank has finished
            position = None
        return incident_rows(session.overview.diagnosed, position, session.state.layouts, session.newest_shown_ns)

    @property
    def current(self) -> Entry | None:
        """The selected entry."""
        entries = self.entries()
        return entries[self._index(entries)] if entries else None

    @property
    def marked_rank(self) -> int | None:
        """See `RunView.marked_rank`."""
        match self.current:
            case ListedIncident(incident=Incident(ranks=(rank, *_))):
                return rank
        return None

    @property
    def incident_in_question(self) -> Incident | None:
        """See `RunView.incident_in_question`."""
        return self.current.incident if isinstance(self.current, ListedIncident) else None

    def _index(self, entries: Sequence[Entry]) -> int:
        if self.selected is None:
            return 0 if self.list_shown == INCIDENTS else len(entries) - 1
        return min(self.selected, len(entries) - 1)

    @property
    def text(self) -> str | None:
        """The selected entry as text; None without one."""
        match self.current:
            case ListedIncident(incident=incident):
                return f"{message_text(incident)}; cost {cost_text(incident, self.session.overview.diagnosed.unit)}"
            case LogLine(text=text):
                return text
        return None

    def body(self, width: int, height: int) -> list[Row]:
        lists = self.lists()
        entries, selected = lists[self.list_shown], self._index(lists[self.list_shown])
        headings = [(name, len(listed)) for name, listed in zip(LISTS, lists, strict=True)]
        overview = self.session.overview
        diagnosed = overview.diagnosed
        title = paint_lists(headings, self.list_shown, width, diagnosed.progress)
        size = (width, max(height - 1, 0))
        rows = [entry for entry in entries if isinstance(entry, ListedIncident)]
        if rows or self.list_shown == INCIDENTS:
            first = _first(selected, len(rows), list_height(len(rows), size[1]))
            return title + paint_incidents(rows, diagnosed, size, first, selected, overview.ended)
        lines = [entry for entry in entries if isinstance(entry, LogLine)]
        return title + paint_lines(lines, size, _first(selected, len(lines), size[1]), selected)

    def action_next_list(self) -> None:
        """Shows the next of the `LISTS`."""
        self.chosen, self.selected = (self.list_shown + 1) % len(LISTS), None
        self.repaint()

    def action_show_step(self) -> None:
        """Shows the selected entry's step in the Timeline."""
        match self.current:
            case ListedIncident(incident=incident) if incident.since_step is not None:
                whole = self.session.whole
                place = None if whole is None else whole.place_of(incident)
                self._show_step(*(place or Place(self._step_of(incident, incident.since_step))))
            case LogLine(step=int(step), at_ns=at_ns):
                self._show_step(step, at_ns)

    def _step_of(self, incident: Incident, since: int) -> int:
        """Returns its first step; of a live run the first that is kept and shows most, if there is one."""
        kept, newest = self.session.state.steps, self.session.overview.newest_step
        if self.session.replay or newest is None:
            return since
        steps = [step for step in struck(incident, newest) if step in kept]
        return max(steps, key=lambda step: (kept[step].full, kept[step].counted), default=since)

    def scroll_ranks(self, by: int) -> None:
        """Selects another entry. Selecting the last line follows new ones."""
        self.chosen = self.list_shown
        entries = self.entries()
        last = max(len(entries) - 1, 0)
        index = min(max(self._index(entries) + by, 0), last)
        self.selected = None if index >= last and self.chosen != INCIDENTS else index
        self.repaint()


def _first(selected: int, count: int, room: int) -> int:
    """Returns the first entry in view, so that the selected one is in the middle where possible."""
    return max(min(selected - room // 2, count - room), 0)
