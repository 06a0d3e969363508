"""The run directory: one small JSON file per run with its addresses, readable only by its owner.

It is ``$DDPWATCH_DIR``, else ``$XDG_RUNTIME_DIR/ddpwatch`` if that variable names a directory of the user's, else
``/tmp/ddpwatch-<uid>``.

A run is live as long as its collector, or the rank that starts it, holds a lock (``flock``) on the run's file. Unlike
a pid, a lock means the same in every pid namespace, is never reused, and ends with the process. What a collector of
another boot or host left (the directory may be on NFS) is out of reach of this test, so it is removed by age only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

import msgspec

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.run import clock
from ddpwatch.run.regular import open_regular, read_regular

KEEP_LAST_VIEWS = 5
KEEP_LOGS_S = 7 * 86_400
KEEP_UNREACHABLE_S = 30 * 86_400  # what another boot or host left; a collector that lives renews its file
CLAIMED_S = 10  # more than enough to lock a file that was created
NOTE, ANSWER, REST = ".note", ".answer", ".rest"
KEEP_ANSWERS_S = 120  # of ranks that were gone before they were answered
SHARED_MEMORY = Path("/dev/shm")
MOUNTS = Path("/proc/self/mounts")
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", re.ASCII)
_NOTE_NAME = re.compile(r"\.?([0-9a-f]{12})\.(\d{1,9})\.(\d{1,18})\.\d{1,9}\.note(?:\.[0-9a-f]{8}\.new)?", re.ASCII)
LAST_VIEW = ".last.mcap"  # so that nobody's recordings of other names are removed
_SOCKET_PATH_LIMIT = 100  # sun_path holds 108 bytes, and ZeroMQ needs a few


class RunInfo(msgspec.Struct, kw_only=True):
    """How to reach a run, and where its collector is.

    Attributes:
        pid: The collector's, in its pid namespace ``pid_ns``.
        started: Seconds since the Unix epoch.
        commit: What is checked out in the job's directory; empty if that is not known.
        boot_id: The kernel's id of the boot.
        start_ticks: When the collector's process started, in clock ticks since boot.
        launched: The name that `ddpwatch run` on this host has given the job; empty without it.
        previous: The run that the job was before torchrun started its ranks again; empty if there was none.
        ended: Whether the run is over and its recording complete: its collector only answers viewers that come late.
    """

    run_id: str
    ingest: str
    publish: str
    pid: int
    world_size: int
    started: float
    script: str = ""
    recording: str = ""
    host: str = ""
    boot_id: str = ""
    pid_ns: str = ""
    start_ticks: int = 0
    launched: str = ""
    previous: str = ""
    commit: str = ""
    ended: bool = False


def directory() -> Path:
    """Returns the run directory, created with mode 0700 if it is missing.

    Raises:
        DdpwatchError: It cannot be created, is a symbolic link, belongs to another user, or is open to others.
    """
    path = _configured()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()  # the owner of a link chooses where it leads
    except OSError as error:
        hint = "set DDPWATCH_DIR to a directory that you own; `ddpwatch doctor` shows what works here"
        raise DdpwatchError(f"{path}: {error.strerror}", hint) from error
    if not _is_private(status):
        raise DdpwatchError(f"{path} is not a private directory that you own", "set DDPWATCH_DIR, or chmod 700 it")
    return path


def fallback() -> str:
    """Returns which directory is used in place of one in ``$XDG_RUNTIME_DIR``, and why.

    Empty where that can be used.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.environ.get("DDPWATCH_DIR") or not runtime or _is_usable(runtime):
        return ""
    why = "is missing" if not Path(runtime).exists() else "is not yours to write to"
    return f"XDG_RUNTIME_DIR={runtime} {why}: using {_configured()} (DDPWATCH_DIR chooses another for jobs and viewers)"


