"""Recordings for other tools: every figure the same, every name in its place, nothing that executes."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from ddpwatch import open_recording
from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.export.anonymize import anonymous, word
from ddpwatch.export.chrome_trace import align, write_chrome
from ddpwatch.export.tables import TABLES, step_rows, throughput_rows
from ddpwatch.export.writers import FORMATS, export, format_for
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection, selection_of
from ddpwatch.report.files import write_html
from ddpwatch.wire.messages import (
    MESSAGE_TYPES,
    Beat,
    Bye,
    ClockExchange,
    Device,
    Group,
    Hello,
    Layout,
    Mark,
    Message,
    Status,
    Step,
    Trained,
)
from ddpwatch.wire.transport import Envelope
from tests.support import chrome_trace
from tests.support.frames import bare, beat
from tests.support.runs import BEGIN, HOSTILE, MS, hello_of, record, run_of, step_of

ALL = Selection()


@pytest.mark.parametrize(
    ("name", "form"), [("a", "chrome"), ("a.json", "chrome"), ("a.ndjson", "ndjson"), ("a.JSONL", "ndjson")]
)
def test_the_output_s_name_gives_its_format(name: str, form: str, tmp_path: Path) -> None:
    assert format_for(tmp_path / name) == form


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_name_of_one_table_is_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{form} is a directory of tables") as refused:
        format_for(tmp_path / f"x.{form}")
    assert refused.value.hint == f"give --format {form} -o {tmp_path / 'x'}"


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


def test_a_bucket_is_divided_into_its_wait_and_its_transfer(tmp_path: Path) -> None:
    """Bucket 1 is launched at 65, 67 and 69 ms, and is done at 85: rank 0 waits 4 ms for rank 2."""
    recorded = record(tmp_path / "run.mcap", run_of(ranks=3, steps=1))
    export(Recording(recorded), "chrome", tmp_path / "trace.json", ALL)
    chrome_trace.check(tmp_path / "trace.json", recorded)
    events = chrome_trace.load(tmp_path / "trace.json")
    spans = {e["pid"]: e for e in events if e.get("cat") == "communication" and e["name"] == "bucket 1"}
    named = ("last_rank", "wait_ms", "transfer_ms")
    assert [[spans[rank]["args"][name] for name in named] for rank in range(3)] == [[2, 4, 16], [2, 2, 16], [2, 0, 16]]
    lane = spans[0]["tid"]
    inside = [(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") in ("wait", "transfer") and e["pid"] == 0]
    assert inside[-2:] == [("waiting for rank 2", 65_000, 4_000), ("transfer", 69_000, 16_000)]
    assert {e["tid"] for e in events if e.get("cat") in ("wait", "transfer") and e["pid"] == 0} == {lane}
    assert [e["name"] for e in events if e.get("cat") in ("wait", "transfer") and e["pid"] == 2] == ["transfer"] * 2


def test_on_clocks_that_cannot_be_compared_nothing_is_a_wait(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run.mcap", run_of(ranks=2, steps=1, boots=("a", "b")))
    export(Recording(recorded), "chrome", tmp_path / "trace.json", ALL)
    events = chrome_trace.load(tmp_path / "trace.json")
    assert not [e for e in events if e.get("cat") in ("wait", "transfer")]
    assert {e["args"]["wait_ms"] for e in events if e.get("cat") == "communication"} == {None}


@given(st.integers(0, 10**15), st.lists(st.integers(1, 10**9), min_size=2, max_size=2))
@example(546_870_464_308, [1_000, 68_192_107_114])
def test_perfetto_reads_every_time_to_the_nanosecond(start: int, lengths: list[int]) -> None:
    """It cuts off fractions. A transfer that seems to end 1 ns after its bucket would be dropped."""
    wait, transfer = lengths
    one = step_of(0, 0)
    at = [start, start + wait]
    ranks = [
        replace(one, rank=rank, comm_launch=[40 * MS, at[rank]], comm_done=[60 * MS, start + wait + transfer])
        for rank in range(2)
    ]
    frames = [(message, Envelope(0, BEGIN, b"")) for message in (hello_of(0, 2), hello_of(1, 2), *ranks)]
    out = io.BytesIO()
    write_chrome(frames, align(frames), out)
    events = json.loads(out.getvalue())["traceEvents"]
    chrome_trace.check_durations(events, ranks)
    chrome_trace.check_nesting(events)
    chrome_trace.check_waits(events)


def test_clocks_of_two_hosts_are_aligned(tmp_path: Path) -> None:
    """7 s apart; the shared collectives leave a bracket of 34 ms, and its middle is at most 2 ms off here."""
    recorded = record(tmp_path / "run.mcap", run_of(ranks=2, boots=("a", "b")))
    offsets = align(Recording(recorded)).offsets
    assert offsets[0] == 0
    assert abs(offsets[1] + 7_000 * MS) <= 2 * MS
    export(Recording(recorded), "chrome", tmp_path / "trace.json", ALL)
    starts = [e["ts"] for e in chrome_trace.load(tmp_path / "trace.json") if e.get("cat") == "step"]
    assert max(starts) - min(starts) < 12 * 110_000


def test_the_trace_follows_a_clock_that_drifts() -> None:
    """By 150 ppm, in a minute by 9 ms: without following it, steps of the two hosts would drift apart."""
    frames = []
    for message, _ in run_of(steps=550, boots=("a", "b")):
        if isinstance(message, Step) and message.rank == 1:
            message.start_ns += message.start_ns * 150 // 10**6
        frames.append((message, Envelope(0, BEGIN, b"")))
    out = io.BytesIO()
    write_chrome(frames, align(frames), out)
    starts: dict[str, list[float]] = {}
    for event in json.loads(out.getvalue())["traceEvents"]:
        if event.get("cat") == "step":
            starts.setdefault(event["name"], []).append(event["ts"])
    apart = [abs(a - b) / 1000 for a, b in starts.values()]
    assert max(apart[50:]) - min(apart[50:]) < 4


def test_an_end_is_on_the_clock_of_the_host_that_noticed_it() -> None:
    """Rank 1's clock is 7 s ahead; its own host's agent says when it was killed."""
    at = 12 * 110 * MS
    kill = Bye(rank=1, by="collector", reason="killed", at_ns=at + 7_000 * MS)
    ran = [message for message, _ in run_of(steps=12, boots=("a", "b")) if not isinstance(message, Bye)]
    frames = [(message, Envelope(0, BEGIN, b"")) for message in (*ran, kill)]
    out = io.BytesIO()
    write_chrome(frames, align(frames), out)
    (end,) = [event for event in json.loads(out.getvalue())["traceEvents"] if event.get("cat") == "end"]
    assert end["ts"] == pytest.approx(at / 1000, abs=4_000)


def test_parameters_have_the_names_of_their_own_group() -> None:
    """As with pipeline stages: each calls its module 0, and has other layers."""
    ran: list[Message] = [hello_of(0, 2), hello_of(1, 2)]
    for rank in (0, 1):
        ran.append(Group(rank=rank, id=100 + rank, ranks=[rank]))
        ran.append(Layout(rank=rank, group=100 + rank, params=[f"{rank}.{n}" for n in "abc"], buckets=[]))
    ran += [replace(step_of(rank, 0), comm_group=[100 + rank] * 2) for rank in (0, 1)]
    frames = [(message, Envelope(0, BEGIN, b"")) for message in ran]
    out = io.BytesIO()
    write_chrome(frames, align(frames), out)
    hooks = [event for event in json.loads(out.getvalue())["traceEvents"] if event.get("cat") == "hook"]
    assert {event["name"] for event in hooks if event["pid"] == 0} == {"0.a", "0.b", "0.c"}
    assert {event["name"] for event in hooks if event["pid"] == 1} == {"1.a", "1.b", "1.c"}


def test_any_number_of_buckets_is_in_flight(tmp_path: Path) -> None:
    """Forty at once, of which only those that fit into no other lane get a lane of their own."""

    def crowded(step: Step) -> Step:
        n = 40
        return replace(
            step, comm_module=[0] * n, comm_label=list(range(n)), comm_bytes=[1000] * n, comm_ready=[None] * n,
            comm_launch=[(40 + i) * MS for i in range(n)], comm_done=[(80 + i) * MS for i in range(n)],
        )  # fmt: skip

    frames = ((crowded(m) if isinstance(m, Step) and m.step == 2 else m, at) for m, at in run_of(steps=4))
    recorded = record(tmp_path / "run.mcap", frames)
    export(Recording(recorded), "chrome", tmp_path / "trace.json", ALL)
    chrome_trace.check(tmp_path / "trace.json", recorded)
    communication = ["communication", *(f"communication {n}" for n in range(2, 41))]
    names = chrome_trace.lane_names(chrome_trace.load(tmp_path / "trace.json"), rank=0)
    assert names == ["step", "compute", "hooks", *communication]


SPANS = st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 30)), max_size=30)


@given(SPANS)
def test_marks_nest_whatever_their_times(spans: list[tuple[int, int]]) -> None:
    marks = [Mark(rank=0, name="m", start_ns=start * MS, end_ns=(start + ms) * MS) for start, ms in spans]
    messages: list[Message] = [hello_of(0, 1), *marks, step_of(0, 0)]
    frames = [(message, Envelope(0, BEGIN, b"")) for message in messages]
    out = io.BytesIO()
    write_chrome(frames, align(frames), out)
    events = json.loads(out.getvalue())["traceEvents"]
    chrome_trace.check_nesting(events)
    assert sorted(e["dur"] for e in events if e.get("cat") == "mark,user") == sorted(1000.0 * ms for _, ms in spans)
    assert not spans or "marks" in chrome_trace.lane_names(events, rank=0)


def test_a_trace_of_some_steps_begins_and_ends_with_them(tmp_path: Path) -> None:
    """Steps 30 and 31 go from 3300 to 3510 ms."""

    def marked() -> Iterator[tuple[Message, int]]:
        yield from run_of(steps=60)
        spans = {
            "before": (1000, 2000),
            "over": (3000, 3400),
            "in": (3400, 3450),
            "out": (3500, 9000),
            "after": (4000, 4001),
        }
        for name, (start, end) in spans.items():
            yield Mark(rank=0, name=name, start_ns=start * MS, end_ns=end * MS), BEGIN
        for at in (3299, 3300, 3510, 3511):
            yield Mark(rank=1, name=f"at {at}", start_ns=at * MS), BEGIN

    recorded = record(tmp_path / "run.mcap", marked())
    export(Recording(recorded), "chrome", tmp_path / "trace.json", selection_of("30:32", None))
    events = chrome_trace.load(tmp_path / "trace.json")
    marks = {e["name"]: (e["ts"], e.get("dur")) for e in events if e.get("cat") == "mark,user"}
    assert marks == {
        "over": (0, 100_000), "in": (100_000, 50_000), "out": (200_000, 10_000), "at 3300": (0, None),
        "at 3510": (210_000, None),
    }  # fmt: skip
    assert not [e for e in events if e.get("cat") == "end"]
    assert min(e["ts"] for e in events if "ts" in e) == 0
    assert max(e["ts"] for e in events if "ts" in e) == 210_000
    export(Recording(recorded), "chrome", tmp_path / "trace.json", selection_of(None, "0"))
    assert [e["name"] for e in chrome_trace.load(tmp_path / "trace.json") if e.get("cat") == "end"] == ["finished"]


def test_a_rank_without_an_introduction_has_a_name(tmp_path: Path) -> None:
    recorded = record(tmp_path / "run.mcap", ((m, at) for m, at in run_of() if not isinstance(m, Hello)))
    export(Recording(recorded), "chrome", tmp_path / "trace.json", ALL)
    named = [e for e in chrome_trace.load(tmp_path / "trace.json") if e["name"] == "process_name"]
    assert {e["pid"]: e["args"]["name"] for e in named if e["pid"] < 2} == {0: "rank 0", 1: "rank 1"}
    assert len({e["pid"] for e in named}) == len(named)


def test_tables_as_csv(recorded: Path, tmp_path: Path) -> None:
    written = export(Recording(recorded), "csv", tmp_path / "out", ALL)
    assert [line.rsplit(" ", 2)[1] for line in written] == ["24", "48", "2", "1", "1", "2", "0"]
    with (tmp_path / "out" / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    assert rows[2]["step"] == "1"
    figures = {name: float(rows[2][name]) for name in rows[2] if name.endswith("_ms")}
    assert figures == pytest.approx(
        {
            "step_ms": 100, "data_ms": 3, "between_ms": 2, "forward_ms": 20, "backward_ms": 50, "exposed_comm_ms": 10,
            "optimizer_ms": 10, "other_ms": 5, "comm_ms": 40, "exposed_ms": 10, "late_ms": 0, "wait_ms": 2,
            "own_ms": 0.1,
        }
    )  # fmt: skip
    assert {file.name for file in (tmp_path / "out").iterdir()} == {f"{name}.csv" for name in TABLES}


def test_throughput_is_of_the_steps_between_two_counts() -> None:
    """Before the first count, and where a step is missing, nothing is known."""
    messages: list[Message] = []
    for number in range(30):
        for rank in (0, 1):
            if number % 8 == 0:  # rank 1 counts too late
                counted = Trained(max(0, number - 2 * rank), samples=4 * number, tokens=50 * number if rank else None)
                messages.append(beat(rank, number, trained=counted))
            if (rank, number) != (0, 19):
                messages.append(step_of(rank, number))
    found = list(throughput_rows((message, Envelope(1, BEGIN, b"")) for message in messages))
    assert [(row.rank, row.since_step, row.until_step, row.samples) for row in found if not row.rank] == [
        (0, 0, 8, 32), (0, 8, 16, 32), (0, 16, 24, 32),
    ]  # fmt: skip
    assert [row.samples_s for row in found if not row.rank] == pytest.approx([40, 40, None])
    late = [row for row in found if row.rank]
    assert [(row.since_step, row.until_step, row.tokens) for row in late] == [(0, 6, 400), (6, 14, 400), (14, 22, 400)]
    assert [row.tokens_s for row in late] == pytest.approx([400 / 0.6, 500, 500])


def test_what_a_bare_step_did_is_unknown() -> None:
    across = StepAcrossRanks(1)
    across.add_step(bare(0, 1))
    (row,) = step_rows(across)
    known = {"step", "rank", "status", "start_ns", "step_ms", "own_ms", "dropped"}
    assert {name for name, value in asdict(row).items() if value is not None} == known


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


def test_a_ping_keeps_both_of_its_times_among_raw_frames(tmp_path: Path) -> None:
    times = {"sent_ns": 1, "received_ns": 2, "replied_ns": 3, "returned_ns": 4}
    ping = ClockExchange(node=1, node_boot_id="a", root_boot_id="b", **times)
    source = record(tmp_path / "a.mcap", iter([*run_of(steps=2), (ping, BEGIN + 7)]))
    export(Recording(source), "ndjson", tmp_path / "frames.ndjson", ALL)
    frames = [json.loads(line) for line in (tmp_path / "frames.ndjson").read_text().splitlines()]
    (found,) = [frame for frame in frames if frame["type"] == "clock_exchange"]
    assert (found["received_ns"], found["root_received_ns"]) == (BEGIN + 7, 2)


def test_without_pyarrow_it_says_what_to_install(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DdpwatchError, match="pyarrow") as error:
        export(Recording(recorded), "parquet", tmp_path / "out", ALL)
    assert "ddpwatch[parquet]" in error.value.hint
    assert not (tmp_path / "out").exists()


def test_tables_as_parquet(recorded: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")  # not on every version of Python
    export(Recording(recorded), "parquet", tmp_path / "out", ALL)
    opened = open_recording(recorded)
    for name in TABLES:
        assert parquet.read_table(tmp_path / "out" / f"{name}.parquet").to_pydict() == opened.columns(name)


def test_what_parquet_cannot_hold_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    three = {name: [0] * 3 for name in ("comm_module", "comm_label", "comm_ready", "comm_launch", "comm_done")}
    huge = replace(step_of(0, 1), **three, comm_bytes=[(1 << 62) - 1] * 3)
    messages: list[Message] = [hello_of(0, 1), huge]
    recorded = record(tmp_path / "run.mcap", iter([(message, BEGIN) for message in messages]))
    with pytest.raises(UsageError, match=r"steps\.parquet: a figure needs more than 64 bits") as error:
        export(Recording(recorded), "parquet", tmp_path / "out", ALL)
    assert error.value.hint == "export to csv instead"
    export(Recording(recorded), "csv", tmp_path / "out", ALL)
    assert str(3 * ((1 << 62) - 1)) in (tmp_path / "out" / "steps.csv").read_text()


@pytest.mark.parametrize("how", ["itself", "symlink", "hard link", "another part"])
@pytest.mark.parametrize("form", [*FORMATS, "html"])
def test_a_recording_is_never_written_over(form: str, how: str, recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    out = folder / f"steps.{form}"
    source = recorded if how != "itself" else recorded.rename(out)
    if how == "symlink":
        out.symlink_to(source)
    elif how == "hard link":
        out.hardlink_to(source)
    elif how == "another part":
        record(out)
    before = out.read_bytes()

    def write() -> None:
        if form == "html":
            write_html(source, out, ALL)
        else:
            export(Recording(source), form, folder if form in ("csv", "parquet") else out, ALL)

    with pytest.raises(UsageError, match="is a recording, and would be overwritten") as error:
        write()
    assert error.value.exit_code == 2
    assert out.read_bytes() == before
    assert list(folder.iterdir()) == [out]


def filled(kind: inspect.Type, text: str) -> Any:
    """A value of the type, with the text wherever any text may stand."""
    if isinstance(kind, inspect.StructType):
        return kind.cls(**{field.name: filled(field.type, text) for field in kind.fields})
    if isinstance(kind, inspect.UnionType):
        return filled(next((k for k in kind.types if isinstance(k, inspect.StrType)), kind.types[0]), text)
    if isinstance(kind, inspect.ListType):
        return [filled(kind.item_type, text)]
    if isinstance(kind, inspect.TupleType):
        return tuple(filled(item, text) for item in kind.item_types)
    if isinstance(kind, inspect.DictType):
        return {filled(kind.key_type, text): filled(kind.value_type, text)}
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    plain: dict[type, object] = {
        inspect.StrType: text, inspect.IntType: 1, inspect.FloatType: 1.0, inspect.BoolType: True,
        inspect.BytesType: b"",
    }  # fmt: skip
    return plain[type(kind)]


def exported(source: Path, form: str, out: Path, anonymize: bool) -> str:
    """Everything that an export writes."""
    parquet = pytest.importorskip("pyarrow.parquet") if form == "parquet" else None
    export(Recording(source), form, out, ALL, anonymize)
    if parquet is not None:
        return "".join(str(parquet.read_table(file).to_pydict()) for file in sorted(out.iterdir()))
    return "".join(file.read_text() for file in (sorted(out.iterdir()) if out.is_dir() else [out]))


TEXTS = [
    "SECRET", "lab.SECRET.FooError: SECRET", "SECRETError", "SECRET.SECRETError: 1", "KeyError: SECRET",
    "SIGKILL SECRET", "SIGSECRET", "forward\nSECRET", "gloo,SECRET", "2.13.0+SECRET", "cpu SECRET", "host (SECRET)",
    "16 CPUs SECRET", "multipart SECRET", "static_graph SECRET",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_text_passes_unless_it_is_known(form: str, text: str, tmp_path: Path) -> None:
    """In every field of every message that takes free text, those added later included."""
    messages = [filled(inspect.type_info(kind), text) for kind in MESSAGE_TYPES.values()]
    source = record(tmp_path / "run.mcap", iter([(message, BEGIN) for message in messages]))
    assert "SECRET" in exported(source, form, tmp_path / "open", anonymize=False)
    assert "SECRET" not in exported(source, form, tmp_path / "hidden", anonymize=True)


def test_what_is_known_passes() -> None:
    """GPUs' product names too: without them, figures of several machines could not be distinguished."""
    hello = replace(
        hello_of(0, 1), pid=0, run_id="", host="", boot_id="", module="", script="", device_kind="cuda",
        device_name="NVIDIA H100 80GB HBM3", backend="cpu:gloo,cuda:nccl", torch="2.13.0.dev20261101+cu128",
        timing_source="cuda events (launch only)", ddp={"static_graph": True, "bucket_cap_mb": 25.0},
    )  # fmt: skip
    bye = Bye(rank=0, by="collector", reason="killed", detail="SIGKILL", at_ns=1, phase="backward")
    known: list[Message] = [
        hello, bye, replace(bye, detail="OutOfMemoryError"), Beat(rank=0, at_ns=1, step=1, phase="between", since_ns=1),
        Device(host="", kind="cpu", at_ns=1, name="16 CPUs"), step_of(0, 1),
        Status(at_ns=1, frames=1, bytes=1, refused={"not a rank's to send": 1, "foreign clock": 2, "unknown key": 3}),
    ]  # fmt: skip
    assert [anonymous(message) for message in known] == known
    assert anonymous(replace(bye, detail="torch.OutOfMemoryError: /home/me")) == replace(bye, detail="OutOfMemoryError")
    assert anonymous(replace(bye, detail="lab.LabError: x")) == replace(bye, detail=word("error", "LabError"))


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
    with pytest.raises(UsageError, match="none of the selected steps and ranks") as error:
        export(Recording(recorded), "csv", tmp_path / "out", Selection(ranks=frozenset({7})))
    assert error.value.hint == "it has the steps 0 to 11 of the ranks 0 to 1"
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
    buckets = list(opened.collectives())
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
