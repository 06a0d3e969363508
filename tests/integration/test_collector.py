"""The collector process with fake ranks, well-behaved and hostile."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir
from ddpwatch.run.blackbox import BlackBox
from ddpwatch.run.clock import boot_id, pid_namespace, start_ticks
from ddpwatch.sampling.lease import Lease
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.viewer.over_ssh import link
from ddpwatch.wire import transport
from ddpwatch.wire.messages import MAX_FRAME_BYTES, Bye, Device, Hello, Mark, Message, RankSample, Status, Step, encode
from tests.support.fake_ssh import FakeSsh
from tests.support.fork_server import COLLECTOR, Launcher, Request
from tests.support.jobs import PATIENCE_S, live, messages, read_until

pytestmark = pytest.mark.same_everywhere


class Stage:
    """A collector in a forked process, and a socket in place of the ranks."""

    def __init__(self, record: Path, world_size: int = 1) -> None:
        self.run_id = rundir.new_run_id("stage")
        self.ingest, self.publish = rundir.endpoints(self.run_id)
        arguments = ["--run-id", self.run_id, "--record", str(record)]
        arguments += ["--world-size", str(world_size), "--watch-pid", str(os.getpid())]
        environment = dict(os.environ)
        self.process = Launcher(Request("ddpwatch.collector", arguments, 0, environment, COLLECTOR, tears_down=False))
        self.context = transport.Context()
        self.socket = transport.rank_push(self.context)
        self.socket.connect(self.ingest)
        self.info = rundir.RunInfo(
            run_id=self.run_id, ingest=self.ingest, publish=self.publish, pid=0, world_size=1, started=0
        )

    def send(self, *sent: Message | bytes) -> None:
        for message in sent:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    def hello(self, rank: int = 0, **fields: Any) -> Hello:
        process = {"pid": os.getpid(), "boot_id": boot_id(), "pid_ns": pid_namespace(), **fields}
        return Hello(run_id=self.run_id, rank=rank, world_size=1, host="here", **process)

    def finish(self) -> None:
        self.send(Bye(rank=0, by="rank", reason="finished", at_ns=1))
        assert self.process.wait(PATIENCE_S) == 0

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def stage(run_directory: Path, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "stage.mcap")
    yield stage
    stage.close()


def step(number: int, rank: int = 0) -> Step:
    return Step(rank=rank, step=number, start_ns=number * 100, duration_ns=100)


def test_hostile_frames_are_counted_and_refused(stage: Stage, tmp_path: Path) -> None:
    hostile = [
        os.urandom(200),
        pickle.dumps({"rank": 0, "step": 1}),
        b"",
        b"\x00" * (MAX_FRAME_BYTES + 1),
        encode(step(1))[:-3],
        msgspec.msgpack.encode({"type": "step", "rank": -1}),
        msgspec.msgpack.encode({"type": "launch missiles"}),
        encode(Device(host="here", kind="cpu", at_ns=1, utilization=100.0)),
        encode(Bye(rank=0, by="collector", reason="killed", at_ns=1)),
    ]
    stage.send(stage.hello(), *hostile)
    stage.socket.send_multipart([b"two", b"parts"])
    stage.send(step(7))
    with live(stage.info) as source:
        expected = len(hostile) + 1
        frames = read_until(
            source, lambda seen: any(sum(s.refused.values()) == expected for s in messages(seen, Status)), "the count"
        )
        stage.finish()
    refused = messages(frames, Status)[-1].refused
    assert refused["oversize"] == 1
    assert refused["multipart"] == 1
    assert refused["unknown type"] == 1
    assert refused["not a rank's to send"] == 2
    assert refused["not msgpack"] + refused["invalid"] == 5
    assert [m.step for m in messages(frames, Step)] == [7]
    recorded = [m for m, _ in Recording(tmp_path / "stage.mcap")]
    assert [m.step for m in recorded if isinstance(m, Step)] == [7]
    assert not [m for m in recorded if isinstance(m, Bye) and m.by == "collector" and m.rank is not None]


def test_a_frame_beyond_the_transport_limit_costs_its_sender_the_connection(stage: Stage) -> None:
    context = transport.Context()
    vandal = context.socket(zmq.PUSH)
    vandal.connect(stage.ingest)
    vandal.send(bytes(transport.TRANSPORT_LIMIT + 1))
    stage.send(stage.hello(), step(1))
    with live(stage.info) as source:
        frames = read_until(source, lambda seen: messages(seen, Step), "the honest rank")
        stage.finish()
    assert [m.step for m in messages(frames, Step)] == [1]
    vandal.close(linger=0)
    context.term()


def test_two_viewers_and_a_late_one_see_the_same(stage: Stage) -> None:
    stage.send(stage.hello(), *[step(n) for n in range(50)])
    with live(stage.info) as first, live(stage.info) as second:
        read_until(first, lambda seen: len(messages(seen, Step)) == 50, "fifty steps")
        stage.send(Mark(rank=0, name="checkpoint", start_ns=5))
        with live(stage.info) as late:
            stage.send(*[step(n) for n in range(50, 400)])
            seen = [
                read_until(viewer, lambda frames: any(m.step == 399 for m in messages(frames, Step)), "the last step")
                for viewer in (second, late)
            ]
        stage.finish()
    for frames in seen:
        assert [m.step for m in messages(frames, Step)] == list(range(400))
        assert [m.name for m in messages(frames, Mark)] == ["checkpoint"]


@pytest.mark.parametrize(("detail", "own"), [("low", None), ("", 10_000)])
def test_ranks_may_sample_more_while_somebody_looks(
    detail: str, own: int | None, run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest budget counts, from the same step on for all ranks; the recording's is left by the last viewer."""
    monkeypatch.setenv("DDPWATCH_DETAIL", detail)
    stage = Stage(tmp_path / "stage.mcap")
    try:
        check_budgets(stage, own)
    finally:
        stage.close()


