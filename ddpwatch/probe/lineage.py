"""Which run a job was before torchrun started its ranks again: after a failure, or when a node left or joined.

torchrun stays where it is, on each node, and starts new ranks below itself. So a rank leaves a note for the one that
takes its place. It stays when the rank ends, since nobody knows then whether another one will come. Once torchrun has
gone, the collector removes it, which waits for that, or a later run (`rundir.remove_old_notes`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ddpwatch.errors import DdpwatchError
from ddpwatch.run import clock, rundir
from ddpwatch.run.regular import write_whole


def succeed(run_id: str, session: int, leaves_note: bool = True) -> str:
    """Leaves a note of the run for the next rank in this place below torchrun. It reads and writes files.

    Never fails: then nobody knows of a run before.

    Args:
        run_id: This rank's run.
        session: Number of the session in this process, from 1: what a process watches later continues no other run.
        leaves_note: False only reads: the run has no collector any more, which would remove the note at last.

    Returns:
        The run before; empty without one, and without torchrun.
    """
    note = _note()
    if note is None:
        return ""
    previous = "" if session > 1 else rundir.read_note(note)
    with contextlib.suppress(OSError, ValueError, DdpwatchError):
        if leaves_note:
            write_whole(note, run_id.encode())
        rundir.remove_old_notes()
    return previous


def _note() -> Path | None:
    """Returns this place's note, which no other process below any torchrun has; None without torchrun."""
    launcher, place = os.getppid(), os.environ.get("LOCAL_RANK", "0")
    started = clock.start_ticks(launcher)
    if "TORCHELASTIC_RUN_ID" not in os.environ or not started:
        return None
    try:
        return rundir.note(launcher, started, int(place))
    except (OSError, ValueError, DdpwatchError):
        return None
