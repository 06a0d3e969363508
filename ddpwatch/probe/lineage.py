"""Which run a job was before torchrun started its ranks again: after a failure, or when a node left or joined.

torchrun stays where it is, on each host, and starts new ranks below itself. So a rank leaves a note for the one that
takes its place. One that has finished leaves none.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ddpwatch import clock, rundir
from ddpwatch.errors import DdpwatchError


class Lineage:
    """One rank's place below torchrun; without torchrun, there is none. Never fails: then nobody knows of a run before.

    Args:
        session: Number of the session in this process, from 1: what a process watches later continues no other run.

    Attributes:
        previous: The run before; empty without one.
    """

    def __init__(self, session: int) -> None:
        self._note = _note()
        self.previous = "" if self._note is None or session > 1 else _read(self._note)

    def leave_note(self, run_id: str) -> None:
        """Notes the run for the next rank in this place."""
        if self._note is None:
            return
        new = self._note.with_suffix(f".new{os.getpid()}")
        with contextlib.suppress(OSError):
            new.write_text(run_id)
            new.rename(self._note)

    def remove_note(self) -> None:
        """The job has finished: none comes after this one."""
        if self._note is not None:
            with contextlib.suppress(OSError):
                self._note.unlink(missing_ok=True)


def _note() -> Path | None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    launcher = os.getppid()
    place = f"{launcher}-{clock.start_ticks(launcher)}-{os.environ.get('LOCAL_RANK', '0')}"
    try:
        return rundir.note(place)
    except DdpwatchError:
        return None


def _read(note: Path) -> str:
    try:
        return rundir.check_run_id(note.read_text())
    except (OSError, ValueError, DdpwatchError):
        return ""
