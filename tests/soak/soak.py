"""Checks that nothing breaks or is left behind while jobs and viewers come and go: two lanes of jobs, an audience.

    python -m tests.soak.soak [--minutes 30] [--seed 1]

Every job trains a small model on two Gloo ranks, and something happens to it at a random moment (`jobs.FATES`):
kill -9 or SIGTERM, a full disk, a directory that is removed. Its ranks note a hash of their parameters after every
step. Viewers attach, and leave, or are killed or suspended. One job and one viewer stay for the whole time.

Prints how many jobs had which fate, what was checked how often, and each violation with the folder to look at, which is
kept. Exits with 1 after a violation. Ctrl-C ends it after the jobs that run. As root, a full disk is a small tmpfs, in
a mount namespace of this program's own; otherwise a limit on the size of files stands in for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from ddpwatch.common.text import table
from ddpwatch.run import rundir
from tests.soak.checks import KEPT
from tests.soak.fates import live
from tests.soak.jobs import FATES, PATIENCE_S, STEPS, Job, Ledger, Place, await_that, cmdline, drawn, processes_of
from tests.soak.viewers import audience, leaves, rss_mib, started
from tests.soak.watcher import Watcher
from tests.support.fork_server import close_the_server, the_server
from tests.support.rounds import Rounds, rounds_done

LANES, AUDIENCE = 2, 2
SLICE_S = 5.0
LONG_PAUSE_S = 0.1
FIRST_LOOK = 0.2  # the share of the time after which memory is compared with that at the end
NAMESPACE = ["unshare", "--mount", "--propagation", "private"]


class Soak:
    """All that runs: lanes, audience, the long job, and the watcher that looks at the list of live runs."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.ledger = place, place.ledger
        self.fates: Counter[str] = Counter()
        self.memory: dict[str, list[float]] = {}
        self._seed = seed
        self._stop = threading.Event()
        self._jobs: dict[str, Job] = {}
        self._threads: list[threading.Thread] = []
        self._watcher = Watcher(self.ledger, lambda: list(self._jobs.values()))
        self._attached = contextlib.ExitStack()

    def start(self) -> None:
        """Notes the parameters of a job that is not watched, then starts everything."""
        self.place.reference = self._reference("reference", STEPS)
        self.long = Job(self.place, "long", steps=0, pause_s=LONG_PAUSE_S)
        self._jobs["long"] = self.long
        (self.long.folder / "go").touch()
        if not await_that(self.long.runs):
            raise SystemExit(f"the long job is not watched: see {self.long.folder / 'output.log'}")
        self.long.expected = True
        (info,) = self.long.runs()
        log = self.place.base / "viewers" / "attached.log"
        self.attached, _ = self._attached.enter_context(
            started(["attach", info.run_id, "--plain"], log, terminal=False)
        )
        self._collector_pid = info.pid
        lanes = [(self._lane, number) for number in range(LANES)]
        for target, number in [*lanes, *((self._visits, number) for number in range(AUDIENCE))]:
            name = f"{target.__name__.strip('_')}{number}"
            self._threads.append(threading.Thread(target=target, args=(name,), name=name, daemon=True))
        for thread in (self._watcher, *self._threads):
            thread.start()

    def look_at_memory(self) -> None:
        """Notes the memory of what stays for the whole time."""
        rank = (self.long.rank_pids() or [0])[0]
        for name, pid in (("rank 0", rank), ("its collector", self._collector_pid), ("its viewer", self.attached.pid)):
            self.memory.setdefault(name, []).append(rss_mib(pid))

    def finish(self) -> None:
        """Lets the jobs that run come to their end, then the audience, then the long job."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.look_at_memory()
        self._end_long_job()
        self._watcher.stop()
        self._watcher.join()

    def kill(self) -> None:
        """Ends all that is left."""
        self._stop.set()
        self._watcher.stop()
        with contextlib.suppress(Exception):
            self._attached.close()
        for job in list(self._jobs.values()):
            job.end()

    # -- threads -----------------------------------------------------------------------------------------------

    def _lane(self, name: str) -> None:
        """One job after the other; each fate comes once in a round."""
        dice, number = random.Random(f"{self._seed} {name}"), 0
        while not self._stop.is_set():
            for fate in dice.sample(FATES, len(FATES)):
                if self._stop.is_set():
                    return
                number += 1
                job = drawn(dice, self.place, f"{name[-1]}x{number}", fate)
                self._jobs[job.folder.name] = job
                before = len(self.ledger.violations)
                try:
                    live(job, dice)
                except Exception as error:
                    self.ledger.check("the soak test itself works", False, job.folder, f"{fate.name}: {error!r}")
                self.fates[fate.name] += 1
                del self._jobs[job.folder.name]
                if len(self.ledger.violations) == before:
                    shutil.rmtree(job.folder)

    def _visits(self, name: str) -> None:
        audience(self.place, name, random.Random(f"{self._seed} {name}"), self._stop)

    # -- the jobs that are not drawn -----------------------------------------------------------------------------

    def _reference(self, number: str, steps: int) -> list[bytes]:
        """The notes of a job that is not watched; they must be the same on both ranks."""
        job = Job(self.place, number, mode="not recorded", watched=False, steps=steps, pause_s=0.0)
        (job.folder / "go").touch()
        try:
            code = job.process.wait(3600.0)
            notes = [path.read_bytes().splitlines() for path in job.notes()]
        finally:
            job.end()
        if code or len(notes) != 2 or notes[0] != notes[1]:
            raise SystemExit(f"the job that is not watched fails: see {job.folder / 'output.log'}")
        return notes[0]

    def _end_long_job(self) -> None:
        """The long job ends by itself, its viewer after it; its parameters are compared from the first step on."""
        self.long.expected = False
        (self.long.folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.long.process.wait(PATIENCE_S)
        left = leaves(self.attached)
        self._attached.close()
        self.ledger.check("viewers end when they are asked to", left, self.place.base / "viewers", "it stayed")
        self.ledger.check("jobs end as they must", self.long.process.poll() == 0, self.long.folder, "the long job")
        gone = await_that(lambda: not self.long.processes())
        self.ledger.check("processes are gone", gone, self.long.folder, "the long job")
        reference = self._reference("long-reference", max(1, self.long.step()))
        for notes in self.long.notes():
            lines = notes.read_bytes().splitlines()
            same = lines == reference[: len(lines)]
            self.ledger.check("parameters are bit-identical", same, notes, "the long job")
            self.ledger.checked["· steps compared"] += len(lines)


# -- what is left over -----------------------------------------------------------------------------------------------


def count_leftovers(place: Place) -> dict[str, list[str]]:
    """What is left of all jobs and viewers, by kind."""
    rundir.live_runs()  # as the next viewer does: it removes what collectors left that were killed
    run_directory = rundir.directory()
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if str(place.base) in line]
    beside = [path for pattern in ("*.next", "*.draft") for path in place.base.rglob(pattern)]
    return {
        "processes": [" ".join(cmdline(each)) for each in settled_processes(place)],
        "sockets": sockets,
        "files in the run directory": [path.name for path in run_directory.iterdir() if path.suffix not in KEPT],
        "black boxes": [path.name for path in black_boxes(place)],
        "reservations and drafts": [str(path) for path in beside],
        "last views beyond five": [path.name for path in run_directory.glob("*.mcap")][rundir.KEEP_LAST_VIEWS :],
    }


def black_boxes(place: Place) -> list[Path]:
    """Those that the soak's ranks have left."""
    return list((rundir.SHARED_MEMORY / f"ddpwatch-{os.getuid()}").glob(f"{place.token}j*"))


