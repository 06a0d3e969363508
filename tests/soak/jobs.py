"""The jobs of the soak test (`soak.py`): how one is started, and what can be seen of it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ddpwatch.run import rundir
from tests.support.fork_server import ROOT, Launcher, Request

TRAINING = Path(__file__).with_name("training.py")
BIN = Path(sys.executable).parent
STEPS = 250
NOTE_BYTES = 26  # a line of `training`
PATIENCE_S = 180.0
DISK = "size=1m"
PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to a job.

    Attributes:
        survives: Training goes on to its end, with exit code 0.
        gap: Steps may be missing in the recording's midst.
        kinds: How the job may be started.
        modes: How it may be recorded.
    """

    name: str
    survives: bool = False
    gap: bool = False
    kinds: tuple[str, ...] = ("forked", "forked", "forked", "torchrun", "ddpwatch run")
    modes: tuple[str, ...] = ("recording", "rank files", "not recorded")


_COLLECTED, _RECORDED = ("recording", "not recorded"), ("recording", "rank files")
FINISH = Fate("finishes", survives=True)
KILL_ONE = Fate("kill -9 of a rank")
KILL_ALL = Fate("kill -9 of all ranks")
KILL_COLLECTOR = Fate("kill -9 of the collector", survives=True, gap=True, modes=_COLLECTED)
TERM_JOB = Fate("SIGTERM to the launcher")
TERM_COLLECTOR = Fate("SIGTERM to the collector", survives=True, gap=True, modes=_COLLECTED)
FULL = Fate("disk full", survives=True, gap=True, modes=_RECORDED)
NO_FOLDER = Fate("recording's directory removed", survives=True, gap=True, modes=_RECORDED)
NO_RUN_DIRECTORY = Fate("run directory removed", survives=True, modes=_COLLECTED)
RESTART = Fate("kill -9 of a rank, restart", survives=True, kinds=("torchrun",), modes=("recording",))
FATES = (
    FINISH, KILL_ONE, KILL_ALL, KILL_COLLECTOR, TERM_JOB, TERM_COLLECTOR, FULL, NO_FOLDER, NO_RUN_DIRECTORY, RESTART,
)  # fmt: skip


class Ledger:
    """What was checked and what was violated, by property. Lanes and viewers write to it from their threads."""

    def __init__(self) -> None:
        self.checked: Counter[str] = Counter()
        self.violations: list[tuple[str, str, str]] = []
        self.largest: dict[str, float] = {}

    def check(self, what: str, holds: bool, where: object, seen: str = "") -> bool:
        """Counts a check; a violation is kept with the place to look at. Whether it holds."""
        self.checked[what] += 1
        if not holds:
            self.violations.append((what, str(where), seen))
        return holds

    def note(self, what: str, value: float) -> None:
        """Keeps the largest value of a figure."""
        self.largest[what] = max(value, self.largest.get(what, 0.0))


@dataclass(slots=True)
class Place:
    """Where a soak happens.

    Attributes:
        token: The scripts of all its jobs start with it, and so do the ids of their runs.
        mounts: Whether a small disk can be mounted for a job.
        reference: Per step, the notes of a rank that was not watched.
    """

    base: Path
    token: str
    mounts: bool
    ledger: Ledger
    reference: list[bytes] = field(default_factory=list)


