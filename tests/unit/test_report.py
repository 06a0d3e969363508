"""What a report says first: where the time went, and who cost it. In every format, and as an exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from ddpwatch import open_recording
from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.analysis.diagnosis.incident import End, Evidence, StackGroup
from ddpwatch.analysis.diagnosis.incident_json import AccountFigures, IncidentFigures, LostFigures
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.figures import Finding, Report
from ddpwatch.cli import app
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.export.writers import export
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import compare_recordings, report_of
from ddpwatch.report.compare_text import render_compare
from ddpwatch.report.headline import exposed_sentence
from ddpwatch.report.incidents import MOST_INCIDENTS, facts, fail_if, parse_kinds
from ddpwatch.report.lost import MOST_ROWS, account_table, bar, lost_sentence
from ddpwatch.report.markdown import render_markdown
from ddpwatch.report.tables import rank_table
from ddpwatch.report.text import WIDTH, chosen_sentence, render_report
from ddpwatch.wire.messages import Bye, Hello, Mark, Message, Span, Step
from tests.support import chrome_trace
from tests.support.frames import bare
from tests.support.runs import MS, record, run_of

ROOT = Path(__file__).parents[2]
LATE_MS = 15
STEPS = 60


def late(ranks: int = 2, steps: int = STEPS) -> Iterator[tuple[Message, int]]:
    """The last bucket of the last rank is launched 15 ms late in each step: its backward takes longer."""
    for message, at in run_of(ranks, steps):
        if isinstance(message, Step):
            own = LATE_MS if message.rank == ranks - 1 else 0
            ends = [(5, 25), (25, 75 + own), (75 + own, 96), (97, 107)]
            spans = [replace(old, start=a * MS, end=b * MS) for old, (a, b) in zip(message.spans, ends, strict=True)]
            message = replace(
                message, duration_ns=107 * MS, spans=spans, comm_ready=[38 * MS, (60 + own) * MS],
                comm_launch=[40 * MS, (65 + own) * MS], comm_done=[60 * MS, 95 * MS],
            )  # fmt: skip
        elif isinstance(message, Bye):
            message = replace(message, reason="finished", detail="")
        yield message, at


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("late") / "late.mcap", late())


@pytest.fixture(scope="module")
def report(recording: Path) -> Report:
    return report_of(recording)


def row(kind: str = "straggler", severity: str = "warning", **changes: Any) -> IncidentFigures:
    about = {
        "kind": kind, "severity": severity, "ranks": [1], "phase": "backward", "param": None, "module": None,
        "bucket": None, "device": None, "since_step": 3, "until_step": 9, "steps": 7, "period": None, "seconds": 1.5,
        "share": 0.02, "gain": None, "open": False, "message": f"rank 1: {kind}", "evidence": Evidence(),
        "occurrences": 1, "next_step": f"look at {kind}",
    }  # fmt: skip
    return IncidentFigures(**{**about, **changes})


def lost(report: Report, *accounts: tuple[Any, int | None, str | None, float], ranks: int = 8) -> Report:
    """A report with these accounts, of 100 rank-seconds."""
    rows = [AccountFigures(name, rank, phase, 100 * share, share) for name, rank, phase, share in accounts]
    wasted = sum(share for name, _, _, share in accounts if name not in ("compute", "startup", "other"))
    return replace(report, ranks=[report.ranks[0]] * ranks, lost=LostFigures(100.0, wasted, 1.0, rows))


def test_the_first_sentence_says_where_the_time_went(report: Report) -> None:
    found = lost(
        report, ("compute", None, "backward", 0.858), ("waiting", 5, "backward", 0.079),
        ("transfer", None, "exposed_comm", 0.031), ("input", None, "data", 0.022), ("pause", None, "checkpoint", 0.01),
        ("jitter", None, "exposed_comm", 0.0001),
    )  # fmt: skip
    incidents = [row(ranks=[5], phase="backward", param="h.7")]
    found = replace(found, lost=replace(found.lost, rank_seconds=8 * 32 * 60), incidents=incidents)
    assert lost_sentence(found) == (
        "14.2 % of 8 ranks × 32 min lost: 7.9 % waiting for rank 5 (backward, from h.7 on), 3.1 % exposed transfer, "
        "2.2 % input, 1.0 % checkpoints"
    )
    assert lost_sentence(found) in render_report(found)
    assert "14.2 % of 8 ranks" in render_markdown(found)


def restarted(previous: str) -> Iterator[tuple[Message, int]]:
    """The run after that, 10 s later."""
    for message, at in run_of():
        named = replace(message, run_id="train-2", previous=previous) if isinstance(message, Hello) else message
        yield named, at + 10_000 * MS


def test_goodput_is_of_all_runs_of_the_job(tmp_path: Path) -> None:
    """A run takes 1.54 s: 11 steps of 100 ms, one for the warm-up, gaps, a start and an end."""
    record(tmp_path / "run.mcap", run_of())
    record(tmp_path / "other.mcap", run_of(), run_id="train-0")
    second = record(tmp_path / "run.1.mcap", restarted("train-1"), run_id="train-2")
    found = report_of(second, price=3600).goodput
    assert found is not None
    assert (found.runs, found.missing) == (["train-1", "train-2"], None)
    assert found.seconds["between_runs"] == pytest.approx(2 * (10 - 1.54))
    assert found.seconds["steps"] == pytest.approx(2 * 2 * 1.1)
    assert found.seconds["startup"] == pytest.approx(2 * 2 * 0.11)
    assert found.rank_seconds == pytest.approx(2 * 11.54) == pytest.approx(sum(found.seconds.values()))
    assert found.ratio == pytest.approx(1.1 / 5.77)
    assert (found.cost, found.lost_cost) == (pytest.approx(found.rank_seconds), pytest.approx(3600 * found.lost_hours))
    text = render_report(report_of(second, price=3600))
    assert "goodput: 19.1 % of 23.1 process-seconds in 2 runs are steps, with what is lost in them; the rest (" in text
    assert "(process-seconds): 0.44 start-up, 16.9 between runs, " in text  # beside accounts, which have another whole
    assert "; cost: 23.1, " in text
    (tmp_path / "run.mcap").unlink()
    alone = report_of(second)
    assert "the run before, train-1, is not here" in render_markdown(alone)
    assert alone.goodput is not None
    assert (alone.goodput.runs, alone.goodput.cost) == (["train-2"], None)
    assert report_of(second, Selection(first=3)).goodput is None


def test_of_many_hosts_the_text_has_the_number(report: Report) -> None:
    def first_line(hosts: list[str]) -> str:
        return render_report(replace(report, run=replace(report.run, hosts=hosts))).partition("\n")[0]

    assert "node1, node2)" in first_line(["node1", "node2"])
    assert "node7" not in (line := first_line([f"node{number}" for number in range(128)]))
    assert ", 128 hosts)" in line


def test_nothing_lost_and_nothing_known(report: Report) -> None:
    assert lost_sentence(lost(report, ("compute", None, "forward", 1.0), ranks=1)) == "no loss seen in 1 rank × 100 s"
    died = lost(report, ("waiting", 1, "between", 1.0), ranks=2)  # in rank 1, before the first step
    died = replace(died, ranks=[replace(row, steps=0) for row in died.ranks])
    assert lost_sentence(died).startswith("100.0 % of 2 ranks × 50 s lost")
    unknown = replace(report, lost=LostFigures(0.0, None, None, []))
    assert lost_sentence(unknown) == ""
    assert "lost:" not in render_report(unknown) + render_markdown(unknown)


def test_the_bar_has_every_part_by_its_share(report: Report) -> None:
    accounts = lost(
        report, ("compute", None, "backward", 0.4), ("compute", None, "forward", 0.1), ("waiting", 1, "backward", 0.2),
        ("jitter", None, "exposed_comm", 0.1), ("pause", None, "gc", 0.1), ("startup", None, None, 0.1),
    ).lost  # fmt: skip
    cells, legend = bar(accounts, 20)
    assert cells == "█" * 10 + "▓" * 6 + "▚" * 2 + "·" * 2
    assert legend == "█ compute 50.0 %  ▓ waiting 30.0 %  ▚ pauses 10.0 %  · other 10.0 %"


def test_a_cost_that_lost_time_leaves_out_is_said_to_be_so(report: Report) -> None:
    """All ranks slower cost 31.6 % of all ranks' time, in a run that had lost 21.4 %."""
    slower = row("slow_device", "info", ranks=())
    assert "of all ranks' time, with slower compute, which is no lost time · " in facts(slower, report)


