"""A command in place of ssh: it runs ddpwatch's other end on this machine, or fails as ssh does."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

SILENCE_S = 0.3
_DDPWATCH = (
    f"import sys, ddpwatch.viewer.live_source as live; live.SILENCE_S = {SILENCE_S}; "
    "from ddpwatch.cli import main; sys.argv[0] = 'ddpwatch'; main()"
)


class FakeSsh:
    """A shell script that `DDPWATCH_SSH` names.

    Args:
        folder: Where to put it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fake-ssh"
        self._calls = folder / "calls"
        self.relays()

    def relays(self, before: str = "", after: str = "") -> None:
        """Runs what follows the host. ``before`` is shell code that runs first; ``after`` follows in a pipe."""
        run = f"{shlex.quote(sys.executable)} -c {shlex.quote(_DDPWATCH)}"
        self._write(
            f'{before}\nwhile [ "$1" != ddpwatch ]; do shift; done; shift\n{"" if after else "exec "}{run} "$@" {after}'
        )

    def fails(self, code: int, stderr: str = "", stdout: str = "") -> None:
        """Ends with an exit code."""
        self._write(f"printf %s {shlex.quote(stdout)}; printf %s {shlex.quote(stderr)} >&2; exit {code}")

    def calls(self) -> list[str]:
        """The arguments of each call."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def _write(self, code: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(self._calls))}\n{code}\n')
        new.chmod(0o700)
        new.rename(self.path)
