"""The base class of all errors that ddpwatch raises: a message, a hint and an exit code."""

from __future__ import annotations


class DdpwatchError(Exception):
    """An error that the user can act on.

    Attributes:
        message: What went wrong, one line.
        hint: What to do about it, one line; may be empty.
        exit_code: 1 if what was asked for failed, 2 for bad usage or bad input, 3 if noise hides the answer.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(DdpwatchError):
    """Bad usage or bad input: a wrong option, a truncated file, a missing run."""

    exit_code = 2


class UnclearError(DdpwatchError):
    """Noise hides the answer."""

    exit_code = 3
