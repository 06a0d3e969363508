"""``python -m tests.support.forked_job RANKS STREAMS MODULES END SCRIPT …``: like torchrun, with forked ranks.

For jobs below `ddpwatch run`. ``MODULES``, separated by commas, are imported before the ranks are forked. These write
to this process's output if ``STREAMS`` is ``-``, and take their interpreters apart if ``END`` is ``whole``.
``0 - MODULES whole SCRIPT …`` is like ``python SCRIPT …``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.fork_server import Launcher, Request

STAND_IN = """#!/bin/sh
[ "$1" = -u ] && shift  # all that is run here is
case "$1" in {scripts}) exec {python} -m tests.support.forked_job 0 - {preload} {end} {before} "$@";; esac
exec {python} -u "$@"
"""
ENDS = {True: "whole", False: "short"}  # by whether ranks take their interpreters apart


def python_that_forks(path: Path, scripts: str, preload: Sequence[str], before: str = "") -> Path:
    """Makes an executable for `EXECUTABLE`: it has scripts forked, and runs Python for all others.

    Args:
        path: Of the executable.
        scripts: Which ones, as a pattern of the shell's.
        preload: Modules that they need not import.
        before: A script that is run in their place, with its first arguments.
    """
    modules = ",".join(preload)
    text = STAND_IN.format(scripts=scripts, python=sys.executable, preload=modules, end=ENDS[True], before=before)
    path.write_text(text)
    path.chmod(0o755)
    return path


def main() -> None:
    """Starts the job, waits for it, and exits with its exit code."""
    ranks, streams, modules, end, script, *arguments = sys.argv[1:]
    preload = [name for name in modules.split(",") if name]
    folder = None if streams == "-" else streams
    job = Request(script, arguments, int(ranks), dict(os.environ), preload, folder, end == ENDS[True])
    code = Launcher(job, folder and Path(folder).with_suffix(".log")).wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
