"""One word, one value, whatever says it: of a recording, and of a live run beside what it has recorded.

``pytest -s`` prints a table of each.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from ddpwatch import open_recording
from ddpwatch.analysis.figures import Report
from ddpwatch.common.text import table as aligned
from ddpwatch.errors import DdpwatchError
from ddpwatch.metrics.figures import Meter
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import compare_recordings, report_of
from ddpwatch.report.compare_text import render_compare
from ddpwatch.report.files import write_html
from ddpwatch.report.markdown import render_markdown
from ddpwatch.report.text import render_report
from ddpwatch.run import rundir
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import AttachSpec, ReplaySpec
from ddpwatch.viewer.plain import line
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Bye, Mark, Message
from tests.support.dashboards import Clock, ended_recording, screen_text, until
from tests.support.frames import EPOCH_NS, MS, START_NS, STEP_MS, bare, beat, hello, step
from tests.support.jobs import ROOT, Job
from tests.support.runs import record
from tests.tui.test_same_figures import NUMBER, below, uneven_run

pytestmark = pytest.mark.same_everywhere

STEPS = 45  # fewer than a live view's figures are of
LATE = ("--model", "mlp:width=64", "--data", "digits", "--inject", "slow-backward:ms=20,rank=1", "--steps", str(STEPS))
# Times are ms per step, "lost" and what begins with it percent of the run
WORDS = ("step", "exposed", "waiting", "transfer", "overlap", "lost", "lost waiting", "lost transfer")
OUTPUTS = (  # and which words each has
    ("header", {"step", "exposed", "overlap"}), ("accounts on screen", {"lost", "lost waiting", "lost transfer"}),
    ("phases on screen", {"exposed"}), ("plain line", {"step", "exposed", "overlap"}),
    ("metrics", {"step", "exposed", "overlap", "lost", "lost waiting", "lost transfer"}),
    ("report", {*WORDS}), ("phases", {"exposed"}), ("accounts", {"lost waiting", "lost transfer"}),
    ("Markdown", {*WORDS}), ("HTML", {*WORDS}), ("JSON", {*WORDS}), ("library", {*WORDS}),
    ("compare", {"step", "exposed", "waiting", "transfer", "overlap", "lost"}),
)  # fmt: skip
Said = dict[str, str]


@pytest.mark.parametrize("live", [False, True], ids=["recording", "live"])
@pytest.mark.seconds(15)
async def test_each_word_has_one_value(live: bool, run_directory: Path, tmp_path: Path) -> None:
    """A viewer that was there from the start ends with what the report of the recording says; so does a replay."""
    file, clock = tmp_path / "run.mcap", Clock()
    if live:
        job = Job(ROOT / "demo" / "train.py", *LATE, "--record", str(file), log=tmp_path / "log")
        app = DashboardApp(AttachSpec(list_ended=rundir.last_views), ticking=False)
    else:
        ended_recording(file, uneven_run())
        job = nullcontext()
        app = DashboardApp(ReplaySpec("run.mcap", Recording(file), 1.0, clock), clock=clock, ticking=False)
    async with app.run_test(size=(200, 60)) as pilot:
        with job:
            if live:
                await until(pilot, lambda: app.session.state.frames)
                assert job.wait() == 0, job.output()
            await until(pilot, lambda: app.session.state.frames)
            await pilot.press("full_stop")
            await until(pilot, lambda: app.session.over and (live or app.session.whole.ready))
            await until(pilot, lambda: not live or is_complete(file))
        screen, state = screen_text(app), app.session.state
    report = report_of(file)
    said = {**of_screen(screen), **of_state(state), **of_report(report), **of_files(file, tmp_path, report)}
    print("", *table_of(said), sep="\n")
    check(said)
    verdict = app.session.overview.verdict
    live_verdict = verdict.with_others()
    assert live_verdict == report.verdict.text
    assert live_verdict in render_report(report)
    assert live_verdict in line(state, state.diagnosis.incidents())
    assert " ".join(verdict.text.split()) in " ".join(screen.split())  # others where there is room


def is_complete(file: Path) -> bool:
    """Whether the recording has the run's end: a collector with viewers writes it after that of the job."""
    try:
        return any(isinstance(message, Bye) and message.rank is None for message, _ in Recording(file))
    except DdpwatchError:
        return False


def table_of(said: dict[str, Said]) -> list[str]:
    return aligned(["output", *WORDS], [[name, *(row.get(word, "") for word in WORDS)] for name, row in said.items()])


