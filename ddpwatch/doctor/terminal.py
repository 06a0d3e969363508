"""What the terminal offers the dashboard."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping

from ddpwatch.doctor.check import Check, Section
from ddpwatch.errors import UsageError
from ddpwatch.tui.settings import Settings, load_settings

SMALLEST = (80, 24)  # columns and lines for which the views are made
DUMB = ("", "dumb", "unknown")
_section = Section("terminal")


def checks() -> Iterator[Check]:
    """Yields the kind of terminal, its colours, characters and size; without a terminal, only the characters."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    yield kind(is_terminal, os.environ.get("TERM", ""))
    yield characters(locale_of(os.environ, bool(sys.flags.utf8_mode)))
    if is_terminal:
        yield colours(os.environ, _theme())
        yield dimensions(*shutil.get_terminal_size())


def kind(is_terminal: bool, term: str) -> Check:
    """Returns whether the dashboard can open."""
    if not is_terminal:
        hint = "the dashboard needs one: ssh -t, docker run -it, kubectl exec -it, srun --pty"
        return _section.none("terminal", "input or output is not a terminal: commands print plain lines", hint)
    if term in DUMB:
        text = f"TERM={term}: it cannot place the cursor, which the dashboard does"
        return _section.warn("terminal", text, "set TERM, e.g. to xterm-256color, or use --plain")
    return _section.ok("terminal", f"TERM={term}")


def colours(environ: Mapping[str, str], theme: str) -> Check:
    """Returns which colours the dashboard uses, and why."""
    if theme == "none":
        why = "NO_COLOR is set" if environ.get("NO_COLOR") else "from the settings"
        return _section.ok("colours", f"none: {why}")
    if theme == "ansi":
        text = f"16 (TERM={environ.get('TERM', '')}, COLORTERM is {environ.get('COLORTERM') or 'not set'})"
        return _section.none("colours", text, "for more, set COLORTERM=truecolor if the terminal has them")
    return _section.ok("colours", f"24 bit (theme {theme}); the terminal may show fewer")


def characters(locale: str) -> Check:
    """Returns whether the locale is one of UTF-8."""
    if is_utf8(locale):
        return _section.ok("characters", locale)
    text = f"the locale is {locale}, which is not UTF-8: lines and blocks may come out as other characters"
    return _section.warn("characters", text, "set LANG=C.UTF-8, or use --ascii")


def dimensions(columns: int, lines: int) -> Check:
    """Returns whether the views fit."""
    if columns < SMALLEST[0] or lines < SMALLEST[1]:
        text = f"{columns}x{lines}: views need {SMALLEST[0]}x{SMALLEST[1]}, and are cut off"
        return _section.warn("size", text, "enlarge the window, or use --plain")
    return _section.ok("size", f"{columns}x{lines}")


def is_utf8(locale: str) -> bool:
    """Returns whether a locale's name says UTF-8."""
    return "utf8" in locale.lower().replace("-", "")


def locale_of(environ: Mapping[str, str], utf8_mode: bool) -> str:
    """Returns the locale's name for characters, as it was before Python started.

    In the C locale, Python turns its UTF-8 mode on and sets LC_CTYPE to C.UTF-8 (PEP 538 and 540).
    """
    of_characters = environ.get("LC_CTYPE", "")
    if utf8_mode and of_characters == "C.UTF-8":
        of_characters = ""
    return environ.get("LC_ALL") or of_characters or environ.get("LANG") or "C"


def _theme() -> str:
    try:
        return load_settings().resolved_theme()
    except UsageError:  # the check of the settings says it
        return Settings().resolved_theme()