class Job:
    """One job, started; `folder` holds all of its files.

    Attributes:
        expected: Whether its run must be listed: it was once, and nothing has happened to it since.
    """

    def __init__(
        self,
        place: Place,
        number: str,
        fate: Fate = FINISH,
        kind: str = "forked",
        mode: str = "recording",
        watched: bool = True,
        steps: int = STEPS,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.place, self.fate, self.kind, self.mode = place, fate, kind, mode
        self.folder = place.base / "jobs" / number
        self.recording = self.folder / "recording"
        self.expected = False
        self.steps = steps
        self.recording.mkdir(parents=True, mode=0o700)
        self.script = self.folder / f"{place.token}j{number}.py"
        self.script.symlink_to(TRAINING)
        options = {"watch" if watched and kind != "ddpwatch run" else "", "record" if mode == "recording" else ""}
        if fate is FULL:
            if place.mounts:
                subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "soak", self.recording], check=True)
            else:
                options.add("limited")
        self.environment = {
            "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "SOAK_JOB": str(self.folder),
            "SOAK_OPTIONS": " ".join(filter(None, options)), "SOAK_PAUSE_S": str(pause_s), "SOAK_STEPS": str(steps),
            "SOAK_PID": str(os.getpid()),
        }  # fmt: skip
        if mode == "rank files":
            self.environment["DDPWATCH_RECORD_DIR"] = str(self.recording)
        if fate is NO_RUN_DIRECTORY:
            self.environment["DDPWATCH_DIR"] = str(self.folder / "run")
        self.process = self._start()

    def _start(self) -> Launcher | subprocess.Popen[bytes]:
        environment, log = {**os.environ, **self.environment}, self.folder / "output.log"
        if self.kind == "forked":
            request = Request(str(self.script), (), 2, environment, ("ddpwatch.probe.watch",))
            return Launcher(request, log)
        command: list[str | Path] = [BIN / "torchrun", "--standalone", "--nproc-per-node=2"]
        command += ["--max-restarts=1", self.script] if self.fate is RESTART else [self.script]
        if self.kind == "ddpwatch run":
            record: list[str | Path] = ["--record", self.recording / "run.mcap"] if self.mode == "recording" else []
            command = [BIN / "ddpwatch", "run", "--headless", *record, "--", *command]
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # -- what can be seen of it --------------------------------------------------------------------------------

    def notes(self) -> list[Path]:
        """The notes of its ranks, of all attempts."""
        return sorted(self.folder.glob("rank.*"))

    def step(self) -> int:
        """How many steps both ranks of the newest attempt have done."""
        sizes: dict[str, list[int]] = {}
        for path in self.notes():
            sizes.setdefault(path.name.split(".")[2], []).append(path.stat().st_size // NOTE_BYTES)
        newest = sizes[max(sizes)] if sizes else []
        return min(newest) if len(newest) == 2 else 0

    def rank_pids(self) -> list[int]:
        """The pids of the newest attempt's ranks, rank 0 first."""
        names = [path.name.split(".") for path in self.notes()]
        newest = max((name[2] for name in names), default="")
        return [int(name[3]) for name in names if name[2] == newest]

    def is_training(self) -> bool:
        """Whether it has steps to do."""
        return self.process.poll() is None and (not self.steps or self.step() < self.steps)

    def runs(self) -> list[rundir.RunInfo]:
        """Its live runs, in the run directory that all jobs share."""
        return [info for info in rundir.live_runs() if self.owns(info.run_id)]

    def owns(self, run_id: str) -> bool:
        """Whether a run is one of this job's."""
        return run_id.startswith(f"{self.script.stem}-")

    def processes(self) -> list[psutil.Process]:
        """All that it has started and that is still there."""
        found = {process.pid: process for process in processes_of(str(self.folder))}
        known = [self.process.pid, *(self.process.ranks if isinstance(self.process, Launcher) else [])]
        for pid in known:  # forked ranks have the environment of the fork server
            with contextlib.suppress(psutil.NoSuchProcess):
                if (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                    found[pid] = process
        return list(found.values())

    def collectors(self) -> list[psutil.Process]:
        """Its collectors."""
        return [process for process in self.processes() if "--run-id" in cmdline(process)]

    def end(self) -> None:
        """Ends all that is left of it."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def cmdline(process: psutil.Process) -> list[str]:
    """The process's command line; empty if it is gone."""
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def processes_of(marker: str) -> list[psutil.Process]:
    """The processes that have a path in their environment or command line, other than this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                text = (entry / "environ").read_bytes() + b"\0" + (entry / "cmdline").read_bytes()
                if f"{marker}\0".encode() in text or f"{marker}/".encode() in text:
                    found.append(psutil.Process(int(entry.name)))
    return found


def drawn(dice: random.Random, place: Place, number: str, fate: Fate) -> Job:
    """A job with that fate, started one way or another."""
    return Job(place, number, fate, dice.choice(fate.kinds), dice.choice(fate.modes))


def await_that(condition: Callable[[], object]) -> bool:
    """Waits until a condition holds; whether it ever does."""
    deadline = time.monotonic() + PATIENCE_S
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(held)