def settled_processes(place: Place) -> list[psutil.Process]:
    """The processes that do not end."""
    await_that(lambda: not processes_of(str(place.base)))
    return processes_of(str(place.base))


# -- the command ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="of what happens to which job (default: random)")
    args = parser.parse_args()
    mounts = may_mount()
    seed = secrets.randbelow(10_000) if args.seed is None else args.seed
    print(f"seed {seed}; a full disk is {'a small tmpfs' if mounts else 'a limit on file sizes'}", file=sys.stderr)
    base = Path(tempfile.mkdtemp(prefix="dw-soak-"))
    place = Place(base, f"s{secrets.token_hex(3)}", mounts, Ledger())
    with fork_server():
        prepare(place)
        soak = Soak(place, seed)
        done, planned = 0, max(1, round(args.minutes * 60 / SLICE_S))
        try:
            with Rounds() as rounds:
                soak.start()
                for number in rounds.over(range(planned), f"slices of {SLICE_S:.0f} s"):
                    time.sleep(SLICE_S)
                    done = number + 1
                    if number == int(planned * FIRST_LOOK):
                        soak.look_at_memory()
            print("the last jobs come to their end", file=sys.stderr)
            soak.finish()
        finally:
            soak.kill()
    leftovers = count_leftovers(place)
    for what, found in leftovers.items():
        place.ledger.check(f"left over: {what}", not found, rundir.directory(), ", ".join(found[:10]))
    show(soak, leftovers)
    for box in black_boxes(place):
        box.unlink()
    print(f"{rounds_done(done, planned, 'slice')} of {SLICE_S:.0f} s, {os.cpu_count()} cores, seed {seed}")
    if place.ledger.violations:
        sys.exit(1)
    shutil.rmtree(base)


