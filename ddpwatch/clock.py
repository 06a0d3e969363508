"""Which clock a process stamps with, and whether a process is alive.

Two processes share a clock if their boot id and time namespace are equal.
"""

from __future__ import annotations

from pathlib import Path

import psutil


def boot_id() -> str:
    """The kernel's id of this boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def time_namespace() -> str:
    """The Linux time namespace, e.g. ``time:[4026531834]``; empty where there is none."""
    try:
        return str(Path("/proc/self/ns/time").readlink())
    except OSError:
        return ""


def pid_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
