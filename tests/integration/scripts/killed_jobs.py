"""Small watched jobs, each of which is killed as a whole at a moment that is given: ranks and collector, all in one go.

Importing torch is what takes long, so it is done once: this process forks a few lanes, and each of them forks the ranks
of one job after the other. Leaves a directory per job: the recording, the time at which each rank's steps ended, as
the rank itself noted it, and when who was killed.

A moment is given in steps of the slower rank, each of which takes at least `PAUSE_S`: so on a busy machine everything
takes longer and nothing comes too early. Up to `EARLY` steps count from the start, and the job may well be killed
before the collector is up; more count from when that is up. Of a recording in parts, more than `LATE` count from when
its first part is complete.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
import torch._dynamo  # what the first optimizer would otherwise import in every rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpwatch
from ddpwatch.probe import watch  # noqa: F401 - likewise: what the first watch() imports

LANES = 6
RANKS = 2
PAUSE_S = 0.04  # in a step, so that the lanes leave each other room
EARLY, LATE = 25, 50
LATE_THREADS = 5  # through which a step goes to the disk: sender, collector, recorder, and ZeroMQ's two
PATIENCE = timedelta(seconds=120)


def main() -> None:
    base, moments = Path(sys.argv[1]), [float(moment) for moment in sys.argv[2:]]
    jobs = [(base / str(number), moment) for number, moment in enumerate(moments)]
    gc.freeze()
    lanes = [forked(partial(run_lane, jobs[place::LANES])) for place in range(LANES)]
    sys.exit(max(os.waitpid(lane, 0)[1] for lane in lanes) > 0)


def forked(work: partial[None]) -> int:
    """The pid of a child that does the work, and nothing that comes after this."""
    pid = os.fork()
    if pid == 0:
        failed = 1
        try:
            work()
            failed = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(failed)
    return pid


def run_lane(jobs: list[tuple[Path, float]]) -> None:
    for folder, moment in jobs:
        run_job(folder, moment)


def run_job(folder: Path, moment: float) -> None:
    """Starts a job, and kills it at that moment. Every other recording is in parts."""
    folder.mkdir(mode=0o700)
    os.environ["DDPWATCH_DIR"] = str(folder)
    parts = int(folder.name) % 2 == 1
    os.environ["DDPWATCH_RECORD_PART_AGE"] = "0.5" if parts else "0"
    watched, tell = os.pipe()
    ranks = [forked(partial(train, rank, folder, tell, os.getpid())) for rank in range(RANKS)]
    os.close(tell)
    told = [os.read(watched, 1) for _ in ranks]
    os.close(watched)
    deadline = time.monotonic() + PATIENCE.total_seconds()
    awaited = (moment > EARLY) * ["*.pub"] + (moment > LATE and parts) * ["run.0000.mcap"]
    while not all(map(any, map(folder.glob, awaited))) and time.monotonic() < deadline:
        time.sleep(0.01)
    waited_ns = waits_ns()
    last = steps(folder) + int(moment) if moment > EARLY else int(moment)
    while steps(folder) < last and time.monotonic() < deadline:
        time.sleep(PAUSE_S / 4)
    time.sleep(moment % 1 * PAUSE_S)  # anywhere in the step
    everyone = [process.pid for process in psutil.Process().children(recursive=True)]  # the collector is rank 0's
    collector_ns, killed_ns, waited_ns = up_ns(folder), time.monotonic_ns(), waits_ns() - waited_ns
    for blow in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: a rank must not outlive another and raise
        for pid in everyone:
            os.kill(pid, blow)
    ends = [os.waitpid(rank, 0)[1] for rank in ranks]
    assert steps(folder) >= last, f"{folder} came no further than {steps(folder)} of {last} steps"
    assert all(told), f"a rank of {folder} was not watched"
    assert collector_ns or moment <= EARLY, f"no collector came up in {folder}"
    assert ends == [signal.SIGKILL] * RANKS
    late_ns = sum(ns for _, ns in waited_ns.most_common(LATE_THREADS))
    killed = {"at_ns": killed_ns, "collector_ns": collector_ns, "late_ns": late_ns, "pids": everyone}
    (folder / "killed").write_text(json.dumps(killed))


def steps(folder: Path) -> int:
    """How many steps each rank has done, by their own notes."""
    notes = [folder / f"rank{rank}" for rank in range(RANKS)]
    return min(note.read_bytes().count(b"\n") if note.exists() else 0 for note in notes)


def up_ns(folder: Path) -> int:
    """How long the collector has been there, by the second of its sockets; 0 while it is not."""
    return next((time.time_ns() - socket.stat().st_mtime_ns for socket in folder.glob("*.pub")), 0)


def waits_ns() -> Counter[str]:
    """How long each thread of this lane's job has waited for a core, which is what other load costs it."""
    waits = Counter()
    for process in psutil.Process().children(recursive=True):
        for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                waits[task.parent.name] = int(task.read_text().split()[1])
    return waits


def train(rank: int, folder: Path, tell: int, lane: int) -> None:
    """One rank: trains until it is killed, or its lane is gone."""
    dist.init_process_group("gloo", f"file://{folder}/store", PATIENCE, RANKS, rank)
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(4, 8)
    ddpwatch.watch(model, record=folder / "run.mcap")
    os.write(tell, b".")
    with (folder / f"rank{rank}").open("wb", buffering=0) as ended:
        while os.getppid() == lane:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ended.write(b"%d\n" % time.monotonic_ns())
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
