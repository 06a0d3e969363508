"""torchrun on the simulated host that process PID keeps: ``torchrun_on_host.py PID …``. With ``-``, on this machine.

It forks its ranks, so that they need not import torch. Their command is a script's path with its arguments.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from tests.integration.scripts.hosts import enter

TORCHRUN_HANDLES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ForkedRank(multiprocessing.get_context("fork").Process):
    """A rank, with what torchrun uses of a ``subprocess.Popen``."""

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.exitcode

    def wait(self, timeout: float) -> None:
        """Waits for its end."""
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired(self.name, timeout)


def become(command: Sequence[str], environment: dict[str, str]) -> None:
    """Runs the script, as in a process that torchrun has started."""
    os.setsid()
    for number in TORCHRUN_HANDLES:
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


def fork(_: SubprocessHandler, command: Sequence[str], environment: dict[str, str]) -> ForkedRank:
    rank = ForkedRank(target=become, args=(command, environment))
    rank.start()
    return rank


if __name__ == "__main__":
    if (host := sys.argv.pop(1)) != "-":
        enter(host)
    SubprocessHandler._popen = fork
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