def test_many_accounts_are_added_up(report: Report) -> None:
    accounts = [("waiting", rank, "backward", 0.01) for rank in range(100)]
    rows = account_table(lost(report, *accounts)).rows
    assert len(rows) == MOST_ROWS + 1
    assert rows[-1] == ["84 more", "84.0", "84.0 %"]


def test_a_late_rank_is_the_incident_and_the_account(report: Report) -> None:
    (found,) = [incident for incident in report.incidents if incident.kind == "straggler"]
    waiting = [account for account in report.lost.accounts if account.account == "waiting"]
    assert [(account.rank, account.phase) for account in waiting] == [(1, found.phase)]
    assert waiting[0].seconds == pytest.approx(found.seconds)
    assert sum(account.seconds for account in report.lost.accounts) == pytest.approx(report.lost.rank_seconds)
    line = next(line for line in render_report(report).splitlines() if line.startswith("[warning] straggler: rank 1"))
    for part in (found.message, "process-seconds, ", " of all ranks' time", "a step would be ", "ongoing at the end"):
        assert part in line
    assert found.message in render_markdown(report).replace("\\", "")


def test_an_incident_is_a_line_and_what_it_cannot_hold_is_indented(report: Report) -> None:
    stuck = StackGroup([1], "t.py:7 in f", "", ["/a/t.py:7 in f", "/a/t.py:90 in main"])
    hang = row(
        "hang", "error", device="host a: 31 % of CPU time stolen",
        evidence=Evidence(call_sites={1: "t.py:7 in f"}, stacks=[stuck], no_stack={2: "it is silent"}),
    )  # fmt: skip
    text = render_report(replace(report, incidents=[hang, row(period=4, since_step=5, until_step=5)])).splitlines()
    cost = "1.50 process-seconds, 2.0 % of all ranks' time, as the others waited"
    own = "; the time of rank 1 is lost, too"
    first = text.index(f"[error] hang: rank 1: hang · steps 3–9 · {cost}{own} · over")
    assert text[first + 1 : first + 7] == [
        "    cause: host a: 31 % of CPU time stolen",
        "    rank 1 holds up the others at t.py:7 in f",
        "    rank 1, innermost call first:",
        "      /a/t.py:7 in f",
        "      /a/t.py:90 in main",
        "    rank 2: no stack, it is silent",
    ]
    assert text[first + 7] == "    next: look at hang"
    assert text[first + 8].startswith("[warning] straggler: rank 1: straggler · step 5 · every 4th step · ")


