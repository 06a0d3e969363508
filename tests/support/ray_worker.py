"""What Ray starts for a worker, in a process that the fork server has forked: ``ray_worker.py PID SETUP_WORKER.py …``.

Ray's own script sets the worker's environment up, and executes Python once more, with the worker. That import is most
of a worker's processor time; here, the worker goes on in the same process. That ends with the one that Ray has started
in its place, ``PID``, and with the raylet.
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
    """Makes an executable that Ray takes for Python: it has workers forked, and runs Python for all others."""
    return python_that_forks(path, "*/setup_worker.py", preload, f"{__file__} $$")


def end_with(*pids: int) -> None:
    """Ends this process as soon as one of others has ended."""
    select.select([os.pidfd_open(pid) for pid in pids], [], [])
    os._exit(1)


def run(script: str, *arguments: str) -> None:
    sys.argv[:] = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def go_on(_: str, args: list[str]) -> NoReturn:
    """In place of ``os.execvp("bash", ["bash", "-c", "exec PYTHON SCRIPT …"])``."""
    words = shlex.split(args[2])
    run(*words[words.index("exec") + 2 :])
    sys.exit()


if __name__ == "__main__":
    os.execvp = go_on  # type: ignore[assignment]
    others = (int(sys.argv.pop(1)), int(os.environ["RAY_RAYLET_PID"]))
    threading.Thread(target=end_with, args=others, daemon=True).start()
    run(*sys.argv[1:])
