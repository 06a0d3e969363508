"""The one error that a user of the trainer can cause."""

from __future__ import annotations


class TrainerError(Exception):
    """A wrong name, an impossible combination or unreadable input.

    Raised before any process group starts, so that every rank stops with the same single line and none waits for
    another.
    """

    exit_code = 2
