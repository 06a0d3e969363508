"""What lies on top of a view: help, and the choice between several runs."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ddpwatch.rundir import RunInfo
from ddpwatch.tui.text import clean

HELP = """\
[b]Keys[/b]
  q  Ctrl-C       quit                  space     pause, resume
  ← →  h l  \\[ ]   step back, forward    Home End  oldest step, newest step
  j k  ↓ ↑        scroll ranks          a         choose another run
  + -             replay faster, slower .         replay to the end
[b]Figures[/b], medians of the newest 50 steps; "–" is not known
  overlap   share of communication time in which the rank also computed
            (forward or backward)
  exposed   communication time in which it did not: training waits for it
  late      how long after the first rank it launched a bucket, at most
  wait      how long its bucket waited for the last rank, at most
  slowest   the latest rank, where that stands clear of the noise
  own cost  time that the probe itself takes, as a share of the step
[b]Timeline[/b]
  Numbers are buckets, dots are idle time, ▾ ▸ a launch, ⡇ a gradient.
  ╱╱ is exposed communication. A pause freezes the view, not a live run."""


class HelpScreen(ModalScreen[None]):
    """Keys and definitions."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter,space", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        """One scrollable text."""
        with VerticalScroll(id="help"):
            yield Static(HELP)


class RunPicker(ModalScreen[RunInfo | None]):
    """Several runs are live: which one?"""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,a", "cancel", "keep the present one")]

    def __init__(self, runs: list[RunInfo]) -> None:
        super().__init__()
        self._runs = runs

    def compose(self) -> ComposeResult:
        """A list, newest first."""
        with Vertical(id="picker"):
            yield Static("Choose a run (Enter), or Escape to stay" if self._runs else "No run is live (Escape)")
            yield OptionList(*(Option(_label(run)) for run in self._runs))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or a click."""
        self.dismiss(self._runs[event.option_index])

    def action_cancel(self) -> None:
        """Changes nothing."""
        self.dismiss(None)


def _label(run: RunInfo) -> str:
    script = clean(run.script, 40).replace("[", "\\[")
    name = clean(run.run_id, 40).replace("[", "\\[")
    return f"{name}   {script}   {run.world_size} ranks"