def check(said: dict[str, Said]) -> None:
    """Checks that every output gives its words to the last digit shown: rounded, or so that the parts add up."""
    values = {word: float(text) for word, text in said["JSON"].items()}
    assert [(name, {*row}) for name, row in said.items()] == [*OUTPUTS]
    for name, row in said.items():
        for word, text in row.items():
            unit = 10 ** -len(text.partition(".")[2])
            part = 1.0 if word in ("waiting", "transfer") or "lost " in word or name == "phases on screen" else 0.5
            assert abs(float(text) - values[word]) <= part * unit + 0.001, (name, word, text, values[word])
        if {"exposed", "waiting", "transfer"} <= {*row}:
            parts = round(float(row["waiting"]) + float(row["transfer"]), 3)
            assert parts == pytest.approx(float(row["exposed"]), abs=0.0011 if "." in row["exposed"][:-2] else 1e-9)


# -- what is no step -----------------------------------------------------------------------------------------


def stopping_run() -> Iterator[tuple[Message, int]]:
    """All stop for 3 s while nothing is timed, rank 1 collects garbage for 300 ms, and at last it hangs for 20 s."""
    now = 0

    def at(message: Message, ms: int) -> tuple[Message, int]:
        return message, EPOCH_NS + ms * MS

    yield from (at(hello(rank), 0) for rank in range(2))
    for number in range(60):
        ranks, collected = [step(rank, number) for rank in range(2)], 300 * (number == 50)
        if collected:
            since = START_NS + (now + 40) * MS
            yield at(Mark(rank=1, kind="gc", name="gc", start_ns=since, end_ns=since + collected * MS), now + 400)
            ranks = [step(0, number, wait_ms=collected), step(1, number, late_ms=collected)]
        stopped = 3000 if number == 40 else 0
        for rank, moment in product(range(2), range(500, stopped, 500)):
            since = START_NS + now * MS
            beaten = beat(rank, number, "input", at_ns=since + moment * MS, since_ns=since)
            yield at(beaten, now + moment)
        if stopped:
            ranks = [bare(rank, number) for rank in range(2)]
        took = STEP_MS + collected + stopped
        for one in ranks:
            one.start_ns, one.duration_ns = START_NS + now * MS, took * MS
            yield at(one, now + took)
        now += took
    for moment, rank in product(range(0, 20_000, 500), range(2)):
        about = {"at_ns": START_NS + (now + moment) * MS, "since_ns": START_NS + now * MS, "issued": 120 - rank}
        yield at(beat(rank, 60, "backward" if rank else "sync", **about), now + moment)


def test_what_is_no_step_has_one_word_and_adds_up(tmp_path: Path) -> None:
    """A hang was 95 % hangs, 47 % pauses and 47 % waiting for rank 1 (backward); a stall of all a gap, and a pause."""
    text = render_report(report := report_of(record(tmp_path / "run.mcap", stopping_run())))
    goodput = next(line for line in text.splitlines() if line.startswith("goodput"))
    whole = searched(
        goodput, pauses=r"\(process-seconds\): N pauses with waits for them", hangs="N hangs and deaths with waits for"
    )
    rows = re.findall(rf"^ *(\S.*?) +{NUMBER} +{NUMBER} %$", text.partition("Where the time went")[2], re.MULTILINE)
    spent = {name: (float(seconds), float(share)) for name, seconds, share in rows}
    pauses = ("garbage collection", "waiting for rank 1 (gc)", "pauses")
    hangs = ("hangs", "waiting for rank 1 (hang)")
    for part, names in (("pauses", pauses), ("hangs", hangs)):
        assert float(whole[part]) == pytest.approx(sum(spent[name][0] for name in names), abs=0.12), (part, text)
        own = sum(share for name, (_, share) in spent.items() if name in names and not name.startswith("waiting"))
        assert f" {part} {own:.1f} %" in text  # in the bar
    hang = next(row for row in report.incidents if row.kind == "hang")
    assert spent["waiting for rank 1 (hang)"] == (
        pytest.approx(hang.seconds, abs=0.06),
        pytest.approx(100 * hang.share, abs=0.06),
    )
    assert spent["pauses"][0] == pytest.approx(2 * 3, rel=0.02)
    # `ddpwatch ls` has both, and said twice as much as the incident
    assert (
        f" {100 * hang.share:.1f} % of all ranks' time, as the others waited; the time of rank 1 is lost, too" in text
    )


# -- what outputs say ----------------------------------------------------------------------------------------


def searched(text: str, **patterns: str) -> Said:
    """Returns the first match of each pattern; an underscore in a word stands for a space."""
    found: Said = {}
    for word, pattern in patterns.items():
        match = re.search(pattern.replace("N", NUMBER), text)
        assert match, f"{word} is not in:\n{text}"
        found[word.replace("_", " ")] = match[1]
    return found


def of_screen(text: str) -> dict[str, Said]:
    phases = [line.split() for line in below(text, "where a step goes, ms", 7)]
    exposed = [float(cells[5]) for cells in phases if len(cells) == 8 and cells[0].isdigit()]
    return {
        "header": searched(text, step="step N ms", exposed="exposed N ", overlap="overlap N %"),
        "accounts on screen": {**searched(text, lost=r"N % of \d+ ranks ×"), **accounts_in(text)},
        "phases on screen": {"exposed": f"{fmean(exposed):.1f}"},  # of each rank
    }


