"""The run directory: which one, whether runs can be published in it, sockets and black boxes."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ddpwatch.common.text import size
from ddpwatch.doctor.check import Check, Section, error_text
from ddpwatch.errors import DdpwatchError
from ddpwatch.run import blackbox, rundir

NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse.sshfs", "panfs")
ELSEWHERE = ("/tmp", "/dev/shm", "/var/tmp")
_ANYWHERE_ELSE = "set DDPWATCH_DIR to a directory that you own, on a local disk or a tmpfs, for jobs and viewers alike"
_section = Section("run directory")


def checks() -> Iterator[Check]:
    """Yields all about the run directory; ends at the first thing without which nothing else works."""
    try:
        path = rundir.directory()
    except DdpwatchError as error:
        yield refused(error, usable_place(ELSEWHERE))
        return
    yield chosen(path, os.environ, rundir.fallback())
    trouble = trouble_of(_write, path)
    yield writable(path, trouble, usable_place(ELSEWHERE))
    if trouble:
        return
    length = path_length(path, trouble_of(rundir.endpoints, longest_run_id()), trouble_of(rundir.endpoints, "r"))
    yield length
    if length.state == "fail":
        return
    status = os.statvfs(path)
    yield free_space(status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None)
    yield file_system(rundir.file_system(path))
    yield locks(trouble_of(_lock, path))
    yield sockets(trouble_of(_connect, path))
    memory = shared_memory(rundir.file_system(rundir.SHARED_MEMORY), _free_bytes(rundir.SHARED_MEMORY))
    yield memory
    box = rundir.blackbox(f"doctor-{secrets.token_hex(4)}", 0)
    yield black_boxes(box, trouble_of(_use_box, box), memory.state == "ok")


def refused(error: DdpwatchError, place: str) -> Check:
    """Says that there is no directory that can be used."""
    return _section.fail("path", error.message, _suggestion(place))


def chosen(path: Path, environ: Mapping[str, str], fallback: str) -> Check:
    """Returns which directory, and why that one."""
    if environ.get("DDPWATCH_DIR"):
        if not path.is_absolute():
            text = f"DDPWATCH_DIR={path} is relative: another directory for each working directory"
            return _section.warn("path", text, "give an absolute path")
        return _section.ok("path", f"{path}, from DDPWATCH_DIR; private")
    if fallback:
        hint = "start jobs and viewers with the same XDG_RUNTIME_DIR, or set the same DDPWATCH_DIR for both"
        return _section.warn("path", fallback, hint)
    why = "in XDG_RUNTIME_DIR" if environ.get("XDG_RUNTIME_DIR") else "since XDG_RUNTIME_DIR is not set"
    return _section.ok("path", f"{path}, {why}; private")


def writable(path: Path, trouble: str, place: str) -> Check:
    """Returns whether a file can be created."""
    if trouble:
        return _section.fail("writable", f"no file can be created in {path}: {trouble}", _suggestion(place))
    return _section.ok("writable", "yes")


def path_length(path: Path, trouble_of_long_ids: str, trouble_of_short_ids: str) -> Check:
    """Returns whether sockets in the directory have paths that the kernel takes."""
    text = f"{len(str(path))} characters"
    hint = "set DDPWATCH_DIR to a short path, for jobs and viewers alike"
    if trouble_of_short_ids:
        return _section.fail("path length", f"{text}: too long for a Unix socket", hint)
    if trouble_of_long_ids:
        text = f"{text}: too long for the sockets of scripts with long names, which would run unwatched"
        return _section.warn("path length", text, hint)
    return _section.ok("path length", f"{text}: short enough for Unix sockets")


def free_space(nbytes: int, inodes: int | None) -> Check:
    """Returns whether the directory has space; ``inodes`` is None where the file system does not count them."""
    hint = "make space there, or set DDPWATCH_DIR to another directory, for jobs and viewers alike"
    if inodes is not None and inodes < 100:
        return _section.warn("free space", f"{size(nbytes)}, but inodes for {inodes} files only", hint)
    if nbytes < (64 << 20):  # as much as a collector retains, and so the largest recording that it leaves here
        text = f"{size(nbytes)}: may not be enough for what a collector leaves for late viewers"
        return _section.warn("free space", text, hint)
    return _section.ok("free space", size(nbytes))


def file_system(kind: str) -> Check:
    """Returns whether the directory is local."""
    if kind.startswith(NETWORK):
        text = (
            f"{kind}, a network file system: sockets in it work on one host only, other hosts' runs show as `on HOST`"
        )
        return _section.warn("file system", text, _ANYWHERE_ELSE)
    return _section.ok("file system", kind or "not known: /proc/self/mounts cannot be read")


def locks(trouble: str) -> Check:
    """Returns whether a collector can hold a lock, by which viewers see that its run is live."""
    if trouble:
        text = f"do not work: {trouble}; a run is live while its process is visible, so not across pid namespaces"
        return _section.warn("locks", text, _ANYWHERE_ELSE)
    return _section.ok("locks", "a lock (flock) excludes a second one")


def sockets(trouble: str) -> Check:
    """Returns whether a Unix socket can be bound in the directory, and connected to."""
    if trouble:
        return _section.fail("sockets", f"no Unix socket works in it: {trouble}", _ANYWHERE_ELSE)
    return _section.ok("sockets", "a Unix socket can be bound, and connected to")


def shared_memory(kind: str, free_bytes: int | None) -> Check:
    """Returns whether there is a /dev/shm in memory, and how much of it is free."""
    if kind != "tmpfs" or free_bytes is None:
        what = "is missing" if free_bytes is None else f"is not in memory ({kind or 'file system not known'})"
        return _section.none(
            "shared memory", f"{rundir.SHARED_MEMORY} {what}", f"mount a tmpfs at {rundir.SHARED_MEMORY}"
        )
    return _section.ok("shared memory", f"{rundir.SHARED_MEMORY}, {size(free_bytes)} free; a rank takes 4 KiB")


def black_boxes(box: Path | None, trouble: str, has_shared_memory: bool) -> Check:
    """Returns whether ranks can have black boxes, and where."""
    loss = "of a rank that dies, only the last heartbeat is known (up to 0.7 s old)"
    if box is None:
        own = rundir.SHARED_MEMORY / f"ddpwatch-{os.getuid()}"
        why = f"{own} is not private and yours" if has_shared_memory else "no directory is in memory"
        hint = f"mount a tmpfs at {rundir.SHARED_MEMORY}, or set DDPWATCH_DIR to a private directory on a tmpfs"
        return _section.warn("black boxes", f"none, {why}: {loss}", hint)
    if trouble:
        hint = f"make space on {box.parent}, e.g. with `docker run --shm-size=1g`"
        return _section.warn("black boxes", f"none, {trouble}: {loss}", hint)
    return _section.ok("black boxes", f"in {box.parent}")


def usable_place(candidates: tuple[str, ...]) -> str:
    """Returns a directory that would do for DDPWATCH_DIR; empty if none of the usual ones would."""
    for place in candidates:
        path = Path(place) / f"ddpwatch-{os.getuid()}"
        if os.access(path if path.exists() else place, os.W_OK | os.X_OK) and not path.is_symlink():
            return str(path)
    return ""


def longest_run_id() -> str:
    """Returns an id as long as that of a job below `ddpwatch run` is with a script of a long name."""
    return rundir.new_run_id("x" * 99) + "-0000.10.1"


def trouble_of(action: Callable[..., object], *arguments: object) -> str:
    """Returns why an action fails; empty if it works."""
    try:
        action(*arguments)
    except (OSError, DdpwatchError) as error:
        return error.message if isinstance(error, DdpwatchError) else error_text(error)
    return ""


def _suggestion(place: str) -> str:
    return f"set DDPWATCH_DIR={place}, for jobs and viewers alike" if place else _ANYWHERE_ELSE


def _write(path: Path) -> None:
    with tempfile.NamedTemporaryFile(prefix="doctor-", dir=path) as file:
        file.write(b"x")


def _lock(path: Path) -> None:
    with tempfile.NamedTemporaryFile(prefix="doctor-", dir=path) as file, open(file.name, "rb") as other:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise OSError("a second lock on a file was granted")


def _connect(path: Path) -> None:
    address = path / f"doctor-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(address))
        try:
            server.listen()
            client.settimeout(1.0)
            client.connect(str(address))
        finally:
            address.unlink()


def _use_box(path: Path | None) -> None:
    if path is None:
        return
    box = blackbox.BlackBox()
    box.open(path)
    try:
        box.begin_step(7, 7)
        last = blackbox.read(path)
        if last is None or last.step != 7:
            raise OSError("what is written into a page of it cannot be read")
    finally:
        path.unlink()


def _free_bytes(path: Path) -> int | None:
    """Returns the free space; None where there is no such directory."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
