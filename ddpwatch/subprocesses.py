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


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-c", _RUN, str(Path(__file__).parents[1]), module, *arguments]
