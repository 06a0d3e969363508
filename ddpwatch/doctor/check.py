"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "none", "warn", "fail"]
"""``none``: something is not here, which may be as it should be. ``warn``: a part of ddpwatch does not work, or does
something else than was meant. ``fail``: ddpwatch cannot watch here at all."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was found about one thing. What is not ok has a hint: what to do."""

    section: str
    name: str
    state: State
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Makes the checks of one section."""

    name: str

    def ok(self, name: str, text: str) -> Check:
        """Says that it works."""
        return Check(self.name, name, "ok", text)

    def none(self, name: str, text: str, hint: str) -> Check:
        """Says that it is not here."""
        return Check(self.name, name, "none", text, hint)

    def warn(self, name: str, text: str, hint: str) -> Check:
        """Says that it works in part, or is not as it was meant."""
        return Check(self.name, name, "warn", text, hint)

    def fail(self, name: str, text: str, hint: str) -> Check:
        """Says that without it, ddpwatch cannot watch."""
        return Check(self.name, name, "fail", text, hint)


def error_text(error: BaseException) -> str:
    """Returns an error in one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.strip().splitlines()[-1]