def check_budgets(stage: Stage, own: int | None) -> None:

    def wait_for_budget(source: LiveSource, ppm: int | None) -> None:
        read_until(source, lambda seen: any(s.lease_ppm == ppm for s in messages(seen, Status)), f"a budget of {ppm}")

    def budgets() -> list[int]:
        return [rank.budget_ppm(step, time.monotonic_ns()) for step in (99, 100, 101, 10**9)]

    box, rank = BlackBox(), Lease()
    path = rundir.blackbox(stage.run_id, 0)
    if path is None:
        pytest.skip("no private directory in memory")
    stage.send(stage.hello(), step(99))
    with live(stage.info) as nobody:
        read_until(nobody, lambda seen: messages(seen, Step), "the step")
        rank.open(rundir.lease(stage.run_id))
        with live(stage.info, 20_000) as dashboard:
            read_until(dashboard, lambda seen: len(messages(seen, Status)) > 2, "the collector's ticks")
            assert budgets() == [0, 0, 0, 0]  # it is not known where the ranks are
            box.open(path)
            box.begin_step(99, 99)
            wait_for_budget(nobody, 20_000)
            assert budgets()[-1] == 20_000
            assert budgets()[0] == 0
            box.begin_step(10**9, 10**9)  # from there on the next budget can hold
            with live(stage.info, 50_000):
                wait_for_budget(nobody, 50_000)
                assert budgets()[-1] == 20_000
                assert rank.budget_ppm(2 * 10**9, time.monotonic_ns()) == 50_000
                box.begin_step(2 * 10**9, 2 * 10**9)
            wait_for_budget(nobody, 20_000)
            box.begin_step(3 * 10**9, 3 * 10**9)
        wait_for_budget(nobody, own)
        assert rank.budget_ppm(4 * 10**9, time.monotonic_ns()) == (own or 0)
        stage.finish()
    assert not path.exists()
    assert rundir.lease(stage.run_id) not in path.parent.iterdir()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits for a core")
