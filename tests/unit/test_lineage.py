"""How a rank knows which run its job was before torchrun started it again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpwatch.collector import __main__ as collector
from ddpwatch.probe import lineage
from ddpwatch.probe.lineage import succeed
from ddpwatch.run import regular, rundir
from ddpwatch.run.rundir import KEEP_UNREACHABLE_S


@pytest.fixture(autouse=True)
def _below_torchrun(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_RANK", "3")


def the_note() -> Path:
    (note,) = rundir.directory().glob("*.note")
    return note


def test_a_rank_knows_the_run_of_the_one_in_its_place_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [succeed("train-1", 1), succeed("train-2", 1)] == ["", "train-1"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert [succeed("train-2", 1), succeed("train-3", 1)] == ["", "train-2"]


def test_a_later_session_continues_no_run_and_leaves_a_note() -> None:
    assert [succeed("train-1", 1), succeed("train-1.1", 2), succeed("train-2", 1)] == ["", "", "train-1.1"]


@pytest.mark.parametrize("what", ["boot_id", "pid_namespace", "start_ticks"])
def test_another_torchrun_with_the_same_pid_is_another_place(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    succeed("train-1", 1)
    monkeypatch.setattr(lineage.clock, what, lambda *_: 7)
    assert succeed("train-2", 1) == ""


def test_without_torchrun_or_a_launcher_that_can_be_seen_there_is_no_note(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lineage.clock, "start_ticks", lambda pid: 0)
        assert [succeed("train-1", 1), succeed("train-2", 1)] == ["", ""]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert [succeed("train-1", 1), succeed("train-2", 1)] == ["", ""]
    assert list(run_directory.iterdir()) == []


@pytest.fixture
def name_of_this_process() -> Iterator[Path]:
    path = Path("/proc/self/comm")
    before = path.read_bytes()
    yield path
    path.write_bytes(before)


def test_a_process_may_have_a_name_that_is_no_text(name_of_this_process: Path) -> None:
    ticks = lineage.clock.start_ticks(os.getpid())
    name_of_this_process.write_bytes(b"\xff)")
    assert lineage.clock.start_ticks(os.getpid()) == ticks > 0


@pytest.mark.parametrize("said", [b"", b"../../etc", b"\x1b[2J", b"\xff", b"a" * 1000])
def test_a_note_that_is_no_run_id_counts_as_none(said: bytes) -> None:
    succeed("train-1", 1)
    the_note().write_bytes(said)
    assert [succeed("train-2", 1), succeed("train-3", 1)] == ["", "train-2"]


def test_what_is_no_file_is_not_read_and_holds_up_nobody(tmp_path: Path) -> None:
    """A pipe that nobody writes to, and a link to a file that holds a run id."""
    succeed("train-1", 1)
    the_note().unlink()
    os.mkfifo(note := lineage._note())
    assert succeed("train-2", 1) == ""
    (elsewhere := tmp_path / "elsewhere").write_text("train-9")
    note.unlink()
    note.symlink_to(elsewhere)
    assert [succeed("train-3", 1), succeed("train-4", 1)] == ["", "train-3"]
    assert elsewhere.read_text() == "train-9"


def test_a_run_directory_that_cannot_be_written_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    succeed("train-1", 1)
    with monkeypatch.context() as patch:
        patch.setattr(regular, "unfinished", lambda note: Path("/proc/none.new"))
        assert succeed("train-2", 1) == "train-1"
    monkeypatch.setenv("DDPWATCH_DIR", "/proc/none")
    assert succeed("train-3", 1) == ""


@pytest.fixture
def other_torchrun() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def leave_notes(launcher: int) -> list[Path]:
    """A rank's note, and one that it was about to leave when it was killed."""
    note = rundir.note(launcher, lineage.clock.start_ticks(launcher), 0)
    left = [note, regular.unfinished(note)]
    for path in left:
        path.write_text("train-1")
    return left


@pytest.mark.parametrize(
    "visit", [lambda: rundir.live_runs(), lambda: succeed("train-2", 1), lambda: rundir.remove("train-1")]
)
def test_notes_go_with_their_torchrun(
    visit: Callable[[], object], other_torchrun: subprocess.Popen[bytes], run_directory: Path
) -> None:
    """Whoever looks next removes them: a viewer, a rank, or a collector at its end."""
    left = leave_notes(other_torchrun.pid)
    (foreign := run_directory / "todo.note").touch()
    visit()
    assert all(path.exists() for path in left)
    other_torchrun.kill()
    other_torchrun.wait()
    visit()
    assert not any(path.exists() for path in left)
    assert foreign.exists()


@pytest.mark.parametrize("run_id", ["train-1", "train-0"])
def test_a_collector_waits_for_the_end_of_torchrun(
    run_id: str, other_torchrun: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks end first. Where their places have notes of another run, it is not over, and goes on."""
    left = leave_notes(other_torchrun.pid)

    def sleep(_: float) -> None:
        other_torchrun.kill()
        other_torchrun.wait()

    with monkeypatch.context() as patch:
        patch.setattr(collector.time, "sleep", sleep)
        collector._remove_notes(run_id)
    assert [path.exists() for path in left] == [run_id != "train-1"] * 2


def test_notes_of_processes_out_of_sight_are_removed_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another boot, or of another container that shares the run directory."""
    with monkeypatch.context() as patch:
        patch.setattr(rundir.clock, "boot_id", lambda: "another")
        left = leave_notes(os.getpid())
    rundir.live_runs()
    assert all(path.exists() for path in left)
    for path in left:
        os.utime(path, times=(time.time() - KEEP_UNREACHABLE_S - 60,) * 2)
    rundir.live_runs()
    assert not any(path.exists() for path in left)


def test_a_run_that_has_gone_leaves_no_note(run_directory: Path) -> None:
    succeed("train-1", 1)
    assert succeed("train-2", 1, leaves_note=False) == "train-1"
    assert the_note().read_text() == "train-1"
