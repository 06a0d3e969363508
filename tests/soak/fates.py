"""Lets things happen to a job of the soak test (`soak.py`), from its start to its end."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

from tests.soak.checks import check
from tests.soak.jobs import (
    FINISH,
    FULL,
    KILL_ALL,
    KILL_COLLECTOR,
    KILL_ONE,
    NO_FOLDER,
    NO_RUN_DIRECTORY,
    PATIENCE_S,
    RESTART,
    STEPS,
    TERM_COLLECTOR,
    TERM_JOB,
    Job,
    await_that,
)

EARLY = 0.15  # the share of jobs that are struck before they are watched
LAST_STEPS = 10  # nothing happens in these: a job that is over by then would end otherwise than expected


def live(job: Job, dice: random.Random) -> None:
    """Leads a job to its end, and checks what must hold."""
    early = job.fate not in (FINISH, RESTART, FULL, KILL_COLLECTOR, TERM_COLLECTOR) and dice.random() < EARLY
    try:
        if early:
            (job.folder / "go").touch()
            pause(job, dice.uniform(0, 3))
        else:
            await_watching(job)
            (job.folder / "go").touch()
            moment = dice.uniform(0, STEPS - LAST_STEPS)
            await_that(lambda: job.step() >= moment or job.process.poll() is not None)
        job.expected = False if job.fate not in (FINISH, FULL, NO_FOLDER) else job.expected
        if struck := job.is_training():
            strike(job, dice)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(PATIENCE_S)
        job.expected = False
        check(job, early, struck)
    finally:
        job.expected = False
        job.end()
        unmount(job)


def pause(job: Job, seconds: float) -> None:
    """Lets the job go on for some time, or to its end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(seconds)


def await_watching(job: Job) -> None:
    """Waits until the job is watched: a run that is listed, or two rank files."""
    if job.mode == "rank files":
        await_that(lambda: len(list(job.recording.glob("*/rank*.mcap"))) == 2 or job.process.poll() is not None)
    elif job.fate is NO_RUN_DIRECTORY:
        await_that(lambda: any((job.folder / "run").glob("*.pub")) or job.process.poll() is not None)
    else:
        listed = await_that(lambda: job.runs() or job.process.poll() is not None) and job.process.poll() is None
        job.place.ledger.check("a watched job is listed", listed, job.folder, "its run never appeared")
        job.expected = listed


def strike(job: Job, dice: random.Random) -> None:
    """What the fate has in store for the job. It may have ended meanwhile."""
    ranks = job.rank_pids()
    match job.fate.name:
        case KILL_ONE.name | RESTART.name:
            kill([dice.choice(ranks)] if ranks else [])
        case KILL_ALL.name:
            kill(ranks)
        case KILL_COLLECTOR.name:
            kill([process.pid for process in job.collectors()])
        case TERM_COLLECTOR.name:
            kill([process.pid for process in job.collectors()], signal.SIGTERM)
        case TERM_JOB.name if job.kind == "forked":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGTERM)  # as a scheduler does it
        case TERM_JOB.name:
            kill([job.process.pid], signal.SIGTERM)
        case FULL.name if job.place.mounts:
            fill(job, dice)
        case NO_FOLDER.name:
            remove(job.recording)
            if dice.random() < 0.5:
                pause(job, dice.uniform(0, 2))
                job.recording.mkdir(exist_ok=True)
        case NO_RUN_DIRECTORY.name:
            remove(job.folder / "run")


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Sends a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def fill(job: Job, dice: random.Random) -> None:
    """Fills the job's disk, and makes room again half of the time."""
    ballast = job.recording / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    if dice.random() < 0.5:
        pause(job, dice.uniform(0, 3))
        ballast.unlink()


def remove(folder: Path) -> None:
    """Removes a directory in which others may be creating files."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def unmount(job: Job) -> None:
    """Removes the job's disk, and leaves what was on it where it was."""
    if job.recording.is_mount():
        kept = job.folder / "kept"
        shutil.copytree(job.recording, kept, ignore=shutil.ignore_patterns("ballast"))
        subprocess.run(["umount", job.recording], check=True)
        kept.replace(job.folder / "disk")
