"""Recordings for other tools: every figure the same, every name in its place, nothing that executes."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.export.anonymize import word
from ddpwatch.export.chrome import align
from ddpwatch.export.tables import TABLES
from ddpwatch.export.writers import export
from ddpwatch.messages import Hello, Step
from ddpwatch.recording import open_recording
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection, selection_of
from tests.unit import chrome_trace
from tests.unit.runs import HOSTILE, MS, record, run_of

ALL = Selection()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return record(tmp_path / "run.mcap")


def test_the_trace_is_valid(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run.mcap", run_of(ranks=4))
    export(Recording(recorded), "chrome", tmp_path / "trace.json", ALL)
    chrome_trace.check(tmp_path / "trace.json", recorded)
    events = chrome_trace.load(tmp_path / "trace.json")
    assert [e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] < 4] == [
        f"rank {rank} (node0)" for rank in range(4)
    ]
    assert {e["name"]: e["args"]["value"] for e in events if e["ph"] == "C"} == {
        "utilisation %": 50.0,
        "memory used B": 10**9,
    }
    assert [e["name"] for e in events if e.get("cat") == "hook"][:3] == ["v", HOSTILE, "w"]
    assert [e["name"] for e in events if e.get("cat", "").startswith("mark")] == ["checkpoint /home/me"]
    assert [e["name"] for e in events if e.get("cat") == "end"][:2] == [
        "finished",
        "exception RuntimeError: /home/me/secret is missing",
    ]


def test_an_arrow_goes_from_the_first_rank_to_the_last(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run.mcap", run_of(ranks=3, steps=1))
    export(Recording(recorded), "chrome", tmp_path / "trace.json", ALL)
    flow = [e for e in chrome_trace.load(tmp_path / "trace.json") if e.get("cat") == "collective" and e["id"] == 1]
    assert [(e["pid"], e["ph"], e["ts"]) for e in flow] == [(0, "s", 40_000), (1, "t", 42_000), (2, "f", 44_000)]


def test_clocks_of_two_hosts_are_aligned(tmp_path: Path) -> None:
    """7 s apart; the shared collectives leave a bracket of 34 ms, and its middle is at most 2 ms off here."""
    recorded = record(tmp_path / "run.mcap", run_of(ranks=2, boots=("a", "b")))
    offsets = align(Recording(recorded)).offsets()
    assert offsets[0] == 0
    assert abs(offsets[1] + 7_000 * MS) <= 2 * MS
    export(Recording(recorded), "chrome", tmp_path / "trace.json", ALL)
    starts = [e["ts"] for e in chrome_trace.load(tmp_path / "trace.json") if e.get("cat") == "step"]
    assert max(starts) - min(starts) < 12 * 110_000


def test_tables_as_csv(recorded: Path, tmp_path: Path) -> None:
    told = export(Recording(recorded), "csv", tmp_path / "out", ALL)
    assert [line.rsplit(" ", 2)[1] for line in told] == ["24", "48", "2", "1", "1"]
    with (tmp_path / "out" / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    assert rows[2]["step"] == "1"
    figures = {name: float(rows[2][name]) for name in rows[2] if name.endswith("_ms")}
    assert figures == pytest.approx(
        {
            "step_ms": 100, "input_ms": 5, "forward_ms": 20, "backward_ms": 50, "exposed_comm_ms": 10,
            "optimizer_ms": 10, "other_ms": 5, "comm_ms": 40, "exposed_ms": 10, "late_ms": 0, "wait_ms": 2,
            "own_ms": 0.1,
        }
    )  # fmt: skip
    assert {file.name for file in (tmp_path / "out").iterdir()} == {f"{name}.csv" for name in TABLES}


def test_no_cell_is_a_formula(recorded: Path, tmp_path: Path) -> None:
    frames = ((m, at) for m, at in run_of())

    def hostile() -> object:
        for message, at in frames:
            if isinstance(message, Hello):
                message.host = "=HYPERLINK(1)"
            yield message, at

    export(Recording(record(tmp_path / "b.mcap", hostile())), "csv", tmp_path / "out", ALL)  # type: ignore[arg-type]
    assert "'=HYPERLINK" in (tmp_path / "out" / "ranks.csv").read_text()


def test_raw_frames(recorded: Path, tmp_path: Path) -> None:
    export(Recording(recorded), "ndjson", tmp_path / "frames.ndjson", selection_of("3:5", "1"))
    frames = [json.loads(line) for line in (tmp_path / "frames.ndjson").read_text().splitlines()]
    assert [(f["step"], f["rank"]) for f in frames if f["type"] == "step"] == [(3, 1), (4, 1)]
    assert [f["seq"] for f in frames] == list(range(1, len(frames) + 1))


def test_without_pyarrow_it_says_what_to_install(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DdpwatchError, match="pyarrow") as error:
        export(Recording(recorded), "parquet", tmp_path / "out", ALL)
    assert "ddpwatch[parquet]" in error.value.hint
    assert not (tmp_path / "out").exists()


def test_tables_as_parquet(recorded: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export(Recording(recorded), "parquet", tmp_path / "out", ALL)
    opened = open_recording(recorded)
    for name in TABLES:
        assert parquet.read_table(tmp_path / "out" / f"{name}.parquet").to_pydict() == opened.columns(name)


@pytest.mark.parametrize("form", ["chrome", "ndjson", "csv"])
def test_anonymous_exports_name_nobody(form: str, recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(Recording(recorded), form, out, ALL, anonymize=True)
    text = "".join(file.read_text() for file in out.iterdir()) if out.is_dir() else out.read_text()
    for secret in ("node", "train", "GPT", "home", "secret", "script", "img", "my_hook"):
        assert secret not in text.replace('"script":', "")
    assert word("host", "node0") in text
    if form != "csv":
        assert word("param", HOSTILE) in text
    if form != "csv":
        assert "RuntimeError" in text


def test_the_key_changes_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    before = word("host", "node0")
    assert word("host", "node0") == before
    monkeypatch.setenv("DDPWATCH_ANONYMIZE_KEY", "s3cret")
    assert word("host", "node0") != before


def test_what_cannot_be_exported(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'xls' is not a format"):
        export(Recording(recorded), "xls", tmp_path / "out", ALL)
    with pytest.raises(UsageError, match="No such file or directory"):
        export(Recording(recorded), "chrome", tmp_path / "missing" / "out", ALL)
    with pytest.raises(UsageError, match="nothing of what was selected") as error:
        export(Recording(recorded), "csv", tmp_path / "out", Selection(ranks=frozenset({7})))
    assert error.value.hint == "it holds the steps 0 to 11 of the ranks 0 to 1"
    assert not (tmp_path / "out").exists()


# -- the library ---------------------------------------------------------------------------------------------


def test_typed_rows_and_columns(recorded: Path) -> None:
    opened = open_recording(recorded, steps="2:")
    rows = list(opened.steps())
    assert [(row.step, row.rank) for row in rows] == [(n, r) for n in range(2, 12) for r in (0, 1)]
    assert rows[1].late_ms == pytest.approx(2)
    assert rows[1].overlap == pytest.approx((18 + 8) / (18 + 18))
    columns = opened.columns("steps")
    assert columns["step_ms"] == [row.step_ms for row in rows]
    buckets = list(opened.buckets())
    assert [(b.bucket, b.nbytes, b.late_ms, b.transfer_ms) for b in buckets[2:4]] == [
        (0, 1000, pytest.approx(2), pytest.approx(18)),
        (1, 2000, pytest.approx(2), pytest.approx(18)),
    ]
    assert [(row.rank, row.end, row.steps) for row in opened.ranks()] == [(0, "finished", 10), (1, "exception", 10)]
    assert [mark.name for mark in open_recording(recorded).marks()] == ["checkpoint /home/me"]
    assert open_recording(recorded).metrics()["steps"]["count"] == 12
    assert opened.step_range == (0, 11)
    assert len(opened.layouts()) == 2


def test_rows_agree_with_the_report(recorded: Path) -> None:
    opened = open_recording(recorded)
    report = opened.metrics()
    one = [row for row in opened.steps() if row.rank == 1 and row.status == "ok"]
    assert report["ranks"][1]["overlap_p50"] == sorted(row.overlap for row in one)[len(one) // 2]  # type: ignore[type-var]
    assert report["ranks"][1]["late_ms_p50"] == pytest.approx(2)


def test_selected_ranks_are_complete_steps(recorded: Path) -> None:
    rows = list(open_recording(recorded, ranks="1").steps())
    assert [row.rank for row in rows] == [1] * 12
    assert {row.late_ms for row in rows} == {None}


def test_an_unknown_table(recorded: Path) -> None:
    with pytest.raises(UsageError, match="no table 'cells'"):
        open_recording(recorded).columns("cells")


def test_frames_are_messages(recorded: Path) -> None:
    assert sum(isinstance(message, Step) for message, _ in open_recording(recorded).frames()) == 24
