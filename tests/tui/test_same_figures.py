"""The same numbers everywhere: one recording, every view, line, report and table. One name has one value."""

import csv
import json
import random
import re
from collections import defaultdict
from contextlib import asynccontextmanager
from statistics import fmean, median

import pytest
from typer.testing import CliRunner

from ddpwatch import open_recording
from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.account_names import phase_name
from ddpwatch.analysis.step import PHASES
from ddpwatch.cli import app as cli
from ddpwatch.export.writers import export
from ddpwatch.metrics.figures import Meter
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import compare_recordings, report_of
from ddpwatch.report.compare_text import render_compare
from ddpwatch.report.files import write_html
from ddpwatch.report.markdown import render_markdown
from ddpwatch.report.text import render_report
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import ReplaySpec
from ddpwatch.viewer.plain import replay_lines
from ddpwatch.viewer.state import RunState
from ddpwatch.whatif.command import answer, recorded_in
from ddpwatch.wire.messages import Span, Step
from tests.support.dashboards import Clock, ended_recording, screen_text, until
from tests.support.frames import MS, START_NS, bare, device, hello, layout
from tests.tui.test_replay import eventful

WORLD, STEPS = 3, 46
STARTING = 12  # steps that the means leave out
NUMBER = r"([\d.,–]+)"
ADD_UP = {"waiting", "transfer", *PHASES, *(f"{phase} share" for phase in PHASES)}


