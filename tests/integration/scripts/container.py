"""Trains as the first process of a container: in mount and pid namespaces of its own.

CONTAINER is the shell script that makes its file system. The process that the launcher knows waits outside, as
`docker run` does.
"""

import ctypes
import os
import runpy
import subprocess
from pathlib import Path

CLONE_NEWNS, CLONE_NEWPID = 0x0002_0000, 0x2000_0000
TRAIN = Path(__file__).resolve().parents[3] / "demo" / "train.py"


def enter(setup: str) -> None:
    """Returns in the first process of a new container; the caller ends when that does."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")
    if inside := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]) & 0xFF)
    subprocess.run(["sh", "-ec", f"mount --make-rprivate /; mount -t proc proc /proc; {setup}"], check=True)


if __name__ == "__main__":
    enter(os.environ["CONTAINER"])
    runpy.run_path(str(TRAIN), run_name="__main__")