def _configured() -> Path:
    if configured := os.environ.get("DDPWATCH_DIR"):
        return Path(configured)
    if (runtime := os.environ.get("XDG_RUNTIME_DIR")) and _is_usable(runtime):
        return Path(runtime) / "ddpwatch"
    return Path(f"/tmp/ddpwatch-{os.getuid()}")


def _is_usable(runtime: str) -> bool:
    """Returns whether the runtime directory is there, and the user's.

    SLURM, sudo and containers pass on one that is not.
    """
    try:
        return Path(runtime).stat().st_uid == os.getuid() and os.access(runtime, os.W_OK | os.X_OK)
    except OSError:
        return False


def _is_private(status: os.stat_result) -> bool:
    """Returns whether it is a directory of the user's that is closed to others."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _memory_directory(run_directory: Path) -> Path | None:
    """Returns the run directory if it is in memory, else a private directory that is; None if there is none."""
    if file_system(run_directory) == "tmpfs":
        return run_directory
    if file_system(SHARED_MEMORY) != "tmpfs":
        return None
    path = SHARED_MEMORY / f"ddpwatch-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    return path if _is_private(status) and os.access(path, os.W_OK) else None


def file_system(path: Path) -> str:
    """Returns the kind of the file system that a path is on, e.g. ``tmpfs``; empty where that is not known."""
    try:
        mounts = [line.split()[1:3] for line in os.fsdecode(MOUNTS.read_bytes()).splitlines()]
    except OSError:
        return ""
    real = path.resolve()
    above = [(len(point), kind) for point, kind in mounts if real.is_relative_to(point)]
    return max(reversed(above), key=itemgetter(0))[1] if above else ""  # the last mount hides those before


def node() -> str:
    """Returns a name for this host, or container: equal for processes that share the run directory's sockets.

    Network and pid namespaces make no difference, and neither does the host's name.
    """
    status = directory().stat()
    place = f"{clock.boot_id() or socket.gethostname()} {status.st_dev}:{status.st_ino}"
    return hashlib.blake2b(place.encode(), digest_size=6).hexdigest()


def script_name(path: str) -> str:
    """Returns what a script is called: its file, or the package that ``python -m`` runs."""
    file = Path(path)
    return file.parent.name if file.name == "__main__.py" else file.name


def new_run_id(script: str) -> str:
    """Returns a short name: the script, the time of day, four random hex digits."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(script_name(script)).stem).strip("-")[:24] or "run"
    return f"{stem}-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"


def is_run_id(run_id: str) -> bool:
    """Returns whether the id can be part of a file's name."""
    return _RUN_ID.fullmatch(run_id) is not None


def check_run_id(run_id: str) -> str:
    """Returns the id if it can be part of a file's name.

    Raises:
        DdpwatchError: It cannot: it comes from a file or from the job's store.
    """
    if not is_run_id(run_id):
        raise DdpwatchError(f"{run_id[:40]!r} is not a run id")
    return run_id


def _path(run_id: str, suffix: str) -> Path:
    return directory() / f"{check_run_id(run_id)}{suffix}"


def endpoints(run_id: str) -> tuple[str, str]:
    """Returns the Unix socket endpoints (ingest, publish) of a run.

    Raises:
        DdpwatchError: The directory's path is too long for a Unix socket.
    """
    base = _path(run_id, "")
    if len(str(base)) + 4 > _SOCKET_PATH_LIMIT:
        raise DdpwatchError(f"{base}: too long for a Unix socket", "set DDPWATCH_DIR to a short path")
    return f"ipc://{base}.in", f"ipc://{base}.pub"


