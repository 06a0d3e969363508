"""Lets the training go first where cores are short."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

NICENESS = 10  # the tenth of a core that is left is plenty


def lower_process() -> None:
    """Lowers this process, and its session where the kernel counts by sessions and this one leads it."""
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICENESS))


def lower_thread() -> None:
    """Lowers this thread, and those that it starts from now on."""
    with contextlib.suppress(OSError):  # the system counts by processes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
