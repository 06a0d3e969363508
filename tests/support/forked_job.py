"""``python -m tests.support.forked_job RANKS STREAMS MODULES SCRIPT …``: like torchrun, with forked ranks.

For jobs below `ddpwatch run`. ``MODULES``, separated by commas, are imported before the ranks are forked. These write
to this process's output if ``STREAMS`` is ``-``. ``0 - MODULES SCRIPT …`` is like ``python SCRIPT …``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.fork_server import Launcher, Request

STAND_IN = """#!/bin/sh
[ "$1" = -u ] && shift  # all that is run here is
case "$1" in {scripts}) exec {python} -m tests.support.forked_job 0 - {preload} {before} "$@";; esac
exec {python} -u "$@"
"""


def python_that_forks(path: Path, scripts: str, preload: Sequence[str], before: str = "") -> Path:
    """Makes an executable for `EXECUTABLE`: it has scripts forked, and runs Python for all others.

    Args:
        path: Of the executable.
        scripts: Which ones, as a pattern of the shell's.
        preload: Modules that they need not import.
        before: A script that is run in their place, with its first arguments.
    """
    path.write_text(STAND_IN.format(scripts=scripts, python=sys.executable, preload=",".join(preload), before=before))
    path.chmod(0o755)
    return path


def main() -> None:
    """Starts the job, waits for it, and exits with its exit code."""
    ranks, streams, modules, script, *arguments = sys.argv[1:]
    preload = [name for name in modules.split(",") if name]
    folder = None if streams == "-" else streams
    job = Request(script, arguments, int(ranks), dict(os.environ), preload, folder)
    code = Launcher(job, folder and Path(folder).with_suffix(".log")).wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
