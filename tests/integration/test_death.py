"""kill -9 of one rank, and of all of them: who died, what was in flight, and nothing left behind. And who hangs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from ddpwatch.analysis.window import Summary
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import report_of
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Beat, Bye, Hello, Step
from tests.support.fork_server import TORCHRUN_IMPORTS
from tests.support.jobs import (
    PATIENCE_S,
    PROBE_IMPORTS,
    SCRIPTS,
    Frames,
    Job,
    collector_pids,
    family,
    live,
    messages,
    read_until,
    the_run,
    wait_for,
)

SLOW = ("--model", "mlp:width=64", "--data", "digits", "--inject", "slow-forward:ms=150")
ENDLESS = (*SLOW, "--steps", "100000")
TRAIN = SCRIPTS.parents[2] / "demo" / "train.py"
SECOND = 25  # steps


def begun(frames: Frames) -> bool:
    return {m.rank for m in messages(frames, Step) if m.step >= 3} == {0, 1}


@contextlib.contextmanager
def stopped(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Processes that do nothing meanwhile: so torchrun cannot reap a rank, nor the other rank fail, too soon."""
    still = [process for process in processes if not process.suspend()]
    try:
        yield
    finally:
        for process in still:
            process.resume()


def over(frames: Frames) -> bool:
    return any(m.rank is None for m in messages(frames, Bye))


@pytest.mark.usefixtures("run_directory")
def test_who_hangs_is_named_in_a_step_that_is_not_watched(tmp_path: Path) -> None:
    """Nothing is known of its phase, but it has issued fewer collectives than those that wait for it."""

    def both_stand(frames: Frames) -> bool:
        return {m.rank for m in messages(frames, Beat) if m.step == 5 and m.at_ns - m.since_ns > 3.6e9} == {0, 1}

    with Job(SCRIPTS / "hang.py", log=tmp_path / "log") as job, live(the_run(job)) as source:
        frames = read_until(source, both_stand, "both ranks stand")
        state = RunState()
        for message, envelope in frames:
            state.apply_message(message, envelope.received_ns)
        found = state.verdict(Summary(), state.diagnosis.incidents())
    assert {beat.phase for beat in messages(frames, Beat) if beat.step == 5} == {""}
    assert (found.kind, found.rank) == ("hang", 1)
    waiting, stuck = (state.ranks[rank].beat for rank in (0, 1))
    assert waiting is not None
    assert stuck is not None
    assert re.match(r"rank 1 is stuck in an unknown phase of step 5 for \d+ s", found.text), found.text
    assert f"it has issued {stuck.issued} collectives, the ranks that wait {waiting.issued}" in found.text


@pytest.mark.seconds(12)
@pytest.mark.usefixtures("run_directory")
def test_one_rank_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "out.mcap"
    torchrun = ("-", "--standalone", "--nproc-per-node=2", "--no-python", str(TRAIN), *ENDLESS, "--record", str(file))
    options = {"log": tmp_path / "log", "ranks": 0, "preload": (*TORCHRUN_IMPORTS, *PROBE_IMPORTS)}
    with Job(SCRIPTS / "torchrun_on_host.py", *torchrun, **options) as job:
        info = the_run(job)
        with live(info) as source:
            frames = read_until(source, begun, "both ranks train")
            victim = next(m.pid for m in messages(frames, Hello) if m.rank == 1)
            with stopped(process for process in family(job.process.pid) if process.pid != victim):
                os.kill(victim, signal.SIGKILL)
                frames += read_until(source, lambda frames: messages(frames, Bye), "the collector has noticed")
            frames += read_until(source, over, "the end of the run")
        assert job.wait() != 0
        wait_for(lambda: not collector_pids(info.run_id), "the collector ends")
    ends = {m.rank: m for m in messages(frames, Bye)}
    assert (ends[1].reason, ends[1].detail, ends[1].signal) == ("killed", "SIGKILL", 9)
    assert ends[1].step is not None
    assert ends[1].step >= 3
    assert ends[1].phase in ("input", "forward", "between", "backward", "sync", "optimizer")
    assert ends[None].reason == "killed"
    assert ends[1].at_ns < ends[0].at_ns
    report = report_of(file).as_json()
    assert not report["recording"]["cut_tail"]
    assert report["findings"][0]["message"].startswith("rank 1 was killed (SIGKILL) at step")