def claim(run_id: str) -> int:
    """Creates a run's file (mode 0600), still empty, and locks it.

    Returns:
        A file descriptor. The run is live until every copy of it is closed; a process that is started can inherit it.

    Raises:
        FileExistsError: There is a run of that id.
    """
    file = os.open(_path(run_id, ".json"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then viewers look for the process
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def publish(claimed: int, info: RunInfo) -> None:
    """Writes the run's file, given its claim: from now on, viewers find the run. May be called again.

    Raises:
        DdpwatchError: The file is not there any more.
    """
    path = _path(info.run_id, ".json")
    if not path.exists() or not os.path.samestat(path.stat(), os.fstat(claimed)):
        raise DdpwatchError(f"{path} was removed")
    content = msgspec.json.encode(info)
    os.pwrite(claimed, content.ljust(os.fstat(claimed).st_size), 0)  # in one go: somebody may be reading it


def renew(claimed: int, run_id: str) -> None:
    """Touches what a run has here, given its claim, before a cleaner of /tmp takes it for left over.

    Writing to a mapped page does not change its file's time. May raise OSError.
    """
    os.utime(claimed)
    for path in _mapped(run_id):
        os.utime(path)


def remove(run_id: str) -> None:
    """Removes a run's file, sockets, lease and black boxes, and old notes. The log stays."""
    remove_old_notes()
    leftovers = [_path(run_id, suffix) for suffix in (".json", ".in", ".pub")]
    for path in (*leftovers, *rests(run_id), *_mapped(run_id)):
        with contextlib.suppress(OSError):
            path.unlink()


def blackbox(run_id: str, rank: int) -> Path | None:
    """Returns the path of a rank's black box; None without a place for it in memory (`ddpwatch.run.blackbox`).

    Ranks and collector ask alike, so they agree without a message.
    """
    return _in_memory(run_id, f".box{rank}")


def blackboxes(run_id: str, ranks: Iterable[int]) -> list[Path]:
    """Returns paths of several ranks' black boxes, found at once; empty without a place for them."""
    first = blackbox(run_id, 0)
    return [] if first is None else [first.with_name(f"{run_id}.box{rank}") for rank in ranks]


def lease(run_id: str) -> Path | None:
    """Returns the path of the run's lease (`ddpwatch.sampling.lease`), which is where the black boxes are."""
    return _in_memory(run_id, ".lease")


def _in_memory(run_id: str, suffix: str) -> Path | None:
    try:
        place = _memory_directory(directory())
    except DdpwatchError:  # somebody has taken its place while the run goes on
        return None
    return None if place is None else place / f"{check_run_id(run_id)}{suffix}"


def _mapped(run_id: str) -> list[Path]:
    """Returns the run's black boxes and lease."""
    base = directory()
    places = {base, _memory_directory(base) or base}
    return [path for place in places for suffix in ("box*", "lease") for path in place.glob(f"{run_id}.{suffix}")]


def log(run_id: str) -> Path:
    """Returns the path of the collector's log."""
    return _path(run_id, ".log")


def startup(name: str) -> Path:
    """Returns the path of the start-up file of a job that `ddpwatch run` has named (`ddpwatch.run.startup`)."""
    return _path(name, ".startup")


def note(launcher: int, started: int, local_rank: int) -> Path:
    """Returns the path of what a rank leaves for the one that takes its place (`ddpwatch.probe.lineage`).

    Args:
        launcher: Torchrun's pid.
        started: When it started (`clock.start_ticks`).
        local_rank: The place.
    """
    return _path(f"{_pids_here()}.{launcher}.{started}.{local_rank}", NOTE)


def answer(nonce: str) -> Path:
    """Returns the path of rank 0's answer to a rank of this host (`ddpwatch.probe.store_requests`)."""
    return _path(nonce, ANSWER)


def rest(run_id: str, rank: int) -> Path:
    """Returns the path of what a rank leaves that ends before its collector is up (`wire.control.RestFile`)."""
    return _path(run_id, f"{REST}{rank}")


def rests(run_id: str) -> list[Path]:
    """Returns what ranks have left in this way."""
    return sorted(directory().glob(f"{check_run_id(run_id)}{REST}*"))


def read_note(path: Path) -> str:
    """Returns the run that a note names; empty if it names none. Waits for nobody, whatever is there."""
    try:
        return check_run_id(read_regular(path, 256, os.O_NOFOLLOW).decode())  # more than a run id has
    except (OSError, ValueError, DdpwatchError):
        return ""


def has_notes(run_id: str) -> bool:
    """Returns whether notes name the run. Once torchrun has started its ranks again, they name the next one."""
    return any(_NOTE_NAME.fullmatch(path.name) and read_note(path) == run_id for path in directory().iterdir())


def remove_old_notes() -> None:
    """Removes the notes of jobs whose torchrun has gone, or is out of sight and started long ago."""
    for path in directory().iterdir():
        if (named := _NOTE_NAME.fullmatch(path.name)) and _is_past(path, named):
            with contextlib.suppress(OSError):
                path.unlink()


def _is_past(note: Path, named: re.Match[str]) -> bool:
    pids, launcher, started = named.groups()
    if pids == _pids_here():
        return clock.start_ticks(int(launcher)) != int(started)
    with contextlib.suppress(OSError):
        return time.time() - note.stat().st_mtime > KEEP_UNREACHABLE_S
    return False


def _pids_here() -> str:
    """Returns a name for the processes that have a pid here: those of this boot and pid namespace."""
    return hashlib.blake2b(f"{clock.boot_id()} {clock.pid_namespace()}".encode(), digest_size=6).hexdigest()


def live_runs(tidy: bool = True) -> list[RunInfo]:
    """Returns the live runs on this machine, newest first.

    Removes the files of those that ended, unless not to be ``tidy``: that takes longer.
    """
    if tidy:
        _remove_old()
        _remove_unpublished()
    runs = [info for info in _published() if not is_elsewhere(info) and _is_live(info)]
    return sorted(runs, key=lambda info: info.started, reverse=True)


def runs_elsewhere() -> list[RunInfo]:
    """Returns the runs of other hosts and earlier boots in this directory, newest first; they may have ended."""
    return sorted(filter(is_elsewhere, _published()), key=lambda info: info.started, reverse=True)


def is_elsewhere(info: RunInfo) -> bool:
    """Returns whether the run belongs to another boot or host."""
    return info.boot_id != clock.boot_id()


def last_view(run_id: str) -> Path:
    """Returns the path of the recording in which an ended run leaves its snapshot, for viewers that attach late."""
    return _path(run_id, LAST_VIEW)


def run_of(view: Path) -> str:
    """Returns the id of the run that has left the recording."""
    return view.name.removesuffix(LAST_VIEW)


def last_views() -> list[Path]:
    """Returns the recordings that ended runs have left, newest first. Removes all but `KEEP_LAST_VIEWS`."""
    dated = []
    for path in directory().glob(f"*{LAST_VIEW}"):
        with contextlib.suppress(OSError):  # another collector may have removed it just now
            if stat.S_ISREG((status := path.stat()).st_mode):
                dated.append((status.st_mtime, path))
    found = [path for _, path in sorted(dated, reverse=True)]
    for path in found[KEEP_LAST_VIEWS:]:
        with contextlib.suppress(OSError):
            path.unlink()
    return found[:KEEP_LAST_VIEWS]


def last_views_of(name: str) -> list[Path]:
    """Returns those of the runs whose ids start so, newest first."""
    return [view for view in last_views() if run_of(view).startswith(name)]


def newest_run() -> RunInfo | None:
    """Returns the live run that started last; None without one."""
    return next(iter(live_runs()), None)


def is_published(run_id: str) -> bool:
    """Returns whether viewers can find the run: its collector is up, and has not ended."""
    return _path(run_id, ".json").exists()


def is_claimed(run_id: str) -> bool:
    """Returns whether the run's collector is still to come.

    Raises:
        DdpwatchError: There is no such run any more.
    """
    try:
        return not _path(run_id, ".json").stat().st_size
    except OSError as error:
        raise DdpwatchError(f"the run {run_id} is over") from error


def is_live(endpoint: str) -> bool:
    """Returns whether a live run publishes there; also while its collector is started again."""
    return any(info.publish == endpoint for info in live_runs())


def find(name: str) -> RunInfo:
    """Returns the live run with that id, or with an id that starts with it.

    Raises:
        UsageError: No run matches, or more than one.
    """
    runs = [info for info in live_runs() if info.run_id.startswith(name)]
    if len(runs) == 1 or any(info.run_id == name for info in runs):
        return next((info for info in runs if info.run_id == name), runs[0])
    if not runs:
        for info in runs_elsewhere():
            if info.run_id.startswith(name):
                raise UsageError(f"{info.run_id} is on {info.host}", "log in there, and attach to it")
        if views := last_views_of(name):
            raise UsageError(f"{run_of(views[0])} has ended", f"`ddpwatch replay {views[0]}` shows what it has left")
        raise UsageError(f"no live run called {name!r}", "`ddpwatch ls` lists the live runs")
    raise UsageError(f"{name!r} matches {len(runs)} runs", "give more of the id: " + ", ".join(r.run_id for r in runs))


def _published() -> Iterator[RunInfo]:
    return filter(None, map(_read, directory().glob("*.json")))


def _read(path: Path) -> RunInfo | None:
    """Returns the run in a file; None if it cannot be decoded, or names another run than the file does.

    Its sockets are beside the file, even if the directory has another path here than for the collector: in a container.
    """
    try:
        info = msgspec.json.decode(read_regular(path), type=RunInfo)
    except (OSError, msgspec.DecodeError):
        return None
    if info.run_id != path.stem or not _RUN_ID.fullmatch(info.run_id):
        return None
    sockets = {name: f"ipc://{path.with_suffix(suffix)}" for name, suffix in (("ingest", ".in"), ("publish", ".pub"))}
    return msgspec.structs.replace(info, **sockets)


def _is_live(info: RunInfo) -> bool:
    """Returns whether a local run's collector is alive; removes the run's files if it is certain that it is not."""
    try:
        locked = _is_locked(_path(info.run_id, ".json"))
    except FileNotFoundError:
        return False  # it has just ended
    except OSError:  # a file system without locks
        return _process_lives(info)
    if not locked:
        remove(info.run_id)
    return locked


def _is_locked(path: Path) -> bool:
    """Returns whether somebody holds the claim on a run's file. May raise OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove_unpublished() -> None:
    """Removes what is left of runs whose jobs ended before the collector was up."""
    for path in _older_than(CLAIMED_S, "*.json"):
        with contextlib.suppress(OSError, DdpwatchError):
            if not path.stat().st_size and not _is_locked(path):
                remove(path.stem)


def _process_lives(info: RunInfo) -> bool:
    """Returns whether the collector's process is there, or may be: in another pid namespace, it cannot be seen."""
    if info.pid_ns not in ("", clock.pid_namespace()):
        return True
    return clock.pid_alive(info.pid) and info.start_ticks in (0, clock.start_ticks(info.pid))


def _remove_old() -> None:
    for path in (*_older_than(KEEP_LOGS_S, "*.log"), *_older_than(KEEP_LOGS_S, "*.startup")):
        with contextlib.suppress(OSError):  # read-only here: others may still remove it
            path.unlink(missing_ok=True)
    remove_old_notes()
    for pattern in (f"*{ANSWER}*", f"*{REST}*"):
        for path in _older_than(KEEP_ANSWERS_S, pattern):
            path.unlink(missing_ok=True)
    for path in _older_than(KEEP_UNREACHABLE_S, "*.json"):
        info = _read(path)
        if info is None:
            with contextlib.suppress(OSError):
                path.unlink()
        elif is_elsewhere(info):
            remove(info.run_id)
    if (place := _memory_directory(directory())) is not None:
        for pattern in ("*.box*", "*.lease"):
            for path in _older_than(KEEP_UNREACHABLE_S, pattern, place):
                if not _path(path.stem, ".json").exists():
                    with contextlib.suppress(OSError):
                        path.unlink()


def _older_than(age_s: float, pattern: str, place: Path | None = None) -> Iterator[Path]:
    for path in (place or directory()).glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > age_s:
                yield path