def test_only_the_worst_incidents_are_listed(report: Report) -> None:
    many = replace(report, incidents=[row()] * (MOST_INCIDENTS + 3))
    assert render_report(many).count("rank 1: straggler") == MOST_INCIDENTS
    assert "… 3 more" in render_report(many)
    assert "… 3 more" in render_markdown(many)
    trifles = [row("pause", severity, share=0.0001) for severity in ("info", "info", "warning")]
    for incidents, ends in (
        (trifles, "… 2 more, of no cost worth a figure"),
        ([*many.incidents, *trifles], "… 4 more; 2 of no cost worth a figure"),
    ):
        text = render_report(replace(report, incidents=incidents))
        assert ends in text
        assert "[info] pause" not in text


def test_the_verdict_has_a_next_step_unless_an_incident_says_it(report: Report) -> None:
    for step, is_said in (("look at straggler", False), ("give it workers", True), ("", False)):
        shown = replace(report, incidents=[row()], verdict=replace(report.verdict, next_step=step))
        assert render_report(shown).count(f"next: {step}") == 1 if step else render_report(shown).count("next: ") == 1
        assert (f"Next: {step}" in render_markdown(shown)) is is_said


def test_notes_are_what_is_no_incident(report: Report) -> None:
    assert "Notes" not in render_report(report)
    noted = replace(report, notes=[Finding("cut_tail", "info", None, None, "the recording was cut off", {})])
    assert "Notes\n[info] the recording was cut off" in render_report(noted)
    assert "### Notes\n\n- **info**: the recording was cut off" in render_markdown(noted)


