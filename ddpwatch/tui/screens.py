"""The screens on top of a view: help, a question, and why a rank is late."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from ddpwatch.common.text import clean
from ddpwatch.tui.explaining import MOST_LINES, Explaining
from ddpwatch.tui.text import wrap
from ddpwatch.tui.views import VIEWS

MODAL_CSS = """
    ModalScreen { align: center middle; background: $background 60%; overflow: hidden; }
    #help { width: 84; max-width: 100%; height: auto; max-height: 100%; padding: 0 2; border: round $foreground; }
    #explain { width: auto; max-width: 100%; height: auto; max-height: 100%; padding: 0 1; border: round $foreground;
        scrollbar-size-vertical: 1; }
    #explain Static { width: auto; }
    AskScreen { align: left bottom; background: $background 0%; }
    #ask { height: auto; max-height: 4; border: round $foreground; }
    #ask Input { border: none; height: 1; padding: 0; }
"""
HELP = """\
[b]Keys[/b]
  1 … 8           views                 q  Ctrl-C  quit
  space           pause, resume         ← →  \\[ ]  step back, forward
  Home End        oldest, newest step   j k  ↓ ↑   scroll, select
  S  n  N         slowest, incident     g          go to step, time
  /  f            filter, slowest rank  a          another run
  y  P  E         copy, SVG, export     T  A       colours, ASCII
  + -  < >        replay speed, by 5 s  O  .       loop, to the end
  :               all commands          x  X       why: code, operators
"""
SIGNS = """\
[b]Everywhere[/b]  times are means over the newest 50 steps, lateness and
            buckets p50 of these; "–" means not known
  [b]▒[/b] forward  [b]▓[/b] backward  [b]░[/b] optimizer  [b]█[/b] communication  [b]≈[/b] data
  [b]╱[/b] exposed  [b]╲[/b] exposed: waits for the last rank  [b]╍[/b] waits behind compute
  [b]⡇[/b] gradient ready  [b]◆[/b] mark  Faded: stale. A pause freezes views only."""


class _OverView(ModalScreen[None]):
    """What gives way to the views: their keys close it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding(key, f"view('{key}')", "Another view") for key in VIEWS]

    async def action_view(self, key: str) -> None:
        """Closes this, and shows a view."""
        self.dismiss()
        await self.app.run_action(f"view('{key}')")


class HelpScreen(_OverView):
    """Explains the keys and a view's figures."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter,space", "dismiss", "Close"),
        Binding("down,j", "scroll(1)", "Down"),
        Binding("up,k", "scroll(-1)", "Up"),
    ]

    def __init__(self, name: str, definitions: str) -> None:
        super().__init__()
        self._view = f"[b]{name}[/b]\n{definitions}\n"

    def compose(self) -> ComposeResult:
        """Yields one scrollable text."""
        with VerticalScroll(id="help") as box:
            box.border_subtitle = "j k scroll, Esc closes"
            yield Static(HELP + self._view + SIGNS)

    def action_scroll(self, by: int) -> None:
        """Scrolls by lines."""
        self.query_one("#help").scroll_relative(y=by, animate=False)


class ExplainScreen(_OverView):
    """Shows why a rank is late, once that is known."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,x,X,enter,space", "dismiss", "Close"),
        Binding("q", "app.quit", "Quit"),
        Binding("left,h", "choose(-1)", "Older"),
        Binding("right,l", "choose(1)", "Newer"),
        Binding("question_mark", "app.help", "Help"),
    ]

    def __init__(self, explaining: Explaining) -> None:
        super().__init__()
        self._explaining = explaining
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        """Yields one scrollable text."""
        with VerticalScroll(id="explain") as box:
            box.border_subtitle = "Esc closes, q quits"
            yield self._text

    def on_mount(self) -> None:
        """Shows how far it has come, from now on."""
        self.show()
        self.set_interval(0.25, self.show)

    def on_resize(self) -> None:
        """Fits the text."""
        self.show()

    def on_unmount(self) -> None:
        """Asks for nothing more."""
        self._explaining.withdraw()

    def action_choose(self, by: int) -> None:
        """Shows a newer explanation, or an older one."""
        self._explaining.choose(by)
        self.show()

    def show(self) -> None:
        """Shows what is known by now."""
        explaining, width = self._explaining, self.size.width - 5  # border, padding, scrollbar
        waiting = explaining.under_way
        text, tables = (wrap(clean(waiting), width, MOST_LINES), []) if waiting else explaining.lines(width)
        self._text.update(Text("\n").join([Text("\n".join(text), "bold"), *map(Text, tables)]))
        self.query_one("#explain").border_title = "" if waiting else explaining.place


class AskScreen(ModalScreen[str | None]):
    """Asks for one line of text; dismisses with None if the user cancels."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel")]

    def __init__(self, question: str, hint: str, value: str) -> None:
        super().__init__()
        self._question, self._hint, self._value = question, hint, value

    def compose(self) -> ComposeResult:
        """Returns the question, and a line to type."""
        with Vertical(id="ask"):
            yield Static(f"{self._question}: {self._hint}", markup=False)
            yield Input(self._value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Accepts the line."""
        self.dismiss(event.value)

    def action_cancel(self) -> None:
        """Changes nothing."""
        self.dismiss(None)
