"""The keys of all views, and which of them the command palette lists."""

from __future__ import annotations

from textual.binding import Binding

from ddpwatch.tui.views import VIEWS


def _listed(keys: str, action: str, title: str, display: str) -> Binding:
    """Returns a key that the command palette lists as well."""
    return Binding(keys, action, title, key_display=display, tooltip=f"key {display}")


COMMANDS = (
    _listed("space", "pause", "Pause or resume", "space"),
    _listed("S", "slowest", "Slowest step", "S"),
    _listed("n", "finding(1)", "Next finding", "n"),
    _listed("N", "finding(-1)", "Previous finding", "N"),
    _listed("g", "go_to", "Go to a step, or in a replay to a time", "g"),
    _listed("less_than_sign,ctrl+left", "seek(-5)", "Replay: 5 seconds back", "<"),
    _listed("greater_than_sign,ctrl+right", "seek(5)", "Replay: 5 seconds forward", ">"),
    _listed("home", "oldest", "Oldest step; in a replay the start", "Home"),
    _listed("end", "newest", "Newest step", "End"),
    _listed("full_stop", "play_to_end", "Replay: to the end", "."),
    _listed("plus,equals_sign", "speed(1)", "Replay: faster", "+"),
    _listed("minus", "speed(-1)", "Replay: slower", "-"),
    _listed("O", "loop", "Replay: loop on or off", "O"),
    _listed("slash", "filter", "Filter ranks", "/"),
    _listed("f", "follow", "Follow the slowest rank", "f"),
    _listed("y", "copy", "Copy the finding", "y"),
    _listed("P", "save_svg", "Save the screen as SVG", "P"),
    _listed("E", "export_step", "Export the step as a Chrome trace", "E"),
    _listed("T", "next_theme", "Next colour theme", "T"),
    _listed("A", "ascii", "ASCII only, or all characters", "A"),
    _listed("a", "runs", "Choose another run", "a"),
    _listed("question_mark", "help", "Help", "?"),
    _listed("q", "quit", "Quit", "q"),
)

NAVIGATION = (
    *(Binding(key, f"view('{key}')", view.NAME) for key, view in VIEWS.items()),
    Binding("ctrl+c", "quit", "Quit", priority=True),
    Binding("left,h,left_square_bracket", "step(-1)", "Previous step"),
    Binding("right,l,right_square_bracket", "step(1)", "Next step"),
    Binding("down,j", "scroll(1)", "Down"),
    Binding("up,k", "scroll(-1)", "Up"),
    Binding("pagedown", "scroll(10)", "Page down"),
    Binding("pageup", "scroll(-10)", "Page up"),
    Binding("colon,ctrl+p", "command_palette", "All commands"),
)
