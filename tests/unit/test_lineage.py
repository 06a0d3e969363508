"""How a rank knows which run its job was before torchrun started it again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch import rundir
from ddpwatch.probe import lineage
from ddpwatch.probe.lineage import succeed
from ddpwatch.rundir import KEEP_NOTES_S


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
    monkeypatch.setattr(lineage.clock, what, lambda *_: 1)
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
    os.mkfifo(note := rundir.note(lineage._place()))
    assert succeed("train-2", 1) == ""
    (elsewhere := tmp_path / "elsewhere").write_text("train-9")
    note.unlink()
    note.symlink_to(elsewhere)
    assert [succeed("train-3", 1), succeed("train-4", 1)] == ["", "train-3"]
    assert elsewhere.read_text() == "train-9"


def test_a_run_directory_that_cannot_be_written_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    succeed("train-1", 1)
    with monkeypatch.context() as patch:
        patch.setattr(rundir, "unfinished_note", lambda place: Path("/proc/none.new"))
        assert succeed("train-2", 1) == "train-1"
    monkeypatch.setenv("DDPWATCH_DIR", "/proc/none")
    assert succeed("train-3", 1) == ""


def test_notes_are_kept_for_long_jobs_and_old_ones_removed(run_directory: Path) -> None:
    long, ended = 24 * "a", 24 * "e"
    for place in (long, ended):
        rundir.note(place).touch()
        rundir.unfinished_note(place).touch()
    foreign = run_directory / "todo.note", run_directory / "site.conf.new"
    for path in foreign:
        path.touch()
    for path in run_directory.iterdir():
        age_s = KEEP_NOTES_S - 86_400 if path.name.startswith(long) else KEEP_NOTES_S + 86_400
        os.utime(path, times=(time.time() - age_s,) * 2)
    rundir.live_runs()
    assert {path.name.partition(".")[0] for path in run_directory.iterdir()} == {long, "todo", "site"}
    os.utime(rundir.note(long), times=(0, 0))
    succeed("train-1", 1)
    assert not rundir.note(long).exists()  # also where nobody ever looks at a run
    assert all(path.exists() for path in foreign)