def test_tables_fit_a_terminal_of_80_columns(report: Report) -> None:
    """Of 105, the exposed communication of a rank came below the next one's number."""
    lines = render_report(report).splitlines()
    for title in ("Ranks", "Collectives of DDP's buckets"):
        at = next(at for at, line in enumerate(lines) if line.startswith(title))
        table = list(takewhile(bool, lines[at + 1 :]))
        assert max(map(len, table)) <= WIDTH, table
        assert "exposed" in table[0]
    assert "messages" not in "".join(lines[at - 8 : at])  # of which none was lost


def test_what_does_not_fit_when_folded_goes_below_its_row(report: Report) -> None:
    """A table with a place was 88 wide, one with a rank's end 158, and titles 91."""
    end = End("exception", "ValueError: a batch is too long", None, 11, "backward", [], 0)
    place = {"kind": "call", "name": "utils.py:114 average_parameters", "use": "all_reduce", "role": "dp"}
    called = replace(report.collectives[0], **place)
    first, *others = report.ranks
    ended = replace(report, ranks=[replace(first, end=end), *others], collectives=[*report.collectives, called])
    text = render_report(ended)
    lines = text[text.index("\nThe mean step") :].splitlines()
    assert max(map(len, lines)) <= WIDTH
    at = next(at for at, line in enumerate(lines) if line.startswith("    end: raised ValueError: a batch is too long"))
    assert lines[at - 1].split()[0] == "0"
    assert "    place: utils.py:114 average_parameters" in lines


def test_the_kinds_of_steps_add_up_in_the_head(report: Report) -> None:
    """800 steps, and a step 799 as the last one: 24 were of no kind."""
    head = render_report(report).splitlines()[1]
    whole, *kinds = map(int, re.findall(r"(\d+)(?= steps,| [a-z])", head.replace("numbered from 0", "")))
    assert whole == report.steps.count == sum(kinds), head
    assert " steps, numbered from 0 (" in head
    assert f" {report.steps.full} timed in full, " in head


def test_a_detail_that_the_overhead_is_above_says_what_it_leaves_out(report: Report) -> None:
    """It was an overhead of 1.87 % above "as many steps as watching for 1 % of a step allows"."""
    said = chosen_sentence(replace(report, cost=replace(report.cost, budget=0.01)))
    full = f"{report.steps.full} of {report.steps.averaged} steps were timed in full"
    so = f"ddpwatch's hooks may cost 1 % of a step, so {full} (--detail changes that); "
    assert said.startswith(f"detail normal: {so}")
    assert said.endswith("what sending and collecting cost comes on top")


def test_a_long_message_does_not_widen_the_table_of_ranks(report: Report) -> None:
    """Its incident has all of it; where the rank was stays in the table."""
    end = End("exception", "ValueError: " + "a batch is too long; " * 20, None, 11, "backward", [], 0)
    (row,) = rank_table(replace(report, ranks=[replace(report.ranks[0], end=end)])).rows
    assert row[-1].startswith("raised ValueError: a batch is too long; a batch")
    assert row[-1].endswith("… at step 11 in backward")
    assert len(row[-1]) < 110


def test_where_the_rest_of_a_step_lies(report: Report, tmp_path: Path) -> None:
    def quiet() -> Iterator[tuple[Message, int]]:
        for message, at in run_of(2, 20):
            if isinstance(message, Step):
                spans = [Span("forward", 5 * MS, 25 * MS), Span("backward", 25 * MS, 60 * MS)]
                buckets = ("comm_module", "comm_label", "comm_bytes", "comm_ready", "comm_launch", "comm_done")
                spans.append(Span("optimizer", 97 * MS, 107 * MS))
                message = replace(message, duration_ns=107 * MS, spans=spans, **{column: [] for column in buckets})
            yield message, at

    found = report_of(record(tmp_path / "run.mcap", quiet()))
    (note,) = [note for note in found.notes or () if note.kind == "rest"]
    assert note.message.startswith("the rest is 35 % of the mean step: 100 % of it lies between the backward and the ")
    assert not report.rest_after


