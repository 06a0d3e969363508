"""What lies on top of a view: help, and the choice between several runs."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ddpwatch.rundir import RunInfo
from ddpwatch.tui.text import clean

HELP = """\
[b]Keys[/b]
  q, Ctrl-C      quit
  space          pause or resume (a live run goes on meanwhile)
  ← →  h l  [ ]  one step back, one step forward (pauses)
  Home           oldest step kept
  End            newest step, and follow again
  j k  ↓ ↑       scroll ranks (or the mouse wheel)
  a              choose another run
  + -            replay faster, slower      .  replay to the end
  ?              this help

[b]What the figures mean[/b]
  overlap   share of communication time during which the rank also computed
            (forward or backward); – without communication
  exposed   communication time during which it did not: what training waits for
  late      how long after the first rank a rank launched a bucket (its worst)
  wait      how long a rank's bucket waited for the last rank to launch it
  own cost  time that the probe itself takes, as a share of the step
  Figures are medians of the newest 50 steps. "–" means not known.
  Slowest is named only where its lateness stands clear of the noise.

[b]Timeline[/b]
  ╱╱ exposed communication; numbers are buckets; dots are idle; ▾ ▸ a launch.
"""


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
        with VerticalScroll(id="picker"):
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
