"""Runs of one script over time: which one got slower, beyond what runs differ by; and what is kept of a recording."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from ddpwatch.analysis.history import PastRun, RunHistory, histories
from ddpwatch.cli import app
from ddpwatch.errors import UsageError
from ddpwatch.report import summaries
from ddpwatch.report.history_text import render_history
from ddpwatch.run.commit import commit_of
from tests.support.runs import record, run_of

pytestmark = pytest.mark.same_everywhere


def summary(place: int, step_ms: float | None, **others: object) -> PastRun:
    made = PastRun(
        path=f"/runs/run{place:02}.mcap", run=f"run-{place}", started=1e9 + 86_400 * place, script="train.py", ranks=2,
        device="cpu", parameters=750, commit=f"{place:012x}", steps=100, step_ms=step_ms,
        phases_ms={"backward": step_ms and step_ms - 60, "forward": 60.0}, lost=0.1, worst="",
    )  # fmt: skip
    return replace(made, **others)


def history(*steps_ms: float | None) -> RunHistory:
    (found,) = histories(summary(place, ms) for place, ms in enumerate(steps_ms, 1))
    return found


def noisy(count: int, ms: float, seed: int) -> list[float]:
    dice = random.Random(seed)
    return [dice.gauss(ms, 0.01 * ms) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_the_run_from_which_on_it_is_slower_is_named(seed: int) -> None:
    found = history(*noisy(13, 100, seed), *noisy(7, 112, seed + 50))
    (change,) = found.changes
    assert (change.b, change.verdict, change.phase) == ("/runs/run14.mcap", "slower", "backward")
    assert change.ratio == pytest.approx(0.12, abs=0.015)
    assert found.text.startswith("each run from run14 (commit 00000000000e) on is 1")
    assert "because the backward rose from " in found.text
    assert found.verdict == "slower"
    assert "slower" in render_history(found, 80).splitlines()[-7]


def test_the_newest_run_is_judged_by_itself_and_a_stray_is_no_change() -> None:
    found = history(*noisy(12, 100, 1), 115)
    assert [(change.b, change.verdict) for change in found.changes] == [("/runs/run13.mcap", "slower")]
    assert found.verdict == "slower"
    assert found.text.startswith("run13 (commit 00000000000d) is 1")
    found = history(*noisy(6, 100, 1), 150, *noisy(6, 100, 2))
    assert found.changes == []
    assert found.text.startswith("no run is faster or slower beyond what runs differ by (")


def test_runs_that_differ_anyway_are_no_change() -> None:
    dice = random.Random(3)
    assert sum(bool(history(*(dice.gauss(100, 10) for _ in range(20))).changes) for _ in range(100)) <= 3


def test_a_change_that_no_run_shows_by_itself_is_found() -> None:
    """And each of several."""
    dice = random.Random(5)
    found = history(*(dice.gauss(ms, 0.06 * ms) for ms in [100] * 12 + [120] * 12 + [90] * 12))
    assert [(change.b[-7:-5], change.verdict) for change in found.changes] == [("13", "slower"), ("25", "faster")]


def test_a_figure_in_a_row_is_whole_or_left_out() -> None:
    found = history(100)
    worst = "rank 1 died of an exception (ValueError: the batch has another shape than before) at step 1140"
    runs = [replace(found.runs[0], worst=worst)]
    *_, header, row = render_history(replace(found, runs=runs)).splitlines()
    assert "  step p50 ms  " in header  # no mean, as reports have
    assert row.endswith(" than …")


def test_too_few_runs_or_steps_say_nothing() -> None:
    assert (found := history(100, 150, 100, None)).verdict == "unknown"
    assert found.text == "3 runs to compare; 4 are needed, of 20 steps each"


def test_only_alike_runs_are_compared_and_each_once() -> None:
    others = [summary(3, 10, ranks=8), summary(4, 10, parameters=9), summary(1, 10, path="/last/run-1", steps=5)]
    found = histories([*(summary(place, 100) for place in (1, 2)), *others])
    assert [[run.path for run in one.runs] for one in found] == [
        ["/runs/run01.mcap", "/runs/run02.mcap"], ["/runs/run03.mcap"], ["/runs/run04.mcap"],
    ]  # fmt: skip


def test_a_recording_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = record(tmp_path / "run.mcap", run_of(steps=30))
    (tmp_path / "torn.mcap").write_bytes(b"torn")
    read = lambda *more: CliRunner().invoke(app, ["history", "--in", str(tmp_path), *more])  # noqa: E731
    (found,) = json.loads(read("--json").stdout)
    (run,) = found["runs"]
    assert (run["path"], run["steps"], run["step_ms"], run["started"]) == (str(file), 29, 100.0, 1_700_000_000.0)
    assert run["time"]["seconds"]["steps"] == pytest.approx(2 * 2.9)
    monkeypatch.setattr(summaries, "summary_of", lambda path: pytest.fail(f"{path} is read again"))
    (tmp_path / "torn.mcap").unlink()
    shown = read("train.py").stdout.splitlines()[-1].split()
    assert shown[3:5] == ["29", "–"]  # steps, throughput
    assert "run.mcap" in shown
    assert isinstance(read("other.py").exception, UsageError)
    monkeypatch.undo()
    file.unlink()
    record(file, run_of(steps=25))
    (tmp_path / "state" / "ddpwatch").mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state" / "ddpwatch" / summaries.FILE).write_bytes(b"no database" * 100)
    done = read("--json")
    assert json.loads(done.stdout)[0]["runs"][0]["steps"] == 24
    assert "summaries are not kept" in done.stderr


def test_a_commit_is_read_without_git(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    work, below = tmp_path / "work", tmp_path / "work" / "below"
    below.mkdir(parents=True)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=work, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    assert commit_of(work) == ""
    git("commit", "-q", "--allow-empty", "-m", "first")
    head = git("rev-parse", "HEAD")[:12]
    assert commit_of(below) == head
    git("worktree", "add", "-q", str(tmp_path / "other"))
    git("pack-refs", "--all")
    git("checkout", "-q", "--detach")
    assert {commit_of(place) for place in (below, tmp_path / "other")} == {head}
    deep = work / "submodule" / "deep"
    deep.mkdir(parents=True)
    (work / "submodule" / ".git").write_text("gitdir: ../.git\n")  # relative to where it stands
    assert commit_of(deep) == git("rev-parse", "HEAD")[:12]
