"""What lies on top of a view: help, a line to type, and the choice between several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ddpwatch.rundir import RunInfo
from ddpwatch.tui.text import clean

HELP = """\
[b]Keys[/b]
  1 … 7           views                 q  Ctrl-C  quit
  space           pause, resume         ← →  \\[ ]  step back, forward
  Home End        oldest, newest step   j k  ↓ ↑   scroll, select
  S  n  N         slowest step, finding g          go to step, time
  /  f            filter, follow slowest a          another run
  y  P  E         copy, picture, trace  T  A       colours, ASCII
  + -  < >        replay speed, by 5 s  O  .       loop, to the end
  :               all commands
"""
SIGNS = """\
[b]Everywhere[/b]  medians of the newest 50 steps; "–" is not known
  [b]▒[/b] forward  [b]▓[/b] backward  [b]░[/b] optimizer  [b]█[/b] communication  [b]╱[/b] exposed
  A pause freezes the view, not a live run. What is stale is faded."""


class HelpScreen(ModalScreen[None]):
    """Keys, and what the figures of a view mean."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter,space", "dismiss", "close")]

    def __init__(self, name: str, definitions: str) -> None:
        super().__init__()
        self._view = f"[b]{name}[/b]\n{definitions}\n"

    def compose(self) -> ComposeResult:
        """One scrollable text."""
        with VerticalScroll(id="help"):
            yield Static(HELP + self._view + SIGNS)


class AskScreen(ModalScreen[str | None]):
    """One line to type."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "leave it as it is")]

    def __init__(self, what: str, hint: str, value: str) -> None:
        super().__init__()
        self._what, self._hint, self._value = what, hint, value

    def compose(self) -> ComposeResult:
        """Question and answer."""
        with Vertical(id="ask"):
            yield Static(f"{self._what}: {self._hint}", markup=False)
            yield Input(self._value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter."""
        self.dismiss(event.value)

    def action_cancel(self) -> None:
        """Changes nothing."""
        self.dismiss(None)


class RunPicker(ModalScreen[RunInfo | Path | None]):
    """Which run? Live ones, then what ended ones have left."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,a", "cancel", "keep the present one")]

    def __init__(self, runs: Sequence[RunInfo], ended: Sequence[Path] = ()) -> None:
        super().__init__()
        self._choices: list[RunInfo | Path] = [*runs, *ended]

    def compose(self) -> ComposeResult:
        """A list, newest first."""
        with Vertical(id="picker"):
            yield Static("Choose a run (Enter), or Escape to stay" if self._choices else "No run is live (Escape)")
            yield OptionList(*(Option(_label(choice)) for choice in self._choices))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter or a click."""
        self.dismiss(self._choices[event.option_index])

    def action_cancel(self) -> None:
        """Changes nothing."""
        self.dismiss(None)


def _label(choice: RunInfo | Path) -> str:
    if isinstance(choice, Path):
        return f"{_escaped(choice.stem)}   ended"
    return f"{_escaped(choice.run_id)}   {_escaped(choice.script)}   {choice.world_size} ranks"


def _escaped(name: str) -> str:
    return clean(name, 40).replace("[", "\\[")
