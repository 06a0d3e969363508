"""Which run a job was before torchrun started its ranks again: after a failure, or when a node left or joined.

torchrun stays where it is, on each host, and starts new ranks below itself. So a rank leaves a note for the one that
takes its place. It stays when the rank ends, since nobody knows then whether another one will come; once torchrun has
gone, no other process has that place, and the note is removed by age.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from ddpwatch import clock, rundir
from ddpwatch.errors import DdpwatchError

_NOTE_BYTES = 256  # more than a run id has


def succeed(run_id: str, session: int) -> str:
    """Leaves a note of the run for the next rank in this place below torchrun. It reads and writes files.

    Never fails: then nobody knows of a run before.

    Args:
        run_id: This rank's run.
        session: Number of the session in this process, from 1: what a process watches later continues no other run.

    Returns:
        The run before; empty without one, and without torchrun.
    """
    try:
        note = rundir.note(place) if (place := _place()) else None
    except (OSError, ValueError, DdpwatchError):
        return ""
    if note is None:
        return ""
    previous = "" if session > 1 else _read(note)
    with contextlib.suppress(OSError, ValueError, DdpwatchError):
        _write(note, run_id)
        rundir.remove_old_notes()
    return previous


def _place() -> str:
    """A name for this place, which no other process below any torchrun has; empty if there is none."""
    launcher = os.getppid()
    ticks = clock.start_ticks(launcher)
    if "TORCHELASTIC_RUN_ID" not in os.environ or not ticks:
        return ""
    place = (clock.boot_id(), clock.pid_namespace(), launcher, ticks, os.environ.get("LOCAL_RANK", "0"))
    return hashlib.blake2b(repr(place).encode(), digest_size=12).hexdigest()


def _read(note: Path) -> str:
    """The run that a note names; empty if it names none. Waits for nobody, whatever is there."""
    try:
        file = os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return rundir.check_run_id(os.read(file, _NOTE_BYTES).decode())
        finally:
            os.close(file)
    except (OSError, ValueError, DdpwatchError):
        return ""


def _write(note: Path, run_id: str) -> None:
    new = rundir.unfinished_note(note.stem)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, run_id.encode())
        new.rename(note)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
