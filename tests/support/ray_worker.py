"""A worker or a service of Ray, in a process that the fork server has forked: ``ray_worker.py PID SCRIPT.py …``.

To import Ray is most of their processor time. Ray's own script sets a worker's environment up, and executes Python once
more, with the worker; here, the worker goes on in the same process. That ends with the one that Ray has started in its
place, ``PID``, and with the raylet if that has started it.
"""

from __future__ import annotations

import os
import runpy
import select
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.support.forked_job import python_that_forks


def python(path: Path, preload: Sequence[str]) -> Path:
    """Makes an executable that Ray takes for Python: it has Ray's scripts forked, and runs Python for all others."""
    return python_that_forks(path, "*/ray/*.py", preload, f"{__file__} $$")


def end_with(*pids: int) -> None:
    """Ends this process as soon as one of others has ended."""
    select.select([os.pidfd_open(pid) for pid in pids], [], [])
    os._exit(1)


def run(script: str, *arguments: str) -> None:
    sys.argv[:] = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def go_on(_: str, args: list[str]) -> NoReturn:
    """In place of ``os.execvp("bash", ["bash", "-c", "exec PYTHON SCRIPT …"])``."""
    words = shlex.split(args[2])
    run(*words[words.index("exec") + 2 :])
    sys.exit()


if __name__ == "__main__":
    os.execvp = go_on  # type: ignore[assignment]
    others = [int(sys.argv.pop(1))]
    if raylet := os.environ.get("RAY_RAYLET_PID"):
        others.append(int(raylet))
        os.environ["RAY_RAYLET_PID"] = str(os.getppid())  # Ray's agents end once their parent is not the raylet
    threading.Thread(target=end_with, args=others, daemon=True).start()
    run(*sys.argv[1:])
