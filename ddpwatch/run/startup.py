"""The start-up file: what the Python processes of a job say before they are watched, or if they never are.

`ddpwatch run` creates one per job, and names it in `VARIABLE`. The bootstrap appends a line wherever one of its
processes starts, imports torch, joins a process group, builds a model, or ends: ``PID WORD TEXT``. A job that is never
watched has nothing else from which a user could learn why. `ddpwatch run` itself adds that it got SIGINT.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "DDPWATCH_STARTUP"
MOST_BYTES: Final = 1 << 20  # then processes say no more
_INTERRUPTED: Final = b"0 interrupted \n"
_PAIR: Final = re.compile(r"[0-9]{1,9} [0-9]{1,9}")


@dataclass(slots=True)
class Process:
    """What one Python process has said.

    Attributes:
        rank: By torchrun's variables, or in its process group.
        ranks: How many there are: on this host, or in its process group.
        launcher: It has imported what starts torchrun's ranks.
        torch: It has imported torch.
        group: World size of its process group; None if none was seen.
        model: What is to be watched: a model that is ``wrapped`` in DDP or FSDP2, or a ``loop`` whose optimizer has
            stepped; empty if nothing was seen.
        refused: Why that is not watched.
        error: The exception that has ended it.
    """

    rank: int | None = None
    ranks: int | None = None
    launcher: bool = False
    torch: bool = False
    group: int | None = None
    model: str = ""
    refused: str = ""
    error: str = ""

    @property
    def launches(self) -> bool:
        """Whether it is torchrun, and no rank."""
        return self.launcher and self.rank is None

    def hear(self, word: str, text: str) -> None:
        """Takes one line. Words of another version change nothing."""
        if word in ("start", "group") and _PAIR.fullmatch(text):
            self.rank, self.ranks = map(int, text.split())
            self.group = self.ranks if word == "group" else None
        elif word in ("launcher", "torch"):
            setattr(self, word, True)
        elif word in ("model", "refused", "error"):
            setattr(self, word, text)


def create(path: Path) -> None:
    """Creates an empty file for a job.

    Raises:
        OSError: It exists, or cannot be created.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def note_interrupt(path: Path) -> None:
    """Says that somebody interrupts the job. Does nothing without the file."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(file, _INTERRUPTED)
        finally:
            os.close(file)


def was_interrupted() -> bool:
    """Returns whether somebody interrupted the job of this process (SIGINT), as far as its file says."""
    try:
        return _INTERRUPTED in Path(os.environ.get(VARIABLE, os.devnull)).read_bytes()
    except OSError:
        return False


def read(path: Path) -> list[Process] | None:
    """Returns what the processes of a job have said so far, in the order in which they started.

    None without the file.
    """
    try:
        with open(path, "rb") as file:
            return list(_processes(file.read(2 * MOST_BYTES)))
    except OSError:
        return None


def _processes(content: bytes) -> Iterator[Process]:
    known: dict[str, Process] = {}
    for line in content.decode(errors="replace").split("\n")[:-1]:  # the last one may be unfinished
        pid, word, text = [*line.split(" ", 2), "", ""][:3]
        if word == "interrupted":  # that is no process of the job's
            continue
        if pid not in known or word == "start":  # the kernel may have used the pid before
            known[pid] = process = Process()
            yield process
        known[pid].hear(word, text)
