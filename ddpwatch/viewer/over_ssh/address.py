"""``ssh://[user@]node[:port][/run]``, and the command that it becomes."""

from __future__ import annotations

import os
import re
import shlex
from typing import Final, NamedTuple

from ddpwatch.errors import UsageError

SCHEME: Final = "ssh://"
# Neither an option of ssh's nor of the shell's there: no part starts with a dash or has a character that a shell reads.
_URL = re.compile(
    r"ssh://(?P<node>(?:\w[\w.+-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\]))(?::(?P<port>\d{1,5}))?"
    r"(?:/(?P<run>(?:\w[\w.-]{0,127})?))?",
    re.ASCII,
)


class Address(NamedTuple):
    """Where a run is. Without ``run``, the newest one there."""

    node: str
    port: str
    run: str

    def command(self, *arguments: str) -> list[str]:
        """Returns what to start: ``DDPWATCH_SSH`` (default: ``ssh``), without a terminal there, and ddpwatch.

        Args:
            arguments: Ddpwatch's; by default, those that make it the other end for the run.
        """
        port, run = ["-p", self.port] if self.port else [], [self.run] if self.run else []
        return [*program(), "-T", *port, self.node, "ddpwatch", *(arguments or ["_stdio", *run])]

    def url(self) -> str:
        """Returns it as the user writes it."""
        node = f"[{self.node}]" if ":" in self.node else self.node
        return SCHEME + node + (f":{self.port}" if self.port else "") + (f"/{self.run}" if self.run else "")


def program() -> list[str]:
    """Returns the command named by ``DDPWATCH_SSH``, with its arguments.

    Raises:
        UsageError: It cannot be split into words.
    """
    try:
        return shlex.split(os.environ.get("DDPWATCH_SSH", "")) or ["ssh"]
    except ValueError as error:
        raise UsageError(f"DDPWATCH_SSH: {error}", "a command as in a shell, e.g. ssh -F other_config") from error


def parse(url: str) -> Address:
    """Takes an address apart.

    Raises:
        UsageError: It is none.
    """
    match = _URL.fullmatch(url)
    if match is None:
        hint = "give ssh://[USER@]NODE[:PORT][/RUN]; other options go into ~/.ssh/config"
        raise UsageError(f"{url[:200]!r} is not the address of a run", hint)
    return Address(match["node"].replace("[", "").replace("]", ""), match["port"] or "", match["run"] or "")
