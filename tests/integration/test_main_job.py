"""The main job end to end: train, watch, record, attach late, report; and with a broken or absent collector."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest

from ddpwatch.analysis.step import PHASES
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir
from ddpwatch.sampling.lease import FULL_PPM, Lease
from ddpwatch.sampling.schedule import is_sampled
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Bye, Device, Hello, Layout, RankSample, Status, Step
from ddpwatch.wire.transport import RESTART_BITS
from tests.support.jobs import (
    ROOT,
    SMALL_GPT,
    Frames,
    Job,
    collector_pids,
    ddpwatch,
    live,
    messages,
    read_until,
    the_run,
    wait_for,
)

TRAIN = ROOT / "demo" / "train.py"
ENDLESS = ("--steps", "100000")
SLOW = ("--inject", "slow-forward:ms=200")  # the run lasts until devices were sampled
# Steps that are long beside what watching costs: whatever a busy machine makes of that, all of them can be full.
CALM = ("--model", "mlp", "--data", "digits", "--batch-size", "16", "--inject", "slow-forward:ms=30")


@pytest.mark.seconds(15)
def test_watched_recorded_and_attached_to(run_directory: Path, tmp_path: Path) -> None:
    """A late viewer sees everything from the first frame on, once and in order; the recording holds the same."""
    file = tmp_path / "out.mcap"
    with Job(TRAIN, *SMALL_GPT, *SLOW, "--watch", "--steps", "24", "--record", str(file), log=tmp_path / "log") as job:
        info = the_run(job)
        with live(info) as first:
            read_until(first, lambda frames: any(m.step >= 8 for m in messages(frames, Step)), "step 8")
        with live(info) as late:
            frames = read_until(late, lambda seen: any(m.rank is None for m in messages(seen, Bye)), "the end")
        assert job.wait() == 0, job.output()
    sequence = [envelope.seq for _, envelope in frames]
    steps = {rank: [m.step for m in messages(frames, Step) if m.rank == rank] for rank in (0, 1)}
    assert sequence == sorted(set(sequence))
    assert steps == {0: list(range(24)), 1: list(range(24))}
    layouts = [m for m in messages(frames, Layout) if m.rank == 1]
    assert [layout.epoch for layout in layouts] == [1, 2, 3]  # warm-up, rebuilt, and once DDP tells what is in them
    assert sorted(i for bucket in layouts[-1].buckets for i in bucket.params) == list(range(len(layouts[-1].params)))
    assert {m.rank for m in messages(frames, Hello)} == {0, 1}
    assert messages(frames, Device)
    wait_for(lambda: not collector_pids(info.run_id), "the collector ends")
    assert not list(run_directory.glob("*.json"))
    check_last_view(frames)
    recorded = [(m, e.received_ns) for m, e in Recording(file)]
    shown = [(m, e.received_ns) for m, e in frames]
    kept = (Step, Hello, Layout, Bye, Device, RankSample)  # of heartbeats and status a late viewer gets the newest
    assert [row for row in recorded if isinstance(row[0], kept)] == [row for row in shown if isinstance(row[0], kept)]
    check_report(file, steps=24)
    assert "loss" in job.output()


def check_last_view(seen: Frames) -> None:
    """What is left for viewers that come after the end: all steps, and how it ended."""
    (path,) = rundir.last_views()
    left = [message for message, _ in Recording(path)]
    assert [m for m in left if isinstance(m, (Step, Bye))] == [m for m, _ in seen if isinstance(m, (Step, Bye))]


def check_report(file: Path, steps: int) -> None:
    done = ddpwatch("report", str(file), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    assert [row["steps"] for row in report["ranks"]] == [steps, steps]
    assert [row["dropped"] for row in report["ranks"]] == [0, 0]
    assert [row["end"]["reason"] for row in report["ranks"]] == ["finished", "finished"]
    assert len(report["collectives"]) >= 3
    assert sum(bucket["nbytes"] for bucket in report["collectives"]) == 4 * messages_of(file, Hello)[0].parameters
    assert all(bucket["params"] for bucket in report["collectives"])
    assert list(report["phases_ms"]) == list(PHASES)
    assert sum(report["phases_ms"].values()) == pytest.approx(report["steps"]["step_ms"], rel=1e-9)
    assert 0 <= report["overlap"]["ratio"] <= 1
    assert report["steps"]["warmup"] == 1
    assert not report["recording"]["cut_tail"]
    assert (report["throughput"]["samples_per_step"], report["throughput"]["tokens_per_step"]) == (4, 256)


def messages_of(file: Path, kind: type) -> list:
    return [message for message, _ in Recording(file) if isinstance(message, kind)]


def knows_restarts(file: Path, restarts: int) -> bool:
    """Returns whether the recording has a status of that collector."""
    try:
        return any(status.restarts == restarts for status in messages_of(file, Status))
    except DdpwatchError:  # nothing is
        return False


@pytest.mark.usefixtures("run_directory")
def test_same_bits_with_and_without_watching(tmp_path: Path) -> None:
    import torch

    saved, logs = [tmp_path / "plain.pt", tmp_path / "watched.pt"], [tmp_path / "plain.log", tmp_path / "watched.log"]
    jobs = [
        Job(TRAIN, *SMALL_GPT, "--steps", "6", "--save-params", str(file), *options, log=log)
        for file, log, options in zip(saved, logs, ([], ["--watch"]), strict=True)
    ]
    with jobs[0], jobs[1]:
        for job in jobs:
            assert job.wait() == 0, job.output()
    plain, watched = map(torch.load, saved)
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


@pytest.mark.seconds(15)
@pytest.mark.usefixtures("run_directory")
def test_a_killed_collector_is_started_again(tmp_path: Path) -> None:
    """Viewers go on, the recording too, and the gap is counted. The job does not notice.

    While somebody looks, steps are full at once, and again with the second collector: the same ones on both ranks.
    """
    file, state = tmp_path / "run.mcap", RunState()
    with Job(TRAIN, *CALM, *ENDLESS, "--record", str(file), log=tmp_path / "log", DDPWATCH_DETAIL="low") as job:
        info = the_run(job)
        with live(info) as source:
            frames = read_until(source, lambda seen: any(m.step > 64 for m in messages(seen, Step)), "some steps")
            assert {m.status for m in messages(frames, Step) if m.step >= 32} >= {"shadow", "unwatched"}
            with live(info, budget_ppm=FULL_PPM) as dashboard:
                check_levels(dashboard, info.run_id, restarts=0)
                wait_for(lambda: knows_restarts(file, 0), "the recording knows that this is the first collector")
                psutil.Process(info.pid).kill()
                frames = check_levels(dashboard, info.run_id, restarts=1)
            frames += read_until(source, lambda seen: is_last_status(seen, None), "nobody looks")
            assert {message.rank for message in messages(frames, Hello)} == {0, 1}  # introduced again
            assert messages(frames, Layout)
            (again,) = rundir.live_runs()
            assert (again.run_id, again.publish) == (info.run_id, info.publish)
            assert again.pid != info.pid
            wait_for(lambda: knows_restarts(file, 1), "the recording knows that this is another one")
            psutil.Process(again.pid).terminate()  # on purpose, so no third one is started
            frames += read_until(source, lambda seen: any(m.rank is None for m in messages(seen, Bye)), "the goodbye")
        wait_for(lambda: not rundir.live_runs(), "the second collector ends")
        assert all(rank.is_running() for rank in job.ranks())
    assert job.output().count("started again") + job.output().count("restarts its collector") == 1
    assert "ddpwatch restarts its collector (1 of 3): it died: SIGKILL" in job.output()
    for message, envelope in Recording(file):
        state.apply_message(message, envelope.received_ns)
    steps = {rank: [step.step for step in messages_of(file, Step) if step.rank == rank] for rank in (0, 1)}
    missing = sum(numbers[-1] + 1 - len(numbers) for numbers in steps.values())
    assert state.missing_steps == missing
    report = json.loads(ddpwatch("report", str(file), "--json").stdout)
    assert report["recording"]["parts"] == 2
    assert report["recording"]["collector_restarts"] == 1
    assert report["recording"]["missing_steps"] == missing
    (finding,) = [found for found in report["findings"] if found["kind"] == "collector_restarts"]
    assert finding["message"].endswith(f"started again once: {missing} rank steps are missing")


def check_levels(source: LiveSource, run_id: str, restarts: int) -> Frames:
    """Reads steps with a budget of 100 %, until of 40 in a row all but one in 32 are full, the same on both ranks.

    Not from its first step on: a collector without a core may grant that too late for one rank, or renew it too late.
    """
    frames = read_until(source, lambda seen: is_last_status(seen, FULL_PPM, restarts), "a lease")
    first: list[int] = []

    def granted() -> bool:
        lease = Lease()
        lease.open(rundir.lease(run_id))
        first[:] = islice((step for step in range(1 << 20) if lease.budget_ppm(step, time.monotonic_ns())), 1)
        return bool(first)

    def full(seen: Frames) -> bool:
        newest_frames = seen[-512:]  # to go through all of them each time would be too slow to keep up with the job
        levels = {(m.step, m.rank): m.status for m in messages(newest_frames, Step) if m.step >= first[0]}
        newest = min(max((step for step, of in levels if of == rank), default=-1) for rank in (0, 1))
        expected = {
            (step, rank): "unwatched" if is_sampled(step ^ 2, 32) else "ok"
            for step in range(newest - 39, newest + 1)
            for rank in (0, 1)
        }
        return newest >= 0 and {place: levels.get(place) for place in expected} == expected

    wait_for(granted, "the lease holds")
    return frames + read_until(source, full, "full steps with the lease")


def is_last_status(frames: Frames, budget_ppm: int | None, restarts: int = 1) -> bool:
    """Whether the collector's newest status has this budget."""
    statuses = messages(frames, Status)
    return bool(statuses) and (statuses[-1].lease_ppm, statuses[-1].restarts) == (budget_ppm, restarts)