def of_state(state: RunState) -> dict[str, Said]:
    """Returns the figures of the last plain line and of the metrics."""
    plain = line(state, state.diagnosis.incidents())
    values = Meter().read(state)
    lost = {sample.labels[0]: sample.value for sample in values["rank_time"]}
    ms = {
        name: 1e3 * values[metric][0].value for name, metric in (("step", "step"), ("exposed", "exposed_communication"))
    }
    shares = {"overlap": values["overlap"][0].value, "lost": values["lost_time"][0].value}
    shares |= {"lost waiting": (lost.get("waiting", 0.0) + lost.get("jitter", 0.0)) / sum(lost.values())}
    shares |= {"lost transfer": lost.get("transfer", 0.0) / sum(lost.values())}
    return {
        "plain line": searched(plain, step=r"^ *\d+ +[\d.]+ +N", overlap=r" N % +[\d.]+", exposed=r" % +N"),
        "metrics": {word: f"{value:.3f}" for word, value in ms.items()}
        | {word: f"{100 * value:.3f}" for word, value in shares.items()},
    }


def of_report(report: Report) -> dict[str, Said]:
    text = render_report(report)
    head, accounts, phases = re.split("Where the time went|The mean step", text)
    parts = {"waiting": r"\(N waiting", "transfer": r"\+ N transfer"}
    bar = {"lost_waiting": "▓ waiting N %", "lost_transfer": "▒ transfer N %"}
    shown = {"step": "\nstep N ms", "exposed": "exposed communication N ", "overlap": "overlap N ", **parts, **bar}
    rows = re.findall(rf"(waiting for|exposed transfer).* {NUMBER} %$", accounts, re.MULTILINE)
    assert summed((share, name) for name, share in rows) == accounts_in(head)
    return {
        "report": searched(head, lost=r"N % of \d+ ranks ×", **shown),
        "phases": {"exposed": searched(phases, exposed=" exposed +N ")["exposed"]},
        "accounts": summed((share, name) for name, share in rows),
        "Markdown": of_markdown(render_markdown(report).replace("\\", ""), {**parts, **bar}),
    }


def of_markdown(text: str, patterns: dict[str, str]) -> Said:
    shown = {"step": "- step N ms", "exposed": "exposed communication N ", "overlap": "overlap N ", **patterns}
    return searched(text, lost=r"N % of \d+ ranks ×", **shown)


def accounts_in(text: str) -> Said:
    """Returns the shares lost to waiting and to transfer that a text lists."""
    return summed(re.findall(rf"{NUMBER} % +(waiting for|exposed transfer)", text))


def summed(shares: Iterable[tuple[str, str]]) -> Said:
    sums = {"waiting for": 0.0, "exposed transfer": 0.0}
    for share, name in shares:
        sums[name] += float(share)
    return {"lost waiting": f"{sums['waiting for']:.1f}", "lost transfer": f"{sums['exposed transfer']:.1f}"}


def of_files(file: Path, folder: Path, report: Report) -> dict[str, Said]:
    write_html(file, folder / "report.html", Selection())
    page = json.loads(re.search(r"const DATA = (\{.*\});\n", (folder / "report.html").read_text())[1])
    tiles = dict(page["tiles"])
    html = {word: re.match(NUMBER, tiles[word])[0] for word in WORDS[:5]}
    html |= searched(page["lost"]["sentence"], lost="N % of") | accounts_in(page["lost"]["sentence"])
    compared = render_compare(compare_recordings([file, file]))
    return {
        "HTML": html,
        "JSON": in_json(json.loads(json.dumps(report.as_json()))),
        "library": in_json(open_recording(file).metrics()),
        "compare": searched(
            compared, step=" step ms +N", exposed=" exposed +N", waiting="exposed: waiting +N", overlap="overlap +N %",
            transfer="exposed: transfer +N", lost="lost +N %",
        ),
    }  # fmt: skip


def in_json(report: dict[str, Any]) -> Said:
    overlap, lost = report["overlap"], report["lost"]
    shares: Counter[str] = Counter()
    for row in lost["accounts"]:
        shares[{"jitter": "waiting"}.get(row["account"], row["account"])] += 100 * row["share"]
    times = (report["steps"]["step_ms"], *(overlap[f"{word}_ms"] for word in WORDS[1:4]))
    ratios = (100 * overlap["ratio"], 100 * lost["lost_share"], shares["waiting"], shares["transfer"])
    return {word: f"{value:.3f}" for word, value in zip(WORDS, (*times, *ratios), strict=True)}
