"""Checks what must hold after a job of the soak test (`soak.py`) has ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ddpwatch.collector.service import LINGER_S, MISSING_RANK_GRACE_S
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir
from ddpwatch.wire.messages import Step
from tests.soak.jobs import NO_FOLDER, NO_RUN_DIRECTORY, NOTE_BYTES, RESTART, STEPS, Job, cmdline

GONE_S = LINGER_S + MISSING_RANK_GRACE_S + 10.0  # what a collector waits on purpose, and 10 s more
KEPT = (".log", ".mcap", ".out")  # what a run leaves on purpose


def check(job: Job, early: bool, struck: bool) -> None:
    """Checks all that can be seen of a job that has ended."""
    ledger, output = job.place.ledger, job.folder / "output.log"
    code = job.process.poll()
    survives = job.fate.survives or not struck
    about = f"{job.fate.name}, {job.kind}, {job.mode}{', early' if early else ''}: exit code {code}"
    as_expected = code is not None and (code == 0) == survives
    early_end = early and code is not None and not survives  # it may have done all of its steps
    ledger.check("jobs end as they must", as_expected or early_end, output, about)
    if job.fate.survives and code == 0:
        text = output.read_text(errors="replace")
        ledger.check("nothing is raised in a job that goes on", tracebacks(job, text) == 0, output, about)
    started = time.monotonic()
    left: list[psutil.Process] = []
    while (left := job.processes()) and time.monotonic() - started < GONE_S:
        time.sleep(0.2)
    ledger.note("seconds until a job's processes are gone", time.monotonic() - started)
    ledger.check("processes are gone", not left, job.folder, f"{about}: {[cmdline(each) for each in left]}")
    check_parameters(job, about)
    check_recordings(job, early, about)
    check_leftovers(job, early, about)


def tracebacks(job: Job, output: str) -> int:
    """How many tracebacks are in the output, other than those of the attempt that was killed."""
    return 0 if job.fate is RESTART else output.count("Traceback")


def check_parameters(job: Job, about: str) -> None:
    """The parameters are those of the same training without ddpwatch, after every step."""
    reference = job.place.reference
    for notes in job.notes():
        lines = notes.read_bytes().splitlines()
        compared = lines[: len(reference)]
        same = compared == reference[: len(compared)]
        job.place.ledger.check("parameters are bit-identical", same, notes, about)
        job.place.ledger.checked["· steps compared"] += len(compared)
    if job.fate.survives:
        newest = [notes for notes in job.notes() if notes.stat().st_size // NOTE_BYTES == STEPS]
        job.place.ledger.check("jobs train to their end", len(newest) == 2, job.folder, about)


def check_recordings(job: Job, early: bool, about: str) -> None:
    """Every recording opens, with a rank's steps in order, and without a gap unless the fate explains it."""
    if job.mode == "not recorded":
        return
    ledger = job.place.ledger
    for attempt, path in recordings(job):
        done = {
            int(notes.name.split(".")[1]): notes.stat().st_size // NOTE_BYTES
            for notes in job.folder.glob(f"rank.*.{attempt}.*")
        }
        try:
            steps: dict[int, list[int]] = {rank: [] for rank in done}
            recording = Recording(path)
            for message, _ in recording:
                if isinstance(message, Step):
                    steps.setdefault(message.rank, []).append(message.step)
            ledger.check("recordings open", True, path)
            ledger.note(f"frames lost on the way to the disk: {job.fate.name}", recording.lost)
        except (DdpwatchError, OSError, ValueError) as error:
            ledger.check("recordings open", False, path, f"{about}: {error!r}")
            continue
        for rank, kept in steps.items():
            check_steps(job, f"{path}, rank {rank}", kept, done.get(rank, 0), about)
    if not early and job.fate is not NO_FOLDER:
        ledger.check("watched jobs leave a recording", any(recordings(job)), job.folder, about)


def check_steps(job: Job, where: str, kept: list[int], done: int, about: str) -> None:
    """One rank's steps in a recording, of those it has done."""
    ledger = job.place.ledger
    seen = f"{about}: {len(kept)} of {done} steps, up to {kept[-1:]}"
    missing = kept[-1] + 1 - len(kept) if kept else 0
    in_order = all(a < b for a, b in itertools.pairwise(kept)) and (not kept or kept[-1] <= done)
    ledger.check("recorded steps are in order", in_order, where, seen)
    ledger.note(f"steps missing at the end: {job.fate.name}", done - len(kept) - missing)
    if job.fate.gap:
        ledger.note(f"steps missing in a gap: {job.fate.name}", missing)
    else:
        ledger.check("recorded steps have no gap", missing == 0, where, seen)


def recordings(job: Job) -> Iterator[tuple[str, Path]]:
    """The recordings of a job: attempt and path. A kill may have come before the first byte of one."""
    if job.mode == "rank files":
        for folder in job.recording.glob("*/"):
            if any(path.stat().st_size for path in folder.glob("*.mcap")):
                yield "0", folder
        return
    for attempt, name in (("0", "run.mcap"), ("1", "run.1.mcap")):
        path = job.recording / name
        if path.exists() and path.stat().st_size:
            yield attempt, path


def check_leftovers(job: Job, early: bool, about: str) -> None:
    """Nothing is left beside the recording. Only a job that is killed as it starts may leave a reserved name."""
    ledger = job.place.ledger
    known = (".mcap", ".next") if early else (".mcap",)
    files = [path for path in job.recording.rglob("*") if path.is_file() and path.name != "ballast"]
    strays = [path.name for path in files if path.suffix not in known]
    ledger.check("nothing is left beside a recording", not strays, job.recording, f"{about}: {strays}")
    if job.fate is NO_RUN_DIRECTORY and (job.folder / "run").exists():
        left = [path.name for path in (job.folder / "run").iterdir() if path.suffix not in KEPT]
        ledger.check("a run directory that was removed stays empty", not left, job.folder / "run", f"{about}: {left}")
    for log in (*rundir.directory().glob(f"{job.script.stem}-*.log"), *(job.folder / "run").glob("*.log")):
        text = log.read_text(errors="replace")
        ledger.check("collectors' logs have no traceback", "Traceback" not in text, log, about)
