"""The keys of all views: which the command palette lists, and which are named below the views."""

from __future__ import annotations

from textual.binding import Binding

from ddpwatch.tui.views import VIEWS
from ddpwatch.tui.views.base import hidden


def _listed(keys: str, action: str, title: str, shown: str = "", as_key: str | None = None) -> Binding:
    """Returns a key that the command palette lists as well. It is ``shown`` below the views if there is a word."""
    return Binding(keys, action, shown, show=bool(shown), key_display=as_key, tooltip=title)


COMMANDS = (
    _listed("plus,equals_sign", "speed(1)", "Replay: faster", "speed", "+ -"),
    _listed("minus", "speed(-1)", "Replay: slower"),
    _listed("less_than_sign,ctrl+left", "seek(-5)", "Replay: 5 seconds back", "5 s", "< >"),
    _listed("greater_than_sign,ctrl+right", "seek(5)", "Replay: 5 seconds forward"),
    _listed("O", "loop", "Replay: loop on or off", "loop"),
    _listed("full_stop", "play_to_end", "Replay: to the end", "to the end"),
    _listed("space", "pause", "Pause or resume", "pause"),
    _listed("end", "newest", "Newest step", "last"),
    _listed("home", "oldest", "Oldest step; in a replay the start"),
    _listed("S", "slowest", "Slowest step", "slowest"),
    _listed("n", "finding(1)", "Next incident or unusual step", "event"),
    _listed("N", "finding(-1)", "Previous incident or unusual step"),
    _listed("x", "explain", "Explain why a rank is late: lines of code"),
    _listed("X", "explain('profiler')", "Explain why a rank is late: operators, by torch's profiler"),
    _listed("slash", "filter", "Filter ranks", "filter"),
    _listed("a", "runs", "Choose another run", "runs"),
    _listed("g", "go_to", "Go to a step, or in a replay to a time"),
    _listed("f", "follow", "Follow the slowest rank"),
    _listed("y", "copy", "Copy the verdict or the line"),
    _listed("P", "save_svg", "Save the screen as SVG"),
    _listed("E", "export_step", "Export the step as a Chrome trace"),
    _listed("T", "next_theme", "Next colour theme"),
    _listed("A", "ascii", "ASCII only, or all characters"),
    _listed("question_mark", "help", "Help"),
    _listed("q", "quit", "Quit"),
)

NAVIGATION = (
    Binding("left,h", "step(-1)", "step", key_display="←→"),
    Binding("left_square_bracket", "step(-1)", "step", key_display="[ ]"),
    hidden("right,l,right_square_bracket", "step(1)", "Next step"),
    *(hidden(key, f"view('{key}')", view.NAME) for key, view in VIEWS.items()),
    hidden("ctrl+c", "interrupt", "Quit", priority=True),
    hidden("pagedown", "scroll(10)", "Page down"),
    hidden("pageup", "scroll(-10)", "Page up"),
    hidden("colon,ctrl+p", "command_palette", "All commands"),
)
REPLAY_ONLY = ("speed", "seek", "loop", "play_to_end")
LIVE_ONLY = ("runs",)
