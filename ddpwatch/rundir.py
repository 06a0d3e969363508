"""The run directory: one small JSON file per run with its addresses, readable only by its owner.

It is ``$DDPWATCH_DIR``, else ``$XDG_RUNTIME_DIR/ddpwatch``, else ``/tmp/ddpwatch-<uid>``.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from pathlib import Path

import msgspec

from ddpwatch import clock
from ddpwatch.blackbox import directory_for
from ddpwatch.errors import DdpwatchError, UsageError

KEEP_LAST_VIEWS = 5
KEEP_LOGS_S = 7 * 86_400
_SOCKET_PATH_LIMIT = 100  # sun_path holds 108 bytes, and ZeroMQ needs a few


class RunInfo(msgspec.Struct, kw_only=True):
    """How to reach a run. ``pid`` is the collector's; ``started`` is in seconds since the Unix epoch."""

    run_id: str
    ingest: str
    publish: str
    pid: int
    world_size: int
    started: float
    script: str = ""
    recording: str = ""


def directory() -> Path:
    """The run directory, created with mode 0700 if it is missing.

    Raises:
        DdpwatchError: It cannot be created, belongs to another user, or is open to others.
    """
    path = _configured()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise DdpwatchError(f"{path}: {error.strerror}", "set DDPWATCH_DIR to a directory that you own") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise DdpwatchError(f"{path} is not a private directory that you own", "set DDPWATCH_DIR, or chmod 700 it")
    return path


def _configured() -> Path:
    if configured := os.environ.get("DDPWATCH_DIR"):
        return Path(configured)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "ddpwatch"
    return Path(f"/tmp/ddpwatch-{os.getuid()}")


def new_run_id(script: str) -> str:
    """A short name: the script, the time of day, four random hex digits."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(script).stem).strip("-")[:24] or "run"
    return f"{stem}-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"


def endpoints(run_id: str) -> tuple[str, str]:
    """The Unix socket endpoints (ingest, publish) of a run.

    Raises:
        DdpwatchError: The directory's path is too long for a Unix socket.
    """
    base = directory() / run_id
    if len(str(base)) + 4 > _SOCKET_PATH_LIMIT:
        raise DdpwatchError(f"{base}: too long for a Unix socket", "set DDPWATCH_DIR to a short path")
    return f"ipc://{base}.in", f"ipc://{base}.pub"


def write(info: RunInfo) -> Path:
    """Publishes a run in one atomic step, with mode 0600."""
    path = directory() / f"{info.run_id}.json"
    draft = path.with_suffix(".tmp")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(info))
    draft.replace(path)
    return path


def remove(run_id: str) -> None:
    """Removes a run's file, sockets and black boxes. The log stays."""
    base = directory()
    leftovers = [base / f"{run_id}{suffix}" for suffix in (".json", ".in", ".pub")]
    for path in [*leftovers, *(directory_for(base) or base).glob(f"{run_id}.box*")]:
        with contextlib.suppress(OSError):
            path.unlink()


def blackbox(run_id: str, rank: int) -> Path | None:
    """Path of a rank's black box; None without a place for it in memory (`ddpwatch.blackbox`)."""
    place = directory_for(directory())
    return None if place is None else place / f"{run_id}.box{rank}"


def live_runs() -> list[RunInfo]:
    """The runs whose collectors are alive, newest first. Removes the files of the others."""
    runs = []
    for path in directory().glob("*.json"):
        info = _read(path)
        if info is None:
            continue
        if clock.pid_alive(info.pid):
            runs.append(info)
        else:
            remove(info.run_id)
    _remove_old_logs()
    return sorted(runs, key=lambda info: info.started, reverse=True)


def last_view(run_id: str) -> Path:
    """Path of the recording in which an ended run leaves its snapshot, for viewers that attach late."""
    return directory() / f"{run_id}.mcap"


def last_views() -> list[Path]:
    """The recordings that ended runs have left, newest first. Removes all but `KEEP_LAST_VIEWS`."""
    found = sorted(directory().glob("*.mcap"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[KEEP_LAST_VIEWS:]:
        with contextlib.suppress(OSError):
            path.unlink()
    return found[:KEEP_LAST_VIEWS]


def newest_run() -> RunInfo | None:
    """The live run that started last; None without one."""
    return next(iter(live_runs()), None)


def find(name: str) -> RunInfo:
    """The live run with that id, or with an id that starts with it.

    Raises:
        UsageError: No run matches, or more than one.
    """
    runs = [info for info in live_runs() if info.run_id.startswith(name)]
    if len(runs) == 1 or any(info.run_id == name for info in runs):
        return next((info for info in runs if info.run_id == name), runs[0])
    if not runs:
        raise UsageError(f"no live run called {name!r}", "`ddpwatch ls` lists the live runs")
    raise UsageError(f"{name!r} matches {len(runs)} runs", "give more of the id: " + ", ".join(r.run_id for r in runs))


def _read(path: Path) -> RunInfo | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except (OSError, msgspec.DecodeError):
        return None


def _remove_old_logs() -> None:
    for path in directory().glob("*.log"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > KEEP_LOGS_S:
                path.unlink()
