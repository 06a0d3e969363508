"""``ddpwatch explain`` names the line that makes a rank late, in a real job, and harms it not."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from ddpwatch.analysis.explain.explanation import Explanation
from ddpwatch.analysis.explain.lines import FEWEST_STEPS, LineDifference
from ddpwatch.recording.reader import Recording
from ddpwatch.report.explained import explained_in
from ddpwatch.run import blackbox, rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.sampling.lease import Lease
from ddpwatch.sampling.stack_order import MOST_PROFILED
from ddpwatch.viewer.explain import explain_live
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire.messages import Step
from tests.support.jobs import SCRIPTS, Job, collector_pids, ddpwatch, live, messages, read_until, the_run, wait_for

pytestmark = [pytest.mark.xdist_group("explain"), pytest.mark.seconds(70)]  # one job for all
SCRIPT = SCRIPTS / "explained.py"
STEPS = 40
MOST = 3  # times as many, if these show nothing surely
ENDLESS = 10_000
CALLS = 20  # of an operator


class Explained(SimpleNamespace):
    """What the job was asked, and what it has left."""

    folder: Path
    alike: Explanation
    of_case: dict[str, Explanation]
    by_default: dict[str, object]
    profiled: CompletedProcess[str]
    own: Explanation
    cut_short: Explanation
    afterwards: str
    missing: str
    recording: Path


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explained]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("explained")
        run_directory = Path(tempfile.mkdtemp(prefix="dw-"))  # short enough for sockets
        patch.setenv("DDPWATCH_DIR", str(run_directory))
        patch.setenv("XDG_STATE_HOME", str(run_directory / "state"))
        yield ask_all(folder)
        shutil.rmtree(run_directory, ignore_errors=True)


def ask_all(folder: Path) -> Explained:
    found = Explained(folder=folder, of_case={}, recording=folder / "run.mcap")
    (folder / "case").write_text("alike")
    with Job(SCRIPT, str(folder), log=folder / "log", DDPWATCH_EXPLAIN="first-incident") as job:
        info = the_run(job)
        with live(info) as source:
            read_until(source, lambda frames: {m.rank for m in messages(frames, Step)} == {0, 1}, "steps of both ranks")
        begin(folder, "alike")
        found.missing = ddpwatch("explain", info.run_id, "--rank", "7").stderr
        found.alike = ask(info)
        for case in ("forward", "backward", "data"):
            begin(folder, case)
            found.of_case[case] = ask(info)
            if not found.of_case[case].lines[0].certain:  # on a busy machine, samples are few: it says to take more
                found.of_case[case] = ask(info, MOST * STEPS)
        wait_for(lambda: len(collector_pids(info.run_id)) == 1, "who explains the first incident ends")
        (found.by_default,) = json.loads(ddpwatch("explain", "--steps", str(STEPS), "--json").stdout)
        begin(folder, "operators")
        profile = "--how", "profiler", "--steps", str(MOST_PROFILED), "--trace", str(folder / "trace.json.gz")
        found.profiled = ddpwatch("explain", info.run_id, "--rank", "1", "--with", "0", *profile)
        begin(folder, "own")
        found.own, _ = explain_live(LiveSource(info.publish), 1, 0, None, lambda line: None, profiler=True)
        found.cut_short = ask_at_the_end(info, folder)
        assert job.wait() == 0, job.output()
        found.afterwards = ddpwatch("explain", info.run_id, "--rank", "1").stdout
    return found


def begin(folder: Path, case: str) -> None:
    """Lets the job take a case, on both ranks."""
    new = folder / "case.new"
    new.write_text(case)
    new.rename(folder / "case")
    wait_for(lambda: all((folder / rank).exists() and (folder / rank).read_text() == case for rank in "01"), case)


def ask_at_the_end(info: RunInfo, folder: Path) -> Explanation:
    """Asks for more steps than the job has left, and ends it once it has been sampled for some."""
    begin(folder, "forward")
    lease = Lease()
    lease.open(rundir.lease(info.run_id))

    def is_sampled() -> bool:
        boxes = [blackbox.read(box) for box in rundir.blackboxes(info.run_id, (0, 1))]
        order = lease.order()
        return order is not None and all(box is not None and box.slot > order.first_slot + STEPS for box in boxes)

    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, info, ENDLESS)
        wait_for(is_sampled, "steps that were ordered")
        begin(folder, "over")
        return asked.result()


def ask(info: RunInfo, steps: int = STEPS) -> Explanation:
    return explain_live(LiveSource(info.publish), 1, 0, steps, lambda line: None)[0]


def lines_of(function: str) -> range:
    """The lines of a function of the job's."""
    source = SCRIPT.read_text().splitlines()
    first = next(number for number, line in enumerate(source, 1) if f"def {function}(" in line)
    return range(first, first + 6)


def more(found: Explanation) -> list[LineDifference]:
    """What rank 1 surely spends more in, but for waiting."""
    return [line for line in found.lines if line.certain and (line.difference_ms or 0) > 0 and line.phase != "sync"]


