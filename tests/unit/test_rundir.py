"""The run directory: which runs are live, what is removed, and what is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.run import rundir
from ddpwatch.run.clock import boot_id, pid_namespace, start_ticks
from tests.support.jobs import DDPWATCH, finished

NOBODY = 2**22 + 1  # above the largest pid
DAY_S = 86_400


def left_by_a_collector(folder: Path, run_id: str, **fields: Any) -> Path:
    """A run's file with its sockets and a black box, as a collector leaves them; nobody holds it."""
    base = {"run_id": run_id, "ingest": f"ipc://{folder}/{run_id}.in", "publish": f"ipc://{folder}/{run_id}.pub"}
    about = {"pid": os.getpid(), "world_size": 2, "started": time.time(), "boot_id": boot_id()}
    (path := folder / f"{run_id}.json").write_text(json.dumps({**base, **about, **fields}))
    for suffix in (".in", ".pub", ".box0"):
        (folder / f"{run_id}{suffix}").touch()
    return path


def names(folder: Path, run_id: str) -> set[str]:
    return {path.suffix for path in folder.glob(f"{run_id}.*")}


EVERYTHING = {".json", ".in", ".pub", ".box0"}


def live() -> list[str]:
    return [info.run_id for info in rundir.live_runs()]


def test_a_run_whose_file_is_held_is_live_even_if_its_pid_is_not_visible_here(run_directory: Path) -> None:
    path = left_by_a_collector(run_directory, "train-1", pid=NOBODY)
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert live() == ["train-1"]
        assert names(run_directory, "train-1") == EVERYTHING
    assert live() == []
    assert names(run_directory, "train-1") == set()


def test_a_reused_pid_is_not_the_collector(run_directory: Path) -> None:
    left_by_a_collector(run_directory, "train-1", pid=os.getpid())
    assert live() == []


def test_what_another_host_left_is_shown_and_removed_by_age_only(run_directory: Path) -> None:
    path = left_by_a_collector(run_directory, "train-1", pid=NOBODY, boot_id="another", host="node7")
    assert live() == []
    assert names(run_directory, "train-1") == EVERYTHING
    listed = finished(*DDPWATCH, "ls")
    assert [line.split()[:2] for line in listed.stdout.splitlines()] == [["run", "ranks"], ["train-1", "2"]]
    assert "on node7" in listed.stdout
    assert json.loads(finished(*DDPWATCH, "ls", "--json").stdout) == []
    refused = finished(*DDPWATCH, "attach", "train-1", "--plain")
    assert (refused.returncode, "on node7" in refused.stderr) == (2, True)
    os.utime(path, times=(time.time() - 31 * DAY_S,) * 2)
    assert live() == []
    assert names(run_directory, "train-1") == set()


def test_a_symlinked_run_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    monkeypatch.setenv("DDPWATCH_DIR", str(tmp_path / "link"))
    with pytest.raises(DdpwatchError, match="not a private directory that you own"):
        rundir.directory()


@pytest.mark.parametrize(
    "run_id", ["../train-1", "/tmp/train-1", "a/b", "", ".", "..", ".hidden", "a\0b", "*", "a" * 129]
)
def test_a_run_id_that_is_no_name_never_becomes_a_path(run_id: str, run_directory: Path) -> None:
    for path_of in (
        rundir.endpoints,
        rundir.remove,
        rundir.last_view,
        rundir.log,
        lambda name: rundir.blackbox(name, 0),
    ):
        with pytest.raises(DdpwatchError, match="not a run id"):
            path_of(run_id)


def test_a_file_that_names_another_run_is_not_read(run_directory: Path) -> None:
    (run_directory.parent / f"{run_directory.name}-victim.pub").touch()
    path = left_by_a_collector(run_directory, "train-1", pid=NOBODY)
    path.write_text(path.read_text().replace('"train-1"', f'"../{run_directory.name}-victim"'))
    assert live() == []
    (run_directory.parent / f"{run_directory.name}-victim.pub").unlink()


