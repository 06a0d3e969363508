"""How a rank knows which run its job was before torchrun started it again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpwatch import rundir
from ddpwatch.probe import lineage
from ddpwatch.probe.lineage import Lineage


@pytest.fixture(autouse=True)
def _below_torchrun(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_RANK", "3")


def test_a_rank_knows_the_run_of_the_one_in_its_place_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Lineage(1)
    assert first.previous == ""
    first.leave_note("train-1")
    assert Lineage(1).previous == "train-1"
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert Lineage(1).previous == ""


def test_another_torchrun_or_a_later_session_continues_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Lineage(1).leave_note("train-1")
    assert Lineage(2).previous == ""
    ticks = lineage.clock.start_ticks(os.getppid())
    monkeypatch.setattr(lineage.clock, "start_ticks", lambda pid: ticks + 1)  # its pid has gone to another process
    assert Lineage(1).previous == ""


def test_without_torchrun_there_is_no_note(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    Lineage(1).leave_note("train-1")
    assert Lineage(1).previous == ""
    assert list(run_directory.iterdir()) == []


def test_a_rank_that_has_finished_leaves_nothing(run_directory: Path) -> None:
    finished = Lineage(1)
    finished.leave_note("train-1")
    finished.remove_note()
    assert list(run_directory.iterdir()) == []


@pytest.mark.parametrize("said", [b"", b"../../etc", b"\x1b[2J", b"\xff"])
def test_a_note_that_is_no_run_id_counts_as_none(said: bytes) -> None:
    Lineage(1).leave_note("train-1")
    (note,) = rundir.directory().glob("*.note")
    note.write_bytes(said)
    assert Lineage(1).previous == ""


def test_a_run_directory_that_cannot_be_written_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Lineage(1)
    place._note = Path("/proc/none.note")
    place.leave_note("train-1")
    place.remove_note()
    monkeypatch.setenv("DDPWATCH_DIR", "/proc/none")
    assert Lineage(1).previous == ""