def may_mount() -> bool:
    """Whether this process has a mount namespace of its own; it starts again in one where it can."""
    if os.environ.get("SOAK_NAMESPACE") == "1":
        return True
    if os.geteuid() or shutil.which(NAMESPACE[0]) is None:
        return False
    trial = "mount -t tmpfs soak /mnt"
    if subprocess.run([*NAMESPACE, "sh", "-c", trial], capture_output=True, check=False).returncode:
        return False
    os.environ["SOAK_NAMESPACE"] = "1"
    return os.execvp(NAMESPACE[0], [*NAMESPACE, sys.executable, *sys.argv])


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """The server that forks jobs: without this soak's variables in its environment, and out of Ctrl-C's reach."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        the_server()
    finally:
        signal.signal(signal.SIGINT, previous)
    try:
        yield
    finally:
        close_the_server()


def prepare(place: Place) -> None:
    """Makes all jobs and viewers meet below the base directory."""
    for name, variable in (("state", "XDG_STATE_HOME"), ("tmp", "TMPDIR"), ("run", "DDPWATCH_DIR")):
        (place.base / name).mkdir(mode=0o700)
        os.environ[variable] = str(place.base / name)
    for name in ("jobs", "viewers"):
        (place.base / name).mkdir()
    os.environ["TERM"] = "xterm-256color"
    for name in [name for name in os.environ if name.startswith("DDPWATCH") and name != "DDPWATCH_DIR"]:
        del os.environ[name]


def show(soak: Soak, leftovers: dict[str, list[str]]) -> None:
    """Prints the tables."""
    ledger = soak.ledger
    print("\n".join(table(["fate", "jobs"], [[name, str(count)] for name, count in sorted(soak.fates.items())])))
    print()
    violated = Counter(what for what, _, _ in ledger.violations)
    rows = [
        [what, f"{count:,}", "–" if what.startswith("·") else str(violated[what])]
        for what, count in sorted(ledger.checked.items())
    ]
    print("\n".join(table(["checked", "times", "violations"], rows)))
    print()
    print(
        "\n".join(
            table(["seen", "largest"], [[what, f"{value:.1f}"] for what, value in sorted(ledger.largest.items())])
        )
    )
    print()
    memory = [
        [name, *(f"{value:.1f}" for value in values), f"{values[-1] - values[0]:+.1f}"]
        for name, values in soak.memory.items()
        if len(values) == 2
    ]
    if memory:
        print("\n".join(table(["long job", f"MiB at {FIRST_LOOK:.0%}", "at the end", "growth"], memory)))
    kept = Counter(path.suffix for path in rundir.directory().iterdir() if path.suffix in KEPT)
    print(f"\nkept in the run directory: {', '.join(f'{count} *{suffix}' for suffix, count in kept.items())}")
    print(f"left over: {', '.join(f'{len(found)} {what}' for what, found in leftovers.items())}")
    for what, where, seen in ledger.violations:
        print(f"VIOLATED: {what}: {where}: {seen[:400]}")


if __name__ == "__main__":
    main()