def test_without_file_locks_the_process_decides(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an NFS home without its lock service. What is not certain to have ended is not removed."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    here = {"pid_ns": pid_namespace(), "start_ticks": start_ticks(os.getpid())}
    for run_id, fields in {
        "alive": here,
        "pid-of-another-process": here | {"start_ticks": 1},
        "in-another-container": {"pid_ns": "pid:[1]", "start_ticks": 1},
    }.items():
        left_by_a_collector(run_directory, run_id, **fields)
    assert set(live()) == {"alive", "in-another-container"}
    assert names(run_directory, "pid-of-another-process") == EVERYTHING


def test_a_runs_sockets_are_beside_its_file(run_directory: Path) -> None:
    """The collector may be in a container, where the directory has another path."""
    path = left_by_a_collector(
        run_directory, "train-1", ingest="ipc:///mnt/train-1.in", publish="ipc:///mnt/train-1.pub"
    )
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (info,) = rundir.live_runs()
    assert (info.ingest, info.publish) == (f"ipc://{run_directory}/train-1.in", f"ipc://{run_directory}/train-1.pub")


# -- where it is ---------------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """XDG_RUNTIME_DIR as SLURM, sudo and containers leave it: set, and not there."""
    monkeypatch.delenv("DDPWATCH_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/no-such-directory")
    return f"/tmp/ddpwatch-{os.getuid()}"


def test_a_runtime_directory_that_is_missing_is_not_used(nowhere: str) -> None:
    assert rundir.directory() == Path(nowhere)
    assert "XDG_RUNTIME_DIR" in rundir.fallback()
    assert nowhere in rundir.fallback()


def test_a_runtime_directory_is_not_created(tmp_path: Path, nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert rundir.directory() == Path(nowhere)
    assert not (tmp_path / "missing").exists()


def test_a_runtime_directory_that_is_there_is_used(
    tmp_path: Path, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert rundir.directory() == tmp_path / "ddpwatch"
    assert rundir.fallback() == ""


def test_a_command_says_where_it_looks_instead(nowhere: str) -> None:
    done = finished(*DDPWATCH, "ls")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("XDG_RUNTIME_DIR") == 1
    assert nowhere in done.stderr


def test_a_mount_whose_name_is_no_text_is_one_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = os.fsencode(tmp_path)
    (tmp_path / "mounts").write_bytes(b"a / ext4 rw 0 0\nb /media/caf\xe9 vfat rw 0 0\nc " + place + b" nfs4 rw 0 0\n")
    monkeypatch.setattr(rundir, "MOUNTS", tmp_path / "mounts")
    assert rundir.file_system(tmp_path) == "nfs4"


def test_the_newest_last_views_are_found_while_others_go(run_directory: Path) -> None:
    """Collectors that end at the same time remove them."""
    for number in range(rundir.KEEP_LAST_VIEWS + 1):
        (view := rundir.last_view(f"run-{number}")).touch()
        os.utime(view, (number, number))
    (mine := run_directory / "run.mcap").touch()
    os.utime(mine, (0, 0))
    rundir.last_view("gone").symlink_to(run_directory / "nowhere")  # listed, and not there
    found = [rundir.run_of(path) for path in rundir.last_views()]
    assert found == [f"run-{number}" for number in range(rundir.KEEP_LAST_VIEWS, 0, -1)]
    assert not rundir.last_view("run-0").exists()
    assert mine.exists()  # the user's own recording, whatever its age


def test_a_run_that_has_ended_is_found_as_its_recording(run_directory: Path) -> None:
    rundir.last_view("train-1").touch()
    with pytest.raises(UsageError, match="train-1 has ended") as found:
        rundir.find("train")
    assert f"`ddpwatch replay {run_directory / 'train-1.last.mcap'}`" in found.value.hint


def test_a_long_run_keeps_its_mapped_files(run_directory: Path) -> None:
    """A cleaner of /tmp removes what is old. Ranks write to their black boxes, which leaves the files' times."""
    claim = rundir.claim("train-1")
    paths = [run_directory / "train-1.json"]
    for path in (rundir.blackbox("train-1", 0), rundir.lease("train-1")):
        assert path is not None
        path.touch()
        paths.append(path)
    for path in paths:
        os.utime(path, (0, 0))
    rundir.renew(claim, "train-1")
    os.close(claim)
    assert all(path.stat().st_mtime for path in paths)
    rundir.remove("train-1")
    assert not any(path.exists() for path in paths)
