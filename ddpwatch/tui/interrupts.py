"""Ctrl-C in the dashboard. It closes it; while the dashboard of a job closes, it is the job's, as it is thereafter."""

from __future__ import annotations

import contextlib
import sys
import termios

from textual.message import Message

LOCAL_MODES = 3  # in what `termios.tcgetattr` returns


class Interrupt(Message):
    """Ctrl-C, on the way that a key takes to the app: thus it overtakes none that was pressed before."""


def let_keys_interrupt() -> None:
    """Has the terminal make signals of Ctrl-C again, while textual is still to restore it."""
    with contextlib.suppress(termios.error, OSError, ValueError, AttributeError):  # there is none
        terminal = sys.__stdin__.fileno()  # type: ignore[union-attr]
        modes = termios.tcgetattr(terminal)
        modes[LOCAL_MODES] |= termios.ISIG
        termios.tcsetattr(terminal, termios.TCSANOW, modes)