def test_what_the_scheduler_denies_a_local_rank_is_sampled_and_recorded(stage: Stage, tmp_path: Path) -> None:
    stage.send(stage.hello())
    with live(stage.info) as source:
        frames = read_until(source, lambda seen: bool(messages(seen, RankSample)), "a sample")
        stage.finish()
    (sample, *_) = messages(frames, RankSample)
    assert sample.rank == 0
    assert sample.wait_ns is not None
    assert sample in [message for message, _ in Recording(tmp_path / "stage.mcap")]


def test_retention_is_bounded_and_keeps_the_newest(stage: Stage) -> None:
    stage.send(stage.hello(), *[step(n) for n in range(900)])
    with live(stage.info) as first:
        read_until(first, lambda seen: any(m.step == 899 for m in messages(seen, Step)), "all steps")
    with live(stage.info) as late:
        frames = read_until(late, lambda seen: any(m.step == 899 for m in messages(seen, Step)), "the newest step")
        stage.finish()
    assert [m.step for m in messages(frames, Step)] == list(range(900 - 512, 900))


def test_a_rank_whose_process_is_gone_gets_a_goodbye_from_the_collector(stage: Stage) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    hello = stage.hello(0)
    hello.pid = rank.pid
    stage.send(hello, step(1))
    with live(stage.info) as source:
        read_until(source, lambda seen: messages(seen, Step), "the step")
        rank.kill()
        frames = read_until(source, lambda seen: len(messages(seen, Bye)) == 2, "both goodbyes")
    rank.communicate()
    assert [(m.rank, m.reason, m.detail) for m in messages(frames, Bye)] == [
        (0, "killed", "SIGKILL"),
        (None, "killed", ""),
    ]
    assert stage.process.wait(PATIENCE_S) == 0


def test_a_rank_that_died_before_it_was_followed_does_not_keep_the_collector(
    run_directory: Path, tmp_path: Path
) -> None:
    """One whose pid nobody has, and one whose pid another process has by now."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    stage = Stage(tmp_path / "stage.mcap", world_size=2)
    try:
        stage.send(stage.hello(0, pid=gone.pid), stage.hello(1, start_ticks=start_ticks(os.getpid()) - 1))
        with live(stage.info) as source:
            frames = read_until(source, lambda seen: len(messages(seen, Bye)) == 3, "all goodbyes")
        assert {(m.rank, m.reason) for m in messages(frames, Bye)} == {(0, "lost"), (1, "lost"), (None, "lost")}
        assert stage.process.wait(PATIENCE_S) == 0
    finally:
        stage.close()


def test_a_recording_that_cannot_be_written_is_reported(run_directory: Path, tmp_path: Path) -> None:
    stage = Stage(tmp_path / "missing" / "file.mcap")
    try:
        stage.send(stage.hello(), step(1))
        with live(stage.info) as source:
            frames = read_until(
                source, lambda seen: any(s.recording_error for s in messages(seen, Status)), "the recording's error"
            )
            stage.finish()
        assert "No such file or directory" in messages(frames, Status)[-1].recording_error
    finally:
        stage.close()


def test_through_ssh_that_dies_in_the_middle(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step comes once. What newer messages replaced meanwhile, such as a status, does not come again."""
    monkeypatch.setenv("DDPWATCH_SSH", str(FakeSsh(tmp_path).path))
    monkeypatch.setattr(link, "PAUSES_S", (0.01,))
    stage.send(stage.hello(), *map(step, range(100)))
    with live(stage.info) as here:  # the run is published
        read_until(here, lambda seen: any(m.step == 99 for m in messages(seen, Step)), "the steps")
    source = LiveSource(f"ssh://node/{stage.run_id}")
    try:
        frames = read_until(source, lambda seen: any(m.step == 50 for m in messages(seen, Step)), "half of them")
        assert isinstance(source._socket, link.SshLink)
        assert source._socket._process is not None
        source._socket._process.kill()
        stage.send(*map(step, range(100, 200)))
        frames += read_until(source, lambda seen: any(m.step == 199 for m in messages(seen, Step)), "the rest")
    finally:
        source.close()
    assert [m.step for m in messages(frames, Step)] == list(range(200))