def after_restart(frames: Frames) -> list[Step]:
    """The steps that a second collector has passed on."""
    return [message for message, envelope in frames if isinstance(message, Step) and envelope.seq >> RESTART_BITS]


@pytest.mark.usefixtures("run_directory")
def test_one_process_alone(tmp_path: Path) -> None:
    """One process has nobody to talk to, and a suspended collector does not keep it from ending."""
    file = tmp_path / "alone.mcap"
    with Job(TRAIN, *SMALL_GPT, "--steps", "12", "--record", str(file), ranks=1, log=tmp_path / "log") as job:
        info = the_run(job)
        with live(info) as source:
            read_until(source, lambda frames: len(messages(frames, Step)) >= 3, "three steps")
        os.kill(info.pid, signal.SIGSTOP)
        try:
            assert job.wait() == 0, job.output()
        finally:
            os.kill(info.pid, signal.SIGCONT)
        wait_for(lambda: not collector_pids(info.run_id), "the collector ends once it runs again")
    state = RunState()
    for message, envelope in Recording(file):
        state.apply_message(message, envelope.received_ns)
    assert len(state.steps) == 12
    assert state.end is not None
    assert state.end.reason == "finished"
    assert messages_of(file, Status)[-1].refused == {}


@pytest.mark.usefixtures("run_directory")
def test_without_a_collector_every_rank_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sites where processes cannot talk; the reader merges the files."""
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", str(tmp_path / "files"))
    with Job(TRAIN, *SMALL_GPT, "--watch", "--steps", "6", log=tmp_path / "log") as job:
        assert job.wait() == 0, job.output()
    assert len(list((tmp_path / "files").glob("*/rank0000?.mcap"))) == 2
    assert rundir.live_runs() == []
    done = ddpwatch("report", str(tmp_path / "files"), "--json")
    assert done.returncode == 0, done.stderr
    assert [row["steps"] for row in json.loads(done.stdout)["ranks"]] == [6, 6]
