"""Runs modules in processes of their own, without the working directory on ``sys.path``."""

from __future__ import annotations

import sys
from pathlib import Path

# As `python -m MODULE`, but a `zmq.py` or `torch.py` in the working directory is not imported. This very package comes
# last, for where it is not installed. Python 3.10 has no option for that (-P).
_RUN = (
    "import runpy, sys; sys.path = [*filter(None, sys.path), sys.argv.pop(1)]; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

# First, a fork: the parent waits for the child, and ends as that does.
_BELOW = """import os, signal, sys
if child := os.fork():
    if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)
"""


def module_command(module: str, *arguments: str, is_grandchild: bool = False) -> list[str]:
    """Returns the command that runs a module.

    In a child of the process that starts, for those that kill their children.
    """
    run = _BELOW + _RUN if is_grandchild else _RUN
    return [sys.executable, "-c", run, str(Path(__file__).parents[2]), module, *arguments]
