"""Opens files that others may have put there: nothing but a regular file, and without waiting for anybody. Writes some.

Opening a named pipe for reading waits for a writer, for ever if there is none.
"""

from __future__ import annotations

import errno
import os
import resource
import secrets
import stat
from pathlib import Path

NOT_REGULAR = "not a regular file"
MOST_BYTES = 16 << 20  # of what is read whole


def open_regular(path: Path, flags: int = 0) -> int:
    """Opens a regular file for reading; returns its descriptor. Follows symbolic links unless the flags forbid it.

    Raises:
        OSError: It cannot be opened, or is a pipe, a device, a socket or a directory.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise OSError(error.errno, NOT_REGULAR, str(path)) from None
        raise
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def read_regular(path: Path, limit: int = MOST_BYTES, flags: int = 0) -> bytes:
    """Returns the content of a small regular file.

    Raises:
        OSError: As `open_regular`, or it has more bytes than the limit.
    """
    with os.fdopen(open_regular(path, flags), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def read_counters(path: str) -> bytes:
    """Returns a small file of the kernel's, such as those in /proc; empty if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, 8192)
    except OSError:
        return b""
    finally:
        os.close(file)


def unfinished(path: Path) -> Path:
    """Returns where a file is until it is written, another place each time."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")


def write_whole(path: Path, content: bytes) -> None:
    """Writes a small file that others see as a whole or not at all, in place of one that is there.

    Raises:
        OSError: It cannot be written. Nothing stays.
    """
    new = unfinished(path)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.write(file, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        new.rename(path)
    finally:
        os.close(file)
        new.unlink(missing_ok=True)


def allow_all_files() -> bool:
    """Lets this process open as many files and connections as it may; returns whether that is more than before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft != hard
