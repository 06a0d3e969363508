"""The command line. Each command imports what it needs, so that `ddpwatch ls` does not load the dashboard.

stdout is for data, stderr for messages. Exit codes: 0 success, 1 failure of what was asked for, 2 bad usage or input.
"""

from __future__ import annotations

import gc
import sys

from ddpwatch.cli import live, recordings, streams
from ddpwatch.cli.options import app
from ddpwatch.cli.shared import say
from ddpwatch.common.garbage import few_collections
from ddpwatch.errors import DdpwatchError

__all__ = ["app", "live", "main", "recordings"]


def main() -> None:
    """Runs the command line. Turns a `DdpwatchError` into one line, a hint and an exit code."""
    streams.prepare()
    try:
        try:
            with few_collections():
                app()
        finally:
            gc.freeze()  # spares the interpreter a full collection when it exits
            sys.stdout.flush()
    except DdpwatchError as error:
        say(f"ddpwatch: error: {error.message}")
        if error.hint:
            say(f"hint: {error.hint}")
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `ddpwatch report … | head`
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
