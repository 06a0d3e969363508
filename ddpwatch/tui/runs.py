"""The live runs, each with how it does: what ``ddpwatch ls`` prints, live. Enter opens one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ddpwatch.errors import DdpwatchError
from ddpwatch.run.rundir import RunInfo, run_of
from ddpwatch.tui.paint.header import SIGNS
from ddpwatch.tui.settings import load_settings
from ddpwatch.tui.text import shorten_name
from ddpwatch.viewer.listing import LiveRow, brief_table

LOOK_S, LOOK_ELSEWHERE_S = 2.0, 10.0  # between two looks, and longer where a look is expensive:
MOST_SHARE = 0.05  # of a core
RUNS_CSS = """
    RunsPanel { height: auto; max-height: 100%; }
    RunsPanel Static { padding: 0 1; }
    RunsPanel OptionList { height: auto; max-height: 1fr; border: none; padding: 0; }
    #picker { width: 100%; max-width: 110; height: auto; max-height: 100%; padding: 0 1; border: round $foreground; }
"""
Note = Callable[[str], object]
Look = Callable[[Note], Sequence[RunInfo]]  # calls the note with what is wrong with one of several machines
Choice = RunInfo | Path


@dataclass
class Looked(Message):
    """The runs of now."""

    runs: Sequence[RunInfo]
    wrong: Sequence[str]


class Looking(threading.Thread):
    """Looks at the live runs again and again, on a thread of its own: nobody waits for another machine to answer."""

    def __init__(self, look: Look, every_s: float, post: Callable[[Looked], object]) -> None:
        super().__init__(name="ddpwatch-runs", daemon=True)
        self._look, self._every_s, self._post = look, every_s, post
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            began, wrong = time.thread_time(), list[str]()
            runs: Sequence[RunInfo] = []
            try:
                runs = self._look(wrong.append)
            except (DdpwatchError, OSError) as error:  # the run directory is gone
                wrong.append(str(error))
            if not self.over.is_set():
                self._post(Looked(runs, wrong))
            self.over.wait(max(self._every_s, (time.thread_time() - began) / MOST_SHARE))


class RunsPanel(Vertical):
    """Live runs, then the recordings of ended ones.

    Args:
        look: Returns the runs with their figures; called on a thread.
        runs: What is shown until it has returned; None if nothing is known.
        ended: The recordings.
        every_s: Between two looks.

    Attributes:
        choices: What the options stand for.
    """

    def __init__(
        self,
        look: Look,
        runs: Sequence[RunInfo] | None = None,
        ended: Sequence[Path] = (),
        every_s: float = LOOK_S,
    ) -> None:
        super().__init__()
        self._look, self._first, self._ended, self._every_s = look, runs, ended, every_s
        self._looking: Looking | None = None
        self.choices: list[Choice] = []

    def compose(self) -> ComposeResult:
        """Yields a line above, the list, and a line below."""
        yield Static("looking …", id="above", markup=False)
        yield OptionList(markup=False)
        yield Static("", id="below", markup=False)

    def on_mount(self) -> None:
        """Starts to look."""
        if self._first is not None:
            self.show(self._first)
        self._looking = Looking(self._look, self._every_s, self.post_message)
        self._looking.start()

    def on_unmount(self) -> None:
        """Looks no more."""
        if self._looking is not None:
            self._looking.over.set()

    def on_looked(self, event: Looked) -> None:
        """Shows the runs of now."""
        self.show(event.runs)
        self.query_one("#below", Static).update("\n".join(shorten_name(text, 500) for text in event.wrong))

    def show(self, runs: Sequence[RunInfo]) -> None:
        """Shows these runs; the chosen line stays on its run."""
        listed, header, lines = self.query_one(OptionList), *_lines(runs)
        self.query_one("#above", Static).update(header)
        before, self.choices = list(map(_key, self.choices)), [*runs, *self._ended]
        prompts = [*lines, *(Text(f"{shorten_name(run_of(path), 60)}   ended") for path in self._ended)]
        keys = list(map(_key, self.choices))
        if keys == before:
            for place, prompt in enumerate(prompts):
                listed.replace_option_prompt_at_index(place, prompt)
            return
        at = None if listed.highlighted is None else before[listed.highlighted]
        listed.clear_options()
        listed.add_options(map(Option, prompts))
        if keys:
            listed.highlighted = keys.index(at) if at in keys else 0


def _key(choice: Choice) -> object:
    return choice if isinstance(choice, Path) else (getattr(choice, "node", ""), choice.run_id)


def _lines(runs: Sequence[RunInfo]) -> tuple[str, list[Text]]:
    """Returns what stands above, and two lines for each run: its figures, and what matters most."""
    if not runs:
        return "No run is live.", []
    header, *lines = brief_table(runs)
    return header, [Text(line).append("\n").append(_verdict(run)) for line, run in zip(lines, runs, strict=True)]


def _verdict(run: RunInfo) -> Text:
    if not isinstance(run, LiveRow):
        return Text("  …", "dim")
    severity = run.verdict.severity
    text = f"  {SIGNS[severity][0]} {shorten_name(run.verdict.text, 500)}"
    return Text(text, "bold" if severity in ("warn", "bad") else "dim")


class RunPicker(ModalScreen[RunInfo | Path | None]):
    """Offers the live runs, then the recordings of ended ones."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,a", "cancel", "Cancel")]

    def __init__(self, look: Look, runs: Sequence[RunInfo], ended: Sequence[Path] = ()) -> None:
        super().__init__()
        self._runs = RunsPanel(look, runs, ended)

    def compose(self) -> ComposeResult:
        """Yields a list, newest first."""
        with Vertical(id="picker") as box:
            box.border_subtitle = "Enter opens, Esc goes back"
            yield self._runs

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Chooses the run."""
        self.dismiss(self._runs.choices[event.option_index])

    def action_cancel(self) -> None:
        """Changes nothing."""
        self.dismiss(None)


class RunsApp(App[RunInfo]):
    """Shows the live runs until one is chosen, or the user leaves."""

    CSS = f"{RUNS_CSS} #keys {{ dock: bottom; padding: 0 1; text-style: dim; }}"
    ENABLE_COMMAND_PALETTE = False
    TITLE = "ddpwatch"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape,ctrl+c", "quit", "Quit", priority=True),
    ]

    def __init__(self, look: Look, theme: str, every_s: float = LOOK_S) -> None:
        super().__init__(ansi_color=theme in ("none", "ansi"))
        self.theme = "textual-light" if theme == "light" else "textual-dark"
        self._runs = RunsPanel(look, every_s=every_s)

    def compose(self) -> ComposeResult:
        """Yields the list and the keys."""
        yield self._runs
        yield Static("Enter opens a run, q leaves", id="keys")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Opens the run."""
        choice = self._runs.choices[event.option_index]
        if isinstance(choice, RunInfo):
            self.exit(choice)


def choose_run(look: Look, elsewhere: bool) -> RunInfo | None:
    """Shows the live runs until the user chooses one; None if they leave. Other machines are asked less often."""
    return RunsApp(look, load_settings().resolved_theme(), LOOK_ELSEWHERE_S if elsewhere else LOOK_S).run()