def test_where_the_rest_of_steps_that_are_not_watched_lies_is_not_known(tmp_path: Path) -> None:
    """Every fourth step pauses for a second, unwatched. Of one watched step, a quarter lies after the backward."""

    def pausing() -> Iterator[tuple[Message, int]]:
        for message, at in run_of(2, 40):
            if isinstance(message, Step):
                long = message.step > 8 and message.step % 4 == 0
                ns = message.start_ns + max(0, (message.step - 9) // 4) * 1000 * MS
                message = replace(message, start_ns=ns)
                if message.step == 7:
                    message = replace(message, duration_ns=message.duration_ns + 30 * MS)
                if long:
                    message = replace(bare(message.rank, message.step), start_ns=ns, duration_ns=1107 * MS)
            yield message, at

    found = report_of(record(tmp_path / "run.mcap", pausing()))
    rest = found.phases_ms["other"]
    assert rest is not None
    assert rest > 100
    assert 0 < sum(found.rest_after.values()) * rest < 10
    assert not [note for note in found.notes or () if note.kind == "rest"]


def test_without_the_ends_of_all_collectives_waits_are_told(report: Report) -> None:
    unmeasured = replace(report, steps=replace(report.steps, full=0))
    told = exposed_sentence(replace(unmeasured, phases_ms={**report.phases_ms, "exposed_comm": 12.0}))
    assert told == "waits for collectives 12.0 ms; overlap –: when some of them ended is not known"


def run(*arguments: object) -> tuple[int, str]:
    """The command's exit code, as `ddpwatch.cli.main` would exit, and its output."""
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if isinstance(done.exception, DdpwatchError):
        return done.exception.exit_code, done.stdout + str(done.exception)
    return done.exit_code, done.stdout


def test_fail_on_is_an_exit_code(recording: Path, report: Report) -> None:
    message = report.incidents[0].message
    code, output = run(recording, "--fail-on", "hang,straggler")
    assert code == 1
    assert output.endswith(f"straggler: {message}")
    assert run(recording, "--fail-on", "any")[0] == 1
    assert run(recording, "--fail-on", "hang,death")[0] == 0
    code, output = run(recording, "--fail-on", "hung")
    assert (code, all(kind in output for kind in KINDS)) == (2, True)
    code, output = run(recording, "--json", "--fail-on", "straggler")
    assert code == 1
    printed = json.JSONDecoder().raw_decode(output)[0]
    assert printed["incidents"] == json.loads(json.dumps(report.as_json()["incidents"]))


def test_the_example_in_the_documentation(recording: Path, tmp_path: Path) -> None:
    """The last line of it, in a shell, on a recording with a late rank and on one without: it ends the script."""
    section = (ROOT / "docs" / "recordings.md").read_text().partition("`--fail-on` makes incidents")[2]
    line = section.split("```")[1].strip().splitlines()[-1]
    assert line.startswith("ddpwatch report run.mcap --fail-on straggler")
    command = tmp_path / "ddpwatch"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ddpwatch "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    for file, code in ((recording, 1), (record(tmp_path / "calm.mcap", run_of(2, 30)), 0)):
        (tmp_path / "run.mcap").unlink(missing_ok=True)
        (tmp_path / "run.mcap").symlink_to(file)
        done = subprocess.run(
            ["sh", "-c", f"{line}\necho went on"],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "went on" in done.stdout) == (code, code == 0)


def test_what_is_only_worth_knowing_is_no_error(report: Report) -> None:
    for kinds in ("any", " pause, hang"):
        fail_if(replace(report, incidents=[row("pause", "info")]), parse_kinds(kinds))
        with pytest.raises(DdpwatchError, match="pause: rank 1: pause"):
            fail_if(replace(report, incidents=[row("pause", "warning")]), parse_kinds(kinds))
    fail_if(replace(report, incidents=[row("pause", "warning")]), frozenset())


def test_a_slow_host_replaces_incidents_of_its_ranks(report: Report) -> None:
    with pytest.raises(DdpwatchError, match="slow_host: rank 1: slow_host"):
        fail_if(replace(report, incidents=[row("slow_host", "warning")]), parse_kinds("slow_input"))
    fail_if(replace(report, incidents=[row("straggler", "warning")]), parse_kinds("slow_host"))


@pytest.mark.parametrize("text", ["", ",", "hang;death", "Hang"])
def test_what_is_no_kind(text: str) -> None:
    with pytest.raises(UsageError, match="not a kind of incident"):
        parse_kinds(text)


def test_the_library_says_what_the_report_says(recording: Path, report: Report) -> None:
    opened = open_recording(recording)
    assert opened.incidents() == report.as_json()["incidents"]
    assert opened.lost() == report.lost.as_json()
    table = opened.columns("incidents")
    assert table["message"] == [incident.message for incident in report.incidents]
    assert table["ranks"] == [" ".join(map(str, incident.ranks)) for incident in report.incidents]


def test_a_comparison_names_what_only_one_run_has(recording: Path, tmp_path: Path) -> None:
    three = record(tmp_path / "three.mcap", late(ranks=3))
    result = compare_recordings([recording, three])
    (found,) = result.differences
    assert [run.incidents for run in result.runs] == [report_of(path).incidents for path in (recording, three)]
    stragglers = [(row.run, row.ranks) for row in found.incidents if row.kind == "straggler"]
    assert sorted(stragglers) == [("late", [1]), ("three", [2])]
    changes = {(row.account, row.rank): row for row in found.lost}
    assert changes["waiting", 1].b == 0
    assert changes["waiting", 1].change == -changes["waiting", 1].a < 0
    text = render_compare(result)
    assert "only three: [warning] straggler: rank 2" in text
    assert "  waiting for rank 1 (" in text
    same = compare_recordings([recording, recording]).differences[0]
    assert same.incidents == []
    assert {row.change for row in same.lost} == {0}


def test_a_trace_has_a_slice_for_each_incident(recording: Path, report: Report, tmp_path: Path) -> None:
    export(Recording(recording), "chrome", tmp_path / "trace.json", Selection())
    chrome_trace.check(tmp_path / "trace.json", recording)
    events = chrome_trace.load(tmp_path / "trace.json")
    slices = {event["name"]: event for event in events if event.get("cat") == "incident"}
    assert slices.keys() == {incident.message for incident in report.incidents}
    starts = {event["name"]: event["ts"] for event in events if event.get("cat") == "step"}
    for incident in report.incidents:
        drawn = slices[incident.message]
        assert drawn["ts"] == starts[f"step {incident.since_step}"]
        assert drawn["ts"] + drawn["dur"] == starts[f"step {incident.until_step}"] + 107_000


def test_an_attachment_knows_why_a_step_was_long() -> None:
    """A checkpoint of 900 ms before step 40, of which the mark comes with the steps."""
    closing = AttachmentBuilder()
    for message, _ in run_of(ranks=2, steps=80):
        if isinstance(message, Step) and message.step >= 40:
            message = replace(message, start_ns=message.start_ns + 900 * MS)
        if isinstance(message, Step) and message.step == 40:
            start_ns = message.start_ns - 900 * MS
            closing.apply_message(
                Mark(rank=message.rank, kind="save", name="c", start_ns=start_ns, end_ns=start_ns + 890 * MS)
            )
        closing.apply_message(message)
    found = json.loads(closing.documents()["incidents.json"])
    paused = [incident for incident in found["incidents"] if incident["phase"] == "checkpoint"]
    assert [(incident["kind"], incident["since_step"]) for incident in paused] == [("pause", 40)]
    checkpoints = [account for account in found["lost"]["accounts"] if account["phase"] == "checkpoint"]
    assert checkpoints[0]["seconds"] == pytest.approx(2 * 0.89)
