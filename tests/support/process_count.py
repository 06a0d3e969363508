"""Counts the processes that the tests start, and says at the end how many there were."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from typing import Any

import pytest

from tests.support import fork_server

RANKS = re.compile(r"--nproc-per-node=(\d+)")
FORKED = re.compile(r"tests\.support\.forked_job (\d+) ")


class ProcessCount:
    """A pytest plugin. With xdist, each worker counts for itself and the controller adds up.

    ``torchrun`` are jobs that torchrun starts, under `ddpwatch run` or not, and ``ranks`` theirs; ``forked`` are jobs
    from the fork server.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """From now on every process counts."""
        started = subprocess.Popen.__init__

        def count_and_start(process: Any, command: Any, *arguments: Any, **named: Any) -> None:
            self.add(command if isinstance(command, str) else " ".join(map(str, command)))
            started(process, command, *arguments, **named)

        subprocess.Popen.__init__ = count_and_start  # type: ignore[method-assign]

    def add(self, command: str) -> None:
        """One process that the tests start by itself."""
        if "torch.distributed.run " in command:
            self.counts["torchrun"] += 1
            self.counts["ranks"] += sum(map(int, RANKS.findall(command)))
        else:
            self.counts["others"] += 1
        for ranks in FORKED.findall(command):
            self.counts.update(forked=1, forked_ranks=int(ranks))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Adds the forked jobs; in a worker, hands the counts over."""
        self.counts.update(fork_server.STARTED)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["processes"] = dict(self.counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """In the controller: adds a worker's counts."""
        self.counts.update(getattr(node, "workeroutput", {}).get("processes", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The line at the end."""
        numbers = {name: self.counts[name] for name in ("torchrun", "ranks", "forked", "forked_ranks", "others")}
        if any(numbers.values()):
            terminalreporter.write_line(
                "job starts: {torchrun} torchrun ({ranks} ranks), {forked} forked ({forked_ranks} ranks), "
                "{others} other processes".format(**numbers)
            )


COUNT = ProcessCount()


def pytest_configure(config: pytest.Config) -> None:
    """Also lets ``-p`` load this file by itself."""
    COUNT.start()
    config.pluginmanager.register(COUNT)