@pytest.mark.parametrize(
    ("case", "function", "ms", "phase", "module"),
    [
        ("forward", "mask_spans", 20, "forward", "blocks.1"),
        ("backward", "backward", 40, "backward", ""),  # of two functions
        ("data", "augment", 20, "data", ""),
    ],
)
def test_the_line_is_named(case: str, function: str, ms: float, phase: str, module: str, explained: Explained) -> None:
    found = explained.of_case[case]
    line = found.lines[0]
    assert (line.function, line.phase, line.module, line.file) == (function, phase, module, "explained.py")
    assert line.line in lines_of(function)
    assert line.certain
    assert line.difference_ms is not None
    assert line.difference_ms > 0.7 * ms  # more on a busy machine
    assert found.text.startswith("rank 1 spends ")
    assert f" ms more a step in {function}() (explained.py:{line.line})" in found.text
    assert (found.rank, found.peer) == (1, 0)
    assert 0.75 * STEPS <= found.steps <= MOST * STEPS  # but for bare ones, and those in which no sample was to be had
    waits = [each for each in found.lines if each.phase == "sync"]
    assert sum(each.difference_ms or 0 for each in waits) < -10  # its peer waits for it


def test_ranks_that_are_alike_do_not_differ(explained: Explained) -> None:
    assert more(explained.alike) == []
    assert "spends" not in explained.alike.text


def test_what_was_sampled_until_the_job_ended_is_shown_and_kept(explained: Explained) -> None:
    found = explained.cut_short
    assert re.search(rf"\bmask_spans\(\) .*; of {found.steps} of {ENDLESS} steps: the run ended$", found.text)
    assert FEWEST_STEPS <= found.steps < ENDLESS
    assert found.text in {each.text for each in explained_in(Recording(explained.recording))}
    assert explained.afterwards.startswith(found.text)


def test_what_the_sampling_and_the_machine_did_is_known(explained: Explained) -> None:
    for found in (explained.alike, *explained.of_case.values()):
        for rank in found.ranks:
            assert rank.samples > STEPS / 4
            assert rank.cost is not None
            assert 0 < rank.cost < 0.05
            assert rank.on_core is not None
            assert 0 < rank.on_core < 1
            assert None not in (rank.starved, rank.preempted, rank.major_faults)
            assert rank.input_elements == 16  # of a batch


def test_the_late_rank_is_explained_by_default(explained: Explained) -> None:
    assert (explained.by_default["rank"], explained.by_default["peer"]) == (1, 0)
    assert "augment" in str(explained.by_default["text"])
    assert explained.missing == "ddpwatch: error: there is no rank 7 that is watched\nhint: there are the ranks 0, 1\n"


def test_a_recording_has_the_explanations(explained: Explained) -> None:
    shown = ddpwatch("explain", str(explained.recording)).stdout
    answers = (explained.alike, *explained.of_case.values(), explained.own, explained.cut_short)
    for found in answers:
        assert found.text in shown
    asked = [*(found.text for found in answers), explained.profiled.stdout.splitlines()[0]]
    asked.append(str(explained.by_default["text"]))
    texts = Counter(found.text for found in explained_in(Recording(explained.recording)))
    texts.subtract(asked)
    # One more than was asked for: that of the first incident, which may read exactly like another.
    assert [count for count in texts.values() if count] == [1]
    report = ddpwatch("report", str(explained.recording)).stdout
    assert f"Explained: {explained.of_case['forward'].text}" in report


def test_a_profile_names_the_operator(explained: Explained) -> None:
    lines, _, table, *_ = explained.profiled.stdout.split("\n\n")
    says = rf"rank 1 spends [0-9.]+ ms more a step in aten::mm, in the forward: {CALLS} calls a step, its peer 0"
    assert re.match(f"{says}(;|\n)", lines), lines  # perhaps a core was missing, too
    assert re.search(rf"\n *forward +{CALLS} : 0 +aten::mm +", table)
    assert f"ms a step, in {MOST_PROFILED - 2} steps" in explained.profiled.stdout


def test_a_profile_is_a_trace_too(explained: Explained) -> None:
    assert explained.profiled.stderr.endswith("events; open it in https://ui.perfetto.dev\n")
    events = json.loads(gzip.decompress((explained.folder / "trace.json.gz").read_bytes()))["traceEvents"]
    slices = Counter((event["pid"], event["name"]) for event in events if event["ph"] == "X")
    assert slices[1, "aten::mm"] - slices[0, "aten::mm"] == CALLS * (MOST_PROFILED - 2)
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}


def test_steps_under_the_profiler_are_not_taken_for_others(explained: Explained) -> None:
    statuses = Counter(m.status for m, _ in Recording(explained.recording) if isinstance(m, Step))
    # The last one ends it. Of both ranks, and of rank 0 alone once rank 1 has its own.
    assert statuses["profiled"] == 3 * (MOST_PROFILED + 1)
    assert statuses["warmup"] == 2


def test_a_job_with_a_profiler_of_its_own_is_left_alone(explained: Explained) -> None:
    assert explained.own.text == "rank 1 was not profiled: the job has a profiler of its own"


def test_parameters_are_those_of_the_unwatched_job(explained: Explained) -> None:
    for rank in "01":
        left = json.loads((explained.folder / f"{rank}.json").read_text())
        assert left["steps"][0] == left["steps"][1]
        assert left["digests"][0] == left["digests"][1]