def uneven_step(rank, number, dice):
    """A step in which nothing takes the same time twice, so that means, medians and ratios all differ."""
    data, between, forward, backward, exposed, gap, optimizer = (
        int(dice.expovariate(1 / scale) * MS) + MS for scale in (4, 2, 20, 40, 30 + 10 * rank, 1, 3)
    )
    start = data + between + forward
    end = start + backward
    launch = [start + backward // 3, end - backward // 4]
    done = [start + backward // 2, end + exposed]
    full = number % 3 == 0
    return Step(
        rank=rank, step=number, epoch=2, status="warmup" if number == 0 else "ok" if full else "shadow",
        start_ns=START_NS, duration_ns=end + exposed + gap + optimizer, own_ns=200_000,
        data=[(0, data)], spans=[
            Span("forward", data + between, start), Span("backward", start, end), Span("sync", end, end + exposed),
            Span("optimizer", end + exposed + gap, end + exposed + gap + optimizer),
        ],
        comm_module=[0, 0], comm_label=[0, 1], comm_bytes=[1 << 20, 4 << 20], comm_ready=launch, comm_launch=launch,
        comm_done=done if full else [None, None],
    )  # fmt: skip


def together(ranks, start_ns):
    """All start and end at the same time: what a rank alone does between steps would be in its mean."""
    longest = max(step.duration_ns for step in ranks)
    for step in ranks:
        later = longest - step.duration_ns
        step.start_ns, step.duration_ns = start_ns, longest
        step.spans = [
            Span(s.phase, s.start + later, s.end + later) if s.phase == "optimizer" else s for s in step.spans
        ]
    return ranks


def uneven_run():
    dice = random.Random(7)
    for rank in range(WORLD):
        yield hello(rank, WORLD)
        yield layout(rank)
    for number in range(STEPS):
        ranks = [bare(r, number) if number % 8 == 7 else uneven_step(r, number, dice) for r in range(WORLD)]
        yield from together(ranks, START_NS + 400 * number * MS)
    yield device(1)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return ended_recording(tmp_path_factory.mktemp("walk") / "run.mcap", uneven_run())


@pytest.fixture(scope="module")
def rows(recording):
    return list(open_recording(recording).steps())


@pytest.fixture(scope="module")
def truth(rows, recording):
    """Every figure by its name, by the definitions of docs/metrics.md and from the table of steps alone."""
    ordinary = [row for row in rows if row.status in ("ok", "shadow", "unwatched")]
    counted = [row for row in ordinary if row.status != "unwatched"]
    found = {**estimated(ordinary), "steps": len({row.step for row in ordinary})}
    settled = [row for row in counted if row.step >= STARTING]
    every = known(settled)
    for rank in range(WORLD):
        found |= {f"{rank} {name}": value for name, value in of_rank(rank, ordinary, settled, every, found).items()}
        own = [row for row in counted if row.rank == rank]
        found |= {f"{rank} late": median(r.late_ms for r in own), f"{rank} wait": median(r.wait_ms for r in own)}
    steps = sorted(fmean(r.step_ms for r in ordinary if r.step == number) for number in {r.step for r in ordinary})
    found |= {"step p50": median(steps), "step p90": steps[int(0.9 * len(steps))]}
    full = [row for row in settled if row.status == "ok"]
    assert found["overlap"] != pytest.approx(fmean(row.overlap for row in full), rel=0.02)
    assert found["exposed"] != pytest.approx(fmean(row.exposed_ms for row in full), rel=0.02)
    assert found["step"] != pytest.approx(fmean(row.step_ms for row in counted), rel=0.001)
    return {**found, **exposed_truth(report_of(recording).as_json(), found)}


def known(rows):
    """Means over the rows that show a figure; in these jobs ranks wait exactly as long as communication is exposed."""
    watched, full = [r for r in rows if r.status != "unwatched"], [r for r in rows if r.status == "ok"]
    found = {name: fmean(getattr(row, f"{name}_ms") for row in watched) for name in ("step", *PHASES)}
    return {**found, "hidden": fmean(row.comm_ms - row.exposed_ms for row in full)}


def estimated(ordinary):
    """What holds for all steps: the first ones, and the others, each by what is known of some of them."""
    sums = defaultdict(float)
    for stratum in ([r for r in ordinary if r.step < STARTING], [r for r in ordinary if r.step >= STARTING]):
        means, step = known(stratum), fmean(row.step_ms for row in stratum)
        scale = (step - means["exposed_comm"]) / (means["step"] - means["exposed_comm"])
        for name, value in means.items():
            value = step if name == "step" else value if name in ("exposed_comm", "hidden") else value * scale
            sums[name] += value * len(stratum) / len(ordinary)
    return with_shares(sums)


def of_rank(rank, ordinary, settled, every, run):
    """Communication is as much more or less than the run's as known steps show; other phases share the rest."""
    own, step = (
        known([row for row in settled if row.rank == rank]),
        fmean(r.step_ms for r in ordinary if r.rank == rank),
    )
    exposed, hidden = (own[name] * run[name] / every[name] for name in ("exposed_comm", "hidden"))
    scale = (step - exposed) / (own["step"] - own["exposed_comm"])
    phases = {name: own[name] * scale for name in PHASES}
    return with_shares({**phases, "step": step, "exposed_comm": exposed, "hidden": hidden})


def with_shares(found):
    """Adds shares in percent."""
    found["exposed"], found["comm"] = found["exposed_comm"], found["exposed_comm"] + found["hidden"]
    found["overlap"] = 100 * found["hidden"] / found["comm"]
    found |= {f"{phase} share": 100 * found[phase] / found["step"] for phase in PHASES}
    return {**found, "exposed share": found["exposed_comm share"]}


def exposed_truth(report, found):
    """The two parts of what is exposed, as the accounts have them: these add up to it."""
    accounts = defaultdict(float)
    for row in report["lost"]["accounts"]:
        accounts[row["account"]] += 1e3 * row["seconds"] / (WORLD * found["steps"])
    waiting, transfer = accounts["waiting"] + accounts["jitter"], accounts["transfer"]
    assert waiting + transfer == pytest.approx(found["exposed"], rel=1e-6)
    assert min(waiting, transfer) > 0.05 * found["exposed"]
    return {"waiting": waiting, "transfer": transfer}


def agree(place, shown, truth, least, off=0.5):
    """Checks what a place shows, as (name, text), to the last digit; those that add up may be 1.0 off."""
    wrong = []
    for name, text in shown:
        digits = len(text.partition(".")[2])
        most = 1.0 if name in ADD_UP else off
        if abs(float(text.replace(",", "")) - truth[name]) > most * 10**-digits + 1e-9:
            wrong.append(f"{place}: {name} is {text}, not {truth[name]:.3f}")
    assert not wrong
    assert len(shown) >= least, f"{place}: only {len(shown)} figures found"


def searched(text, **patterns):
    """The first match of each pattern; an underscore in a name is a space."""
    found = []
    for name, pattern in patterns.items():
        match = re.search(pattern.replace("N", NUMBER), text)
        assert match, f"{name} is not in:\n{text}"
        found.append((name.replace("_", " ") if name not in PHASES else name, match[1]))
    return found


def per_rank(lines, names):
    """Of lines like ``0  running  12.0  3.0 %``: the last figures, by rank and name."""
    found = []
    for line in lines:
        rank, *cells = line.replace(" %", "").split()
        found += [(f"{rank} {name}", text) for name, text in zip(names, cells[-len(names) :], strict=True) if name]
    return found


def header(text):
    return searched(
        text, step="step N ms", overlap="overlap N %", exposed="exposed N ±", exposed_share=r"ms \(N % of step[,)]",
        steps="[0-9]+ of the newest N steps timed in full",
    )  # fmt: skip


TABLE = ("", "step", "late", "wait", "overlap", "exposed")


def below(text, heading, count):
    """The lines of a panel below its heading, cut to the panel."""
    lines = text.splitlines()
    y = next(i for i, line in enumerate(lines) if heading in line)
    x = lines[y].index(heading)
    return [line[max(x - 1, 0) :] for line in lines[y + 1 : y + 1 + count]]


async def test_every_view(recording, rows, truth):
    clock = Clock()
    app = DashboardApp(ReplaySpec("run.mcap", Recording(recording), 1.0, clock), clock=clock, ticking=False)
    report = report_of(recording).as_json()
    async with app.run_test(size=(200, 60)) as pilot:
        await until(pilot, lambda: app.session.state.frames)
        await pilot.press("full_stop")
        await until(pilot, lambda: app.session.over and app.session.whole.ready)
        text = screen_text(app)
        agree("header", header(text), truth, 4)
        ranks = [line for line in text.splitlines() if "node1 / " in line]
        agree("table", per_rank([re.sub(r"node1 / \d+ ", "", line) for line in ranks], TABLE), truth, 5 * WORLD)
        split = [line for line in below(text, "where a step goes, ms", 2 * WORLD + 1)[1:] if re.match(r"\s+\d ", line)]
        agree("split", per_rank(split, PHASES), truth, 7 * WORLD)
        lost = lost_truth(report)
        agree(
            "lost time", searched(text, lost=f"N % of {WORLD} ranks ×", transfer="N % exposed transfer"), lost, 2, 1.0
        )
        exposed = next(row for row in report["incidents"] if row["kind"] == "exposed_comm")
        assert f"{exposed['message']}; without it, a step would be {100 * exposed['gain']:.0f} % shorter" in text
        await pilot.press("4", "m")
        newest = max(row.step for row in rows if row.status == "ok" or row.status == "shadow")
        own = {f"{row.rank} step": row.step_ms for row in rows if row.step == newest}
        heat = [re.sub(r"[^\d.\s]", " ", line) for line in below(screen_text(app), "step time by rank", 30)]
        shown = {(f"{cells[0]} step", cells[-1]) for line in heat if len(cells := line.split()) == 2}
        agree("heatmap, newest step", sorted(shown), own, WORLD)
        await pilot.press("m", "enter")
        text = screen_text(app)
        line = searched(
            text, step="step N ms   late", late="late N ms   wait", wait="wait N ms   overlap",
            overlap="overlap N %   exposed", exposed=r"%   exposed N ms",
        )  # fmt: skip
        names = {"between": "gap", "exposed_comm": "exposed", "optimizer": "optim", "other": "rest"}
        phases = searched(text, **{phase: rf" {names.get(phase, phase)} N ms  " for phase in PHASES})
        rank = int(re.search(r"rank (\d) on node1", text)[1])
        agree("rank", [(f"{rank} {name}", value) for name, value in (*line, *phases)], truth, 12)
        await pilot.press("5")
        shares = searched(screen_text(app), exposed_share=r"exposed N %, rest")
        agree("devices", shares, truth, 1)
        await pilot.press("3")
        agree("buckets", buckets_on(screen_text(app)), bucket_truth(report), 12)
        await pilot.press("8")
        await until(pilot, lambda: app.views.whatif._model.answer and not app.view.pending)
        found = answer(recorded_in(recording)[0], []).as_json()
        agree("what if", changes_on(screen_text(app), found["scenarios"]), whatif_truth(found), 13)


async def test_timeline(recording, rows):
    """At the cursor it shows what the tables have of that step, rank and bucket."""
    opened = open_recording(recording)
    newest = max(row.step for row in rows if row.status == "ok")
    steps = {row.rank: row for row in rows if row.step == newest}
    buckets = {(row.rank, row.bucket): row for row in opened.collectives() if row.step == newest}
    truth = {f"{rank} backward": row.backward_ms for rank, row in steps.items()}
    for (rank, index), row in buckets.items():
        named = {"ready": row.ready_ms, "launch": row.launch_ms, "done": row.done_ms, "exposed": row.exposed_ms}
        truth |= {f"{rank} {index} {name}": value for name, value in {**named, "waited": row.wait_ms}.items()}
    clock, shown = Clock(), []
    app = DashboardApp(ReplaySpec("run.mcap", Recording(recording), 1.0, clock), clock=clock, ticking=False)
    async with app.run_test(size=(200, 60)) as pilot:
        await until(pilot, lambda: app.session.state.frames)
        await pilot.press("full_stop", "2")
        await until(pilot, lambda: app.session.over and re.search(rf"^ step {newest} ", screen_text(app), re.MULTILINE))
        for _ in range(WORLD):
            await pilot.press(*["shift+left"] * 20)
            for _ in range(20):
                shown += at_cursor(screen_text(app))
                await pilot.press("shift+right")
            await pilot.press("j")
    agree("timeline", sorted(set(shown)), truth, 6 * WORLD)


def at_cursor(text):
    """What the timeline says at its cursor of the backward and of the bucket in flight, by rank."""
    rank = re.search(r"rank (\d) at ", text)[1]
    found = [(f"{rank} backward", took) for took in re.findall(rf"backward [\d.–]+ ms \({NUMBER} ms\)", text)]
    if line := re.search(r"^ bucket (\d) .*", text, re.MULTILINE):
        names = ("ready", "launch", "done", "waited", "exposed")
        found += [(f"{rank} {line[1]} {name}", re.search(rf"{name} {NUMBER}", line[0])[1]) for name in names]
    return found


def changes_on(text, scenarios):
    shown = searched(text, measured="measured +N ", steps="what if: the newest N steps timed in full")
    for row in scenarios:
        name = re.escape(row["change"])
        signed = r"≤?([+−-]?[\d.]+)"
        line = re.search(rf"{name}(?: ◀)? +≥?{NUMBER} +{signed} +{signed} … {signed} +{signed} %", text)
        cells = [cell.replace("−", "-") for cell in line.groups()]
        keys = ("step_ms", "gain_ms", "gain_low_ms", "gain_high_ms", "gain")
        shown += [(f"{row['change']} {key}", cell) for key, cell in zip(keys, cells, strict=True)]
    return shown


def whatif_truth(found):
    named = {f"{row['change']} {key}": value for row in found["scenarios"] for key, value in row.items()}
    named |= {name: 100 * value for name, value in named.items() if name.endswith(" gain")}
    return {**named, "measured": found["replayed"]["measured_ms"], "steps": found["steps"]}


def buckets_on(text):
    names = ("ready", "launch", "done", "wait", "transfer", "exposed", "busbw")
    found = []
    for line in text.splitlines():
        if match := re.match(r"[\s▶]*(\d)\s+[\d.]+ MiB((?:\s+[\d.]+){7})", line):
            found += [(f"bucket {match[1]} {name}", cell) for name, cell in zip(names, match[2].split(), strict=True)]
    return [(name, cell) for name, cell in found if not name.endswith("wait")]  # in no report


def bucket_truth(report):
    names = {name: f"{name}_ms_p50" for name in ("ready", "launch", "done", "transfer", "exposed")}
    names["busbw"] = "busbw_gbps_p50"
    return {f"bucket {row['index']} {name}": row[key] for row in report["collectives"] for name, key in names.items()}


def test_plain_lines(recording, truth, capsys):
    replay_lines(Recording(recording))
    lines = capsys.readouterr().out.partition("\nincidents")[0].splitlines()
    _, _, step, overlap, _, exposed, *_ = lines[-1].split()
    exposed, full = exposed.partition("±")[0], lines[-1].split()[6]
    shown = [("step", step), ("overlap", overlap), ("exposed", exposed), ("steps", full.partition("/")[2])]
    agree("plain line", shown, truth, 4)


def test_json_and_library(recording, truth):
    report = report_of(recording).as_json()
    steps, overlap, phases = report["steps"], report["overlap"], report["phases_ms"]
    exact = {
        "steps": steps["averaged"], "step": steps["step_ms"], "step p50": steps["step_ms_p50"],
        "step p90": steps["step_ms_p90"], "overlap": 100 * overlap["ratio"], "comm": overlap["comm_ms"],
        "exposed": overlap["exposed_ms"], "waiting": overlap["waiting_ms"], "transfer": overlap["transfer_ms"],
        **phases,
    }  # fmt: skip
    for row in report["ranks"]:
        own = {"step": row["step_ms"], "overlap": 100 * row["overlap"], "exposed": row["exposed_ms"]}
        own |= {"late": row["late_ms_p50"], "wait": row["wait_ms_p50"]}
        exact |= {f"{row['rank']} {name}": value for name, value in own.items()}
    assert exact == pytest.approx({name: truth[name] for name in exact}, rel=1e-6)  # accounts are in whole ns
    assert overlap["waiting_ms"] + overlap["transfer_ms"] == pytest.approx(overlap["exposed_ms"], rel=1e-12)
    assert overlap["unsplit_ms"] == 0
    assert sum(phases.values()) == pytest.approx(steps["step_ms"], rel=1e-12)
    assert phases["exposed_comm"] == overlap["exposed_ms"] <= overlap["comm_ms"]
    assert fmean(row["exposed_ms"] for row in report["ranks"]) == pytest.approx(overlap["exposed_ms"], rel=1e-12)
    closing = AttachmentBuilder()
    for message, _ in open_recording(recording).frames():
        closing.apply_message(message)
    attached = json.loads(closing.documents()["findings.json"])
    assert attached["overlap"] == pytest.approx(overlap)
    assert [finding["message"] for finding in attached["findings"]] == [f["message"] for f in report["findings"]]


def test_metrics(recording, truth):
    """What Prometheus gets is in seconds and ratios."""
    state = RunState()
    for message, envelope in open_recording(recording).frames():
        state.apply_message(message, envelope.received_ns)
    values = Meter().read(state)
    (step,), (exposed,), (comm,), (overlap,) = (
        values[name] for name in ("step", "exposed_communication", "communication", "overlap")
    )
    found = {"step": 1e3 * step.value, "exposed": 1e3 * exposed.value, "comm": 1e3 * comm.value}
    found |= {"overlap": 100 * overlap.value, **{s.labels[0]: 1e3 * s.value for s in values["phase"]}}
    found |= {f"{sample.labels[0]} late": 1e3 * sample.value for sample in values["late"]}
    assert found == pytest.approx({name: truth[name] for name in found})
    lost = report_of(recording).as_json()["lost"]
    assert values["lost_time"][0].value == pytest.approx(lost["lost_share"])
    assert sum(sample.value for sample in values["rank_time"]) == pytest.approx(lost["rank_seconds"])
    busbw = {f"bucket {s.labels[1]} busbw": s.value / 1e9 for s in values["bus_bandwidth"]}
    assert busbw == pytest.approx({name: bucket_truth(report_of(recording).as_json())[name] for name in busbw})


def test_reports(recording, truth, tmp_path):
    report = report_of(recording)
    text, markdown = render_report(report), re.sub(r"[|*\\\\]", "", render_markdown(report))
    shown = searched(
        text, step_p50="p50 N ms", step_p90="p90 N ms", step="\nstep N ms", overlap="overlap N ±",
        comm="% of N ms", exposed="exposed communication N ±", waiting=r"ms \(N waiting", transfer=r"\+ N transfer",
        steps="mean of all N steps",
    )  # fmt: skip
    agree("text", [*shown, *in_both(text)], truth, 23)
    assert_adds_up(text)
    shown = searched(
        markdown, step="- step N ms", step_p50="p50 N ms", step_p90="p90 N ms", overlap="overlap N ±",
        exposed="exposed communication N ±", waiting=r"ms \(N waiting", transfer=r"\+ N transfer",
    )  # fmt: skip
    agree("Markdown", [*shown, *in_both(markdown)], truth, 21)
    assert_adds_up(markdown)
    for name, page in (("text", text), ("Markdown", markdown)):
        lines = [line for line in page.splitlines() if re.match(r" *\d +node1 ", line)]
        columns = ("step", "late", "wait", "overlap", "exposed", "")
        agree(f"ranks of the {name}", per_rank(lines, columns), truth, 5 * WORLD)


def assert_adds_up(text):
    """To the last digit: waiting and transfer, the phases and their shares, and what was lost."""
    exposed, waiting, transfer = (
        float(value)
        for value in re.search(rf"communication {NUMBER} ±.*?\({NUMBER} waiting \+ {NUMBER} tr", text).groups()
    )
    assert round(waiting + transfer, 1) == exposed
    phases = dict(in_both(text))
    assert phases["exposed_comm"] == f"{exposed:.1f}"
    step = float(re.search(rf"step {NUMBER} ms", text)[1])
    assert round(sum(float(phases[phase]) for phase in PHASES), 1) == step
    assert sum(int(phases[f"{phase} share"]) for phase in PHASES) == 100
    lost, parts = re.search(rf"{NUMBER} % of {WORLD} ranks × [\d.]+ s lost: (.*)", text).groups()
    assert round(sum(float(part) for part in re.findall(r"([\d.]+) % ", parts)), 1) == float(lost)


def in_both(text):
    """The table of phases."""
    found = []
    for phase in PHASES:
        ms, share = re.search(
            rf"{phase_name(phase)} +{NUMBER} +{NUMBER} %", text[text.index("The mean step") :]
        ).groups()
        found += [(phase, ms), (f"{phase} share", share)]
    return found


SHOWN = {phase_name(phase): phase for phase in PHASES}
LABELS = {"communication": "comm"}


def test_labels_of_the_html(recording, truth, tmp_path):
    """Each label of its script has the figure of that name beside it."""
    write_html(recording, tmp_path / "report.html", Selection())
    page, report = (tmp_path / "report.html").read_text(), report_of(recording).as_json()
    assert json.loads(re.search(r"const DATA = (\{.*\});\n", page)[1])["report"] == json.loads(json.dumps(report))
    data = json.loads(re.search(r"const DATA = (\{.*\});\n", page)[1])
    shown = [(LABELS.get(name, name), re.match(NUMBER, text)[0]) for name, text in data["tiles"] if " of " not in text]
    agree("tiles", shown[1:], truth, 8)
    assert shown[0] == ("steps", str(STEPS))
    _, header, rows = data["ranks"]
    named = [re.sub(r" ms$", "", name) for name in header]
    cells = [(f"{row[0]} {name}", cell) for row in rows for name, cell in zip(named, row, strict=True)]
    ranks = [(name, cell.removesuffix(" %")) for name, cell in cells if name in truth]
    agree("ranks of the page", ranks, truth, 5 * WORLD)
    ((_, header, rows),) = data["collectives"]
    named = [re.sub(r" (ms|GB/s)$", "", name) for name in header]
    cells = [(f"bucket {row[0]} {name}", cell) for row in rows for name, cell in zip(named, row, strict=True)]
    truths = bucket_truth(report)
    buckets = [(name, cell) for name, cell in cells if name in truths]
    agree("buckets of the page", buckets, truths, 12)
    agree("phases of the page", [(SHOWN[name], ms) for name, ms, _ in data["phases"]], truth, 7)


def test_single_steps(recording, rows, tmp_path):
    """A view of one step shows that step's own figures."""
    own = {(row.step, row.rank): row for row in rows}
    write_html(recording, tmp_path / "report.html", Selection())
    data = json.loads(re.search(r"const DATA = (\{.*\});\n", (tmp_path / "report.html").read_text())[1])
    for step in data["steps"]:
        for found in step["ranks"]:
            row = own[step["step"], found["rank"]]
            assert found["ns"] / MS == row.step_ms
            assert (found["exposed_ns"] or 0) / MS == pytest.approx(row.exposed_ms or 0)
    by_step = defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    for point in data["points"]:
        assert point["step_ms"] == pytest.approx(fmean(row.step_ms for row in by_step[point["step"]]))
        if point["exposed_ms"] is not None:
            exposed, comm = (fmean(getattr(r, f"{n}_ms") for r in by_step[point["step"]]) for n in ("exposed", "comm"))
            assert point["exposed_ms"] == pytest.approx(exposed)
            assert point["overlap"] == pytest.approx(1 - exposed / comm)
    export(Recording(recording), "chrome", tmp_path / "trace.json", Selection())
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event.get("cat") == "step" and event["args"]["phases_ms"]:
            row = own[int(event["name"].split()[1]), event["pid"]]
            assert event["args"]["phases_ms"] == pytest.approx({phase: getattr(row, f"{phase}_ms") for phase in PHASES})
    export(Recording(recording), "csv", tmp_path / "tables", Selection())
    with (tmp_path / "tables" / "steps.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            row = own[int(line["step"]), int(line["rank"])]
            assert line["exposed_ms"] == ("" if row.exposed_ms is None else str(row.exposed_ms))


def lost_truth(report):
    found = defaultdict(float)
    for row in report["lost"]["accounts"]:
        found[row["account"]] += 100 * row["share"]
        if row["rank"] is not None:
            found[f"rank {row['rank']}"] += 100 * row["share"]
            found[f"rank {row['rank']} seconds"] += row["seconds"]
    return {**found, "lost": 100 * report["lost"]["lost_share"]}


KEYS = ("kind", "ranks", "since_step", "until_step", "seconds", "share", "message")


def incidents_of(report):
    return [{key: row[key] for key in KEYS} for row in report["incidents"]]


def listed(row):
    """Cost and share as every text shows them."""
    seconds = row["seconds"]
    digits = 0 if seconds >= 99.5 else 1 if seconds >= 9.95 else 2
    return f"{seconds:,.{digits}f}", f"{100 * row['share']:.1f} %"


async def test_incidents_and_lost_time(tmp_path, capsys):
    """One run with several incidents: the same list and costs wherever they are shown, and the same lost time."""
    file = ended_recording(tmp_path / "run.mcap", eventful())
    report = report_of(file).as_json()
    truth, rows = lost_truth(report), incidents_of(report)
    assert [row["kind"] for row in rows] == ["death", "exposed_comm", "straggler"]
    assert sum(row["seconds"] for row in report["lost"]["accounts"]) == pytest.approx(report["lost"]["rank_seconds"])

    heading = plain_heading(file, rows, capsys)
    agree("plain", searched(heading, lost="; N % lost", transfer="N % exposed transfer"), truth, 2, 1.0)
    check_documents(file, report, tmp_path)

    async with replayed(file) as (app, pilot):
        await pilot.press("full_stop")
        await until(pilot, lambda: app.session.over)
        text = screen_text(app)
        agree("overview", searched(text, lost="N % of 2 ranks ×", transfer="N % exposed transfer"), truth, 2, 1.0)
        waiting = sum(map(float, re.findall(rf"{NUMBER} % +waiting for rank 1", text)))
        agree("overview", [("rank 1", f"{waiting:.1f}")], truth, 1, 1.0)
        await check_list(pilot, app, rows)
        await pilot.press("4")
        cost = re.search(rf"^ +1 .* ms +{NUMBER} +{NUMBER} % *$", screen_text(app), re.MULTILINE)
        agree("ranks", [("rank 1 seconds", cost[1]), ("rank 1", cost[2])], truth, 2)


def plain_heading(file, rows, capsys):
    """Checks the list of incidents below the plain lines; returns the line above it."""
    replay_lines(Recording(file))
    heading, *lines = capsys.readouterr().out.partition("\nincidents: ")[2].splitlines()
    for line, row in zip(lines[::2], rows, strict=True):
        seconds, share = listed(row)
        assert line.split("  ")[1] == KINDS[row["kind"]].name
        assert re.search(rf"{seconds} process-seconds, {share} of all ranks' time +{re.escape(row['message'])}$", line)
    return heading


def check_documents(file, report, folder):
    """Text, Markdown, JSON and HTML list the same incidents."""
    rows, page = incidents_of(report), " ".join(render_report(report_of(file)).split())
    markdown = render_markdown(report_of(file))
    for row in rows:
        assert row["message"] in page
        assert "{} process-seconds, {} of all ranks' time".format(*listed(row)) in page
        assert row["message"] in markdown
    write_html(file, folder / "report.html", Selection())
    data = json.loads(re.search(r"const DATA = (\{.*\});\n", (folder / "report.html").read_text())[1])
    assert incidents_of(data["report"]) == rows
    command = CliRunner().invoke(cli, ["report", str(file), "--json"])
    assert command.exit_code == 0, command.output
    assert incidents_of(json.loads(command.output)) == rows


@asynccontextmanager
async def replayed(file):
    """The dashboard at the start of a replay, once it knows the whole recording."""
    clock = Clock()
    app = DashboardApp(ReplaySpec("run.mcap", Recording(file), 1.0, clock), clock=clock, ticking=False)
    async with app.run_test(size=(200, 50)) as pilot:
        await until(pilot, lambda: app.session.whole.ready)
        yield app, pilot


async def check_list(pilot, app, rows):
    """The Log's list of incidents."""
    await pilot.press("7")
    for line, row in zip(below(screen_text(app), "incident         ranks", len(rows)), rows, strict=True):
        seconds, share = listed(row)
        kind, message = KINDS[row["kind"]].name, re.escape(row["message"][:60])
        assert re.search(rf"{kind} .* {seconds} +{share} +{message}", line)


async def test_comparison(recording, truth):
    """The dashboard shows the means that ``ddpwatch compare`` shows."""
    result = compare_recordings([recording, recording])
    first = result.runs[0].as_json()
    assert first["step_ms_p50"] == pytest.approx(truth["step p50"])
    clock = Clock()
    spec = ReplaySpec("run.mcap", Recording(recording), 1.0, clock)
    app = DashboardApp(spec, clock=clock, ticking=False, baseline=recording)
    async with app.run_test(size=(160, 50)) as pilot:
        await until(pilot, lambda: app.session.state.frames)
        await pilot.press("full_stop", "6")
        await until(pilot, lambda: app.session.over and "step ms" in screen_text(app))
        text = screen_text(app)
    names = {"step ms": "step", "optim": "optimizer", **{phase_name(phase): phase for phase in PHASES}}
    line = re.compile(rf"^ *({'|'.join((*names, 'overlap'))}) +{NUMBER}(?: %)? +{NUMBER}", re.MULTILINE)
    assert "mean (steps)" in text
    cells = [(names.get(name, name), cell) for name, *both in line.findall(text) for cell in both]
    agree("Compare", cells, truth, 2 * (len(PHASES) + 2))
    lines = re.findall(rf"^ *([\w: ]+?) +{NUMBER}(?: %)? +{NUMBER}", render_compare(result), re.MULTILINE)
    names = {"step ms": "step", "step p50 ms": "step p50", **SHOWN}
    names |= {f"exposed: {part}": part for part in ("waiting", "transfer")}
    cells = [(names.get(name, name), cell) for name, *both in lines for cell in both if name != "lost"]
    agree("compare", cells, truth, 2 * (len(PHASES) + 6))
