"""What docs/deploy.md says of containers, clusters and shared hosts, simulated with namespaces and made-up users."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.part import Part
from ddpwatch.recording.reader import Recording
from ddpwatch.run import blackbox, rundir
from ddpwatch.run.clock import pid_namespace
from ddpwatch.wire.messages import Bye, Step
from tests.support.jobs import (
    DDPWATCH,
    PATIENCE_S,
    ROOT,
    SCRIPTS,
    Job,
    collector_pids,
    finished,
    live,
    messages,
    read_until,
    running,
    the_run,
    wait_for,
)

TRAIN = ROOT / "demo" / "train.py"
ENDLESS = ("--model", "mlp:width=64", "--data", "digits", "--inject", "slow-forward:ms=20", "--steps", "100000")
NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
# Shell scripts that make a container's file system. What is below the test's directory stands in for a volume.
READ_ONLY = """
mount --bind {volume} {volume}
for place in / /tmp; do if mountpoint -q $place; then mount -o remount,bind,ro $place; fi; done
"""
NO_SHARED_MEMORY = """
mkdir {volume}/dev; mount --bind /dev {volume}/dev; mount -t tmpfs tmpfs /dev
for node in null zero random urandom; do touch /dev/$node; mount --bind {volume}/dev/$node /dev/$node; done
"""
SHARED_MEMORY = "mount -t tmpfs -o size=64m tmpfs /dev/shm\n"  # as Docker mounts it
FULL_SHARED_MEMORY = f"{SHARED_MEMORY} dd if=/dev/zero of=/dev/shm/full bs=1M status=none || true\n"


@pytest.fixture
def namespaces() -> None:
    mounted = [*NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if not shutil.which("nsenter") or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to create namespaces and to mount")


class Container(Job):
    """A job of one rank, which is process 1 of a container."""

    def __init__(self, setup: str, volume: Path, *arguments: str, **environment: str) -> None:
        environment["CONTAINER"] = setup.format(volume=volume)
        script = SCRIPTS / "container.py"
        super().__init__(script, *ENDLESS, "--watch", *arguments, ranks=1, log=volume / "log", **environment)

    def first(self) -> psutil.Process:
        """Its process 1, as seen from outside."""
        (inside,) = self.ranks()[0].children()
        return inside

    def path(self, path: str) -> Path:
        """A path of the container's, as seen from outside."""
        return Path(f"/proc/{self.first().pid}/root{path}")

    def execute(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`ddpwatch` as `docker exec` and `kubectl exec` start it."""
        return finished("nsenter", f"--target={self.first().pid}", "--mount", "--pid", *DDPWATCH, *arguments)

    def stop(self) -> None:
        """As `docker stop`. When process 1 ends, so do all others."""
        self.first().terminate()
        assert self.wait() == 0, self.output()


def trains_on(job: Job) -> None:
    """Waits until the job has done more steps."""
    said = job.output().count("step ")

    def further() -> bool:
        assert job.process.poll() is None, job.output()
        return job.output().count("step ") >= said + 2

    wait_for(further, "it trains")


def fill(file: Path) -> None:
    """Writes to the file until its file system is full."""
    with contextlib.suppress(OSError), file.open("wb", 0) as full:
        while full.write(bytes(1 << 20)):
            pass
    assert os.statvfs(file.parent).f_bavail == 0


def steps_in(file: Path) -> list[int]:
    return sorted(message.step for message, _ in Recording(file) if isinstance(message, Step))


def records_on(file: Path) -> None:
    """Waits until the recording has more steps."""

    def steps() -> int:
        with contextlib.suppress(DdpwatchError):  # it has no frame yet
            return len(steps_in(file))
        return 0

    before = steps()
    wait_for(lambda: steps() > before + 2, "steps are recorded")


@pytest.mark.usefixtures("namespaces")
def test_a_read_only_container_with_no_place_to_write_trains_unwatched(tmp_path: Path) -> None:
    with Container(READ_ONLY, tmp_path, DDPWATCH_DIR="/ddpwatch") as job:
        trains_on(job)
        job.stop()
    (said,) = [line for line in job.output().splitlines() if line.startswith("ddpwatch")]
    assert "training goes on: /ddpwatch: Read-only file system (set DDPWATCH_DIR" in said


@pytest.mark.usefixtures("namespaces")
def test_a_read_only_container_whose_runs_are_in_shared_memory_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after its 64 MiB are full; and from a shell in there."""
    monkeypatch.setenv("DDPWATCH_DIR", "/dev/shm/ddpwatch")
    file = tmp_path / "run.mcap"
    with Container(READ_ONLY + SHARED_MEMORY, tmp_path, "--record", str(file)) as job:
        trains_on(job)
        (run,) = json.loads(job.execute("ls", "--json").stdout)
        assert (run["world_size"], run["recording"]) == (1, str(file))
        assert [box.stat().st_size for box in job.path("/dev/shm/ddpwatch").glob("*.box0")] == [4096]
        fill(job.path("/dev/shm/full"))
        trains_on(job)
        records_on(file)
        job.stop()
    assert "ddpwatch" not in job.output().replace("run `ddpwatch` in another terminal", "")
    steps = steps_in(file)  # the collector may have been killed before it closed the file
    assert steps == list(range(len(steps)))
    assert len(steps) > 2


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("setup", [NO_SHARED_MEMORY, FULL_SHARED_MEMORY], ids=["none", "full"])
def test_a_container_with_a_shared_run_directory_is_watched_from_outside(
    setup: str, run_directory: Path, tmp_path: Path
) -> None:
    """The directory has another path in there, and /dev/shm is missing or full."""
    with Container(f"{setup} mount --bind {run_directory} /mnt", tmp_path, DDPWATCH_DIR="/mnt") as job:
        info = the_run(job)
        assert info.pid_ns != pid_namespace()
        with live(info) as viewer:
            read_until(viewer, lambda frames: len(messages(frames, Step)) > 2, "steps")
        assert not [box for box in job.path("/dev/shm").glob("*/*.box0") if blackbox.read(box)]
        job.stop()
    assert rundir.live_runs() == []
    assert {path.suffix for path in run_directory.iterdir()} <= {".mcap", ".log"}


@pytest.mark.usefixtures("namespaces", "run_directory")
def test_the_first_process_of_a_container_ends_the_job_and_closes_its_recording(tmp_path: Path) -> None:
    """`ddpwatch run` as process 1, and a SIGTERM: `docker stop`, or the end of a Kubernetes pod."""
    file = tmp_path / "run.mcap"
    command = [*DDPWATCH, "run", "--headless", "--record", str(file), "--", sys.executable, str(TRAIN), *ENDLESS]
    with running(*NAMESPACES, *command, OMP_NUM_THREADS="1") as container:
        assert container.stdout is not None
        said = [container.stdout.readline()]
        while not said[-1].startswith("step 10/"):
            said.append(container.stdout.readline())
            assert said[-1], said
        (first,) = psutil.Process(container.pid).children()
        first.terminate()
        out, err = container.communicate(timeout=PATIENCE_S)
        assert container.returncode == 0, err
    assert "stopped as asked" in out
    part = Part(file)
    assert part.index.complete
    assert part.end
    assert [bye.reason for bye, _ in Recording(file) if isinstance(bye, Bye) and bye.rank == 0] == ["finished"]
    assert rundir.live_runs() == []  # the collector may have been killed once it had closed the file


# -- several users ---------------------------------------------------------------------------------------------


def as_user(user: int, *command: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]


@pytest.fixture
def users() -> Iterator[tuple[int, int]]:
    """The ids of two users. No list of users knows them, which is usual in containers."""
    first = 2_000_000 + 2 * secrets.randbelow(10**8)
    usable = as_user(first, *DDPWATCH, "--help")
    if not shutil.which("setpriv") or subprocess.run(usable, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to become another user, and a checkout that others can read")
    yield first, first + 1
    for place, user in itertools.product(("/tmp", "/dev/shm"), (first, first + 1)):
        shutil.rmtree(f"{place}/ddpwatch-{user}", ignore_errors=True)


def test_two_users_on_one_host_neither_see_nor_harm_each_other(
    users: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their XDG_RUNTIME_DIR is missing. Even runs of one name are two."""
    monkeypatch.delenv("DDPWATCH_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/none")
    collector = [sys.executable, "-m", "ddpwatch.collector", "--run-id=train", "--world-size=1"]

    def seen_by(user: int, **environment: str) -> subprocess.CompletedProcess[str]:
        return finished(*as_user(user, *DDPWATCH, "ls", "--json"), **environment)

    def published(user: int) -> set[str]:
        return {".json", ".in", ".pub"} & {path.suffix for path in Path(f"/tmp/ddpwatch-{user}").glob("train.*")}

    one, other = users
    started = [running(*as_user(user, *collector, f"--watch-pid={os.getpid()}")) for user in users]
    with started[0] as first, started[1] as second:
        for user, process in ((one, first), (other, second)):
            wait_for(lambda user=user: len(published(user)) == 3, "the collector is up")
            (run,) = json.loads(seen_by(user).stdout)
            assert (run["run_id"], run["pid"]) == ("train", process.pid)
        refused = seen_by(other, DDPWATCH_DIR=f"/tmp/ddpwatch-{one}")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "is not a private directory that you own" in refused.stderr
        first.terminate()
        assert first.wait(PATIENCE_S) == 0
        assert published(one) == set()
        assert published(other) == {".json", ".in", ".pub"}
        second.terminate()
        assert second.wait(PATIENCE_S) == 0


# -- clusters --------------------------------------------------------------------------------------------------


def test_tasks_of_srun_are_watched_until_scancel(run_directory: Path, tmp_path: Path) -> None:
    """Without torchrun. SLURM signals the tasks; when these have ended, it kills what is left in their step."""
    file = tmp_path / "run.mcap"
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    arguments = [*ENDLESS, "--record", str(file)]
    variables = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "TASK_PORT": port}
    with Job(SCRIPTS / "slurm_task.py", *arguments, log=tmp_path / "log", **variables) as job:
        info = the_run(job)
        with live(info) as viewer:
            read_until(viewer, lambda frames: {m.rank for m in messages(frames, Step)} == {0, 1}, "steps of both")
        records_on(file)  # what comes later may be lost
        for task in job.ranks():
            task.terminate()
        assert job.wait() == 0, job.output()
        for pid in collector_pids(info.run_id):
            os.kill(pid, signal.SIGKILL)
    assert "stopped as asked" in job.output()
    for rank in (0, 1):
        steps = [message.step for message, _ in Recording(file) if isinstance(message, Step) and message.rank == rank]
        assert steps == list(range(len(steps)))
        assert steps
    wait_for(lambda: not rundir.live_runs(), "the killed collector's files are removed")
    assert not list(run_directory.glob("*.json"))