@pytest.mark.usefixtures("run_directory")
def test_everything_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "out.mcap"
    with Job(TRAIN, *ENDLESS, "--record", str(file), log=tmp_path / "log") as job:
        info = the_run(job)
        with live(info) as source:
            frames = read_until(source, begun, "both ranks train")
            job.kill_everything()
            frames += read_until(source, over, "the end of the run")
        wait_for(lambda: not collector_pids(info.run_id), "the collector ends")
    ends = {m.rank: m for m in messages(frames, Bye)}
    assert {ends[0].reason, ends[1].reason} <= {"killed", "lost"}
    assert all(ends[rank].phase and ends[rank].step >= 3 for rank in (0, 1))
    assert not any(psutil.pid_exists(m.pid) for m in messages(frames, Hello))
    report = report_of(file).as_json()
    assert {f["rank"] for f in report["findings"] if f["kind"] == "rank_ended"} == {0, 1}


@pytest.mark.usefixtures("run_directory")
def test_the_collector_is_killed_too(tmp_path: Path) -> None:
    """Nobody is left to write an end: the recording opens all the same, up to its last second."""
    file = tmp_path / "out.mcap"
    with Job(TRAIN, *ENDLESS, "--record", str(file), log=tmp_path / "log") as job:
        info = the_run(job)
        with live(info) as source:
            frames = read_until(source, begun, "both ranks train")
            wait_for(lambda: Recording(file).steps, "the collector, which comes up, records")
            frames += read_until(source, lambda frames: len(messages(frames, Step)) > 20, "a second goes by")
        job.kill_everything()
        psutil.Process(info.pid).kill()
    report = report_of(file).as_json()
    assert report["recording"]["cut_tail"]
    assert min(row["steps"] for row in report["ranks"]) >= 3


