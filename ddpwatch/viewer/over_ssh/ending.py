"""Why ssh has ended: one line, what to do about it, and whether trying again makes sense."""

from __future__ import annotations

import contextlib
import signal
from typing import NamedTuple

from ddpwatch.errors import DdpwatchError, UsageError

NOT_FOUND = 127  # exit code of a shell that does not find the command
SSH_FAILED = 255  # ssh's own
THERE = (1, 2, 126, NOT_FOUND)  # exit codes of ddpwatch on the other host, or of the shell that should start it
_ERROR, _HINT, _LINE_CHARACTERS = "ddpwatch: error: ", "hint: ", 300


class Ending(NamedTuple):
    """What the user reads.

    Attributes:
        final: The other host has answered; another attempt would bring the same.
    """

    error: DdpwatchError
    final: bool


def ending(node: str, code: int, stderr: str, printed: str = "") -> Ending:
    """Returns the ending of an ssh process.

    Args:
        node: Where it led.
        code: Its exit code; negative for a signal.
        stderr: The last that it has written there.
        printed: What came in place of ddpwatch's first line.
    """
    lines = [line for line in map(_clean, [*printed.splitlines(), *stderr.splitlines()]) if line]
    hints = [line for line in lines if line.startswith(_HINT)]
    said = next((line for line in reversed(lines) if line not in hints), "").removeprefix(_ERROR)
    text = f"{node}: {said}" if code in THERE and said else f"{node}: {_ended(code)}{': ' if said else ''}{said}"
    hint = _hint(node, code, said) or (hints[-1].removeprefix(_HINT) if hints else "")
    return Ending((UsageError if code == UsageError.exit_code else DdpwatchError)(text, hint), code in THERE)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ssh ended with exit code {code}"
    name = f"signal {-code}"  # most real-time signals have no name
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    return f"ssh was killed by {name}"


def _hint(node: str, code: int, said: str) -> str:
    if "_stdio" in said:
        return "install the same version of ddpwatch on both hosts"
    if code == NOT_FOUND:
        return f"`ssh {node} ddpwatch --version` must work: install it there, or put it on the PATH of that shell"
    if code == SSH_FAILED:
        return f"`ssh {node}` must work; options go into ~/.ssh/config"
    return ""


def _clean(text: str) -> str:
    """Removes control characters: it comes from another host."""
    return "".join(c for c in text if c.isprintable()).strip()[:_LINE_CHARACTERS]
