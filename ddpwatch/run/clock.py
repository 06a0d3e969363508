"""Which clock a process stamps with, and whether a process is alive.

Two processes share a clock if their boot id and time namespace are equal.
"""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Returns the kernel's id of this boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def time_namespace() -> str:
    """Returns the Linux time namespace, e.g. ``time:[4026531834]``; empty where there is none."""
    return _namespace("time")


def pid_namespace() -> str:
    """Returns the Linux pid namespace, e.g. ``pid:[4026531836]``; empty where there is none."""
    return _namespace("pid")


def start_ticks(pid: int) -> int:
    """Returns when the process started, in clock ticks since boot.

    With the pid, it identifies a process. 0 if not known.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])  # a name may be no UTF-8
    except (OSError, IndexError):
        return 0


def pid_alive(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    import psutil  # a rank never asks

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""
