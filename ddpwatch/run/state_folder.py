"""Where ddpwatch keeps for the user what outlives a run and was given no name: ``$XDG_STATE_HOME`` or its default."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from ddpwatch.errors import DdpwatchError


def state_folder(content: str) -> Path:
    """Returns the folder for such content; it need not exist.

    Raises:
        DdpwatchError: The user has no home.
    """
    try:
        return platformdirs.user_state_path("ddpwatch") / content
    except RuntimeError as error:
        raise DdpwatchError(f"there is no home directory for {content}", "set HOME or XDG_STATE_HOME") from error
