"""Opens files that others may have put there: nothing but a regular file, and without waiting for anybody.

Opening a named pipe for reading waits for a writer, for ever if there is none.
"""

from __future__ import annotations

import errno
import os
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
