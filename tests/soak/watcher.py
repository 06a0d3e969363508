"""Looks at the list of live runs all through the soak test (`soak.py`), as viewers see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from ddpwatch.run import clock, rundir
from tests.soak.jobs import Job, Ledger

LOST, GHOST = "no run is lost that is alive", "no run is listed after its end"
LOOK_S = 0.1
GHOST_S = 3.0  # a process that is killed may take a moment to release its locks
Claim = tuple[str, int]  # a run and the pid of its collector: another may take its place


class Watcher(threading.Thread):
    """Checks that every run which must be listed is, and that no run is whose collector has gone.

    Args:
        ledger: Where the checks are counted.
        jobs: Gives the jobs that are there.
    """

    def __init__(self, ledger: Ledger, jobs: Callable[[], Iterable[Job]]) -> None:
        super().__init__(name="watcher", daemon=True)
        self._ledger, self._jobs = ledger, jobs
        self._over = threading.Event()
        self._seen: dict[Claim, rundir.RunInfo] = {}
        self._ended: dict[Claim, float] = {}
        self._reported: set[tuple[str, Claim]] = set()

    def stop(self) -> None:
        """Ends it after the look that it has."""
        self._over.set()

    def run(self) -> None:
        """Looks until it is stopped."""
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        alive = {claim: info for claim, info in self._seen.items() if claim not in self._ended}
        self._ended |= {claim: now for claim, info in alive.items() if not is_there(info)}
        due = [(info, job) for info in alive.values() for job in self._jobs() if job.expected and job.owns(info.run_id)]
        listed = {(info.run_id, info.pid): info for info in rundir.live_runs()}
        for info, job in due:
            claim = (info.run_id, info.pid)
            lost = claim not in listed and job.expected and job.is_training() and is_there(info)
            self._check(LOST, claim, not lost, job.folder)
        for claim, at in self._ended.items():
            if now - at > GHOST_S:
                self._check(GHOST, claim, claim not in listed, rundir.directory())
        self._seen |= listed

    def _check(self, what: str, claim: Claim, holds: bool, where: object) -> None:
        """Reports a run once."""
        known = (what, claim) in self._reported
        if not self._ledger.check(what, holds or known, where, f"{claim[0]}, collector {claim[1]}"):
            self._reported.add((what, claim))


def is_there(info: rundir.RunInfo) -> bool:
    """Whether a run's collector is there, by its process."""
    return clock.pid_alive(info.pid) and clock.start_ticks(info.pid) == info.start_ticks