@pytest.mark.seconds(12)
@pytest.mark.parametrize("kills", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_everything_is_killed_at_random_moments(kills: int, run_directory: Path) -> None:
    """Ranks and collector of whole jobs: every recording opens, and what is missing is from the last second.

    The ranks themselves note their steps. A second is counted in steps, of which a quiet machine does just under 25 in
    that time. What the job's threads waited for a core comes on top: so load cannot fail this. A collector that has
    just come up has its second, too.
    """
    dice = random.Random(9)
    moments = [dice.uniform(n, n + 1) * 3 * SECOND / kills for n in range(kills)]  # steps; see the script
    dice.shuffle(moments)
    kill_jobs(run_directory, moments)
    assert any(run_directory.glob("*/run.0000.mcap"))  # also of several parts
    kept = [compare(run_directory / str(number)) for number in range(kills)]
    assert any(kept)


def kill_jobs(base: Path, moments: list[float]) -> None:
    """Runs as many jobs as there are moments, and kills one at each."""
    with Job(SCRIPTS / "killed_jobs.py", str(base), *map(str, moments), ranks=0, log=base / "log") as jobs:
        assert jobs.wait() == 0, jobs.output()


def compare(folder: Path) -> int:
    """Compares the recording of a killed job with what its ranks have noted; how many steps it holds."""
    killed = json.loads((folder / "killed").read_text())
    assert len(killed["pids"]) == 3
    for file in (file for file in folder.glob("*.json") if file.stat().st_size):  # not only claimed
        assert msgspec.json.decode(file.read_bytes(), type=RunInfo).pid in killed["pids"]
    recording = folder / "run.mcap"
    begun = recording.exists() and recording.stat().st_size > 0  # the kill may come between its creation and its head
    recorded = messages(list(Recording(recording)), Step) if begun else []
    safe = {0: 0, 1: 0}
    for rank in safe:
        ended = [int(line) for line in (folder / f"rank{rank}").read_bytes().splitlines()]
        if sum(at > killed["at_ns"] - killed["collector_ns"] for at in ended) >= SECOND:
            safe[rank] = len(ended) - SECOND - killed["late_ns"] * SECOND // 10**9
        kept = [step.step for step in recorded if step.rank == rank]
        assert kept == list(range(len(kept)))
        assert safe[rank] <= len(kept) <= len(ended), (folder.name, rank, killed)
    if recorded:
        last = recorded[-1].step
        assert {m.step for m in messages(list(Recording(recording).select(Selection(last))), Step)} >= {last}
    return len(recorded)


@pytest.mark.usefixtures("run_directory")
@pytest.mark.parametrize(("code", "reason"), [(0, "finished"), (3, "lost")])
def test_a_job_that_exits_with_a_code(tmp_path: Path, code: int, reason: str) -> None:
    """By ``os._exit``, no exit handler runs; by ``sys.exit``, none knows the code. All steps are there."""

    def ended(frames: Frames) -> bool:
        ends = {m.rank: m.reason for m in messages(frames, Bye)}
        return ends.get(0) == ends.get(1) == reason

    def trained(frames: Frames) -> bool:
        return {m.rank for m in messages(frames, Step) if m.step >= 20} == {0, 1}

    file, go, end = (tmp_path / name for name in ("out.mcap", "go", "end"))
    script = (SCRIPTS / "hard_exit.py", str(code), str(go))
    with Job(*script, log=tmp_path / "log", RECORD=str(file), END=str(end)) as job:
        with live(info := the_run(job)) as source:
            read_until(source, lambda frames: len(messages(frames, Hello)) == 2, "both ranks are connected")
            go.touch()
            read_until(source, trained, "both ranks have trained")
            with stopped([psutil.Process(job.process.pid)]):  # it would reap one rank at once, and end the other
                end.touch()
                read_until(source, ended, "the collector has noticed both ends")
        assert job.wait() == code, job.output()
        wait_for(lambda: not collector_pids(info.run_id), "the collector ends")
    report = report_of(file).as_json()
    assert [(row["end"]["reason"], row["steps"]) for row in report["ranks"]] == [(reason, 30)] * 2
    details = {row["end"]["detail"] for row in report["ranks"]}
    assert details == ({f"exited with code {code}"} if code else {""})
    found = [incident["message"] for incident in report["incidents"] if incident["kind"] == "death"]
    assert [message.split(" at ")[0][7:] for message in found] == (["exited with code 3"] if code else [])


def test_a_child_of_multiprocessing_says_how_it_ended(tmp_path: Path) -> None:
    """On Python ≥ 3.13 its finalizers run once its exception is forgotten. One that it handles is none that ends it."""
    with Job(SCRIPTS / "child_ends.py", ranks=0, log=tmp_path / "log", tears_down=True) as job:
        assert job.wait() == 0
    said = [line.split("|") for line in job.output().splitlines() if line.startswith(("fork|", "spawn|"))]
    found = {(method, how): tuple(bye) for method, how, *bye in reversed(said)}  # the first: it did not really close
    exits = ("lost", "exited with code 3") if sys.version_info >= (3, 13) else ("exception", "SystemExit: 3")
    for method in ("fork", "spawn"):
        assert found[method, "returns"] == ("finished", "")
        assert found[method, "raises"] == ("exception", "ValueError: boom")
        assert found[method, "exits"] == exits


def test_a_job_that_is_over_before_its_collector_is_up_is_recorded(run_directory: Path, tmp_path: Path) -> None:
    file, late = tmp_path / "out.mcap", tmp_path / "late"
    script = (SCRIPTS / "hard_exit.py", "0", str(tmp_path), str(late))
    with Job(*script, log=tmp_path / "log", RECORD=str(file)) as job:
        assert job.process.wait(PATIENCE_S) == 0, job.output()
        assert not list(run_directory.glob("*.in"))
        late.touch()
        wait_for(lambda: not list(run_directory.glob("*.json")), "the collector ends")
    report = report_of(file).as_json()
    assert [(row["end"]["reason"], row["steps"]) for row in report["ranks"]] == [("finished", 30)] * 2
    assert not [path for path in run_directory.iterdir() if ".rest" in path.name or ".answer" in path.name]
