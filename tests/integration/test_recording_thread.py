"""The recorder with disks that are full, removed or slow; kills; and equal figures live and in a replay."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.analysis.window import summarise
from ddpwatch.collector import recording_thread
from ddpwatch.collector.recording_thread import RecordingThread
from ddpwatch.recording.limits import Limits
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.run import rundir
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Beat, Bye, Hello, Layout, Message, Status, Step, decode, encode
from ddpwatch.wire.transport import Envelope
from tests.integration.test_collector import Stage
from tests.support import frames
from tests.support.jobs import DDPWATCH, ddpwatch, live, messages, read_until, wait_for
from tests.support.runs import hello_of, run_of, step_of


def test_a_collector_starts_without_what_it_needs_later() -> None:
    """The diagnosis takes half of its imports, and a short job on a busy machine may end before it is there."""
    code = "import sys, ddpwatch.collector.__main__ as _; print([name for name in sys.modules if 'diagnosis' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[RecordingThread]:
    started = RecordingThread(str(tmp_path / "disk" / "a.mcap"), {"run_id": "r"}, Limits(), retry_s=0.05)
    yield started
    started.finish()


def feed(recorder: RecordingThread, first: int, count: int, payload: int = 0) -> None:
    for number in range(first, first + count):
        message: Message = step_of(0, number)
        if payload:
            noise = random.Random(number).choices(range(1 << 60), k=payload // 8)
            message.hook_param, message.hook_ns = list(range(len(noise))), noise
        recorder.take_frame(message, Envelope(number + 1, time.time_ns(), encode(message)))


def steps_in(file: Path) -> list[int]:
    return [m.step for m, _ in Recording(file) if isinstance(m, Step)]


def test_frames_reach_the_disk_while_what_sums_them_up_is_imported(
    recorder: RecordingThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes seconds on a busy machine, and a kill may come meanwhile."""
    imports, imported = threading.Event(), threading.Event()
    monkeypatch.setattr(recording_thread, "import_module", lambda _: imports.set() or imported.wait())
    (tmp_path / "disk").mkdir()
    feed(recorder, 0, 5)
    recorder.start()
    try:
        assert imports.wait(60)
        feed(recorder, 5, 5)
        wait_for(lambda: steps_in(tmp_path / "disk" / "a.mcap") == list(range(10)), "all are on the disk")
    finally:
        imported.set()


# -- disks ---------------------------------------------------------------------------------------------------


def test_a_directory_that_vanishes_and_comes_back(recorder: RecordingThread, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    recorder.start()
    feed(recorder, 0, 5)
    wait_for(lambda: recorder.state.nbytes, "the first flush")
    shutil.rmtree(folder)
    wait_for(lambda: recorder.state.error, "the loss is noticed")
    assert "removed" in recorder.state.error or "No such file" in recorder.state.error
    feed(recorder, 5, 5)
    wait_for(lambda: recorder.lost >= 5, "the loss is counted")
    folder.mkdir()
    wait_for(lambda: (folder / "a.mcap").exists(), "it goes on")
    feed(recorder, 10, 5)
    recorder.finish()
    assert steps_in(folder / "a.mcap") == list(range(10, 15))
    assert report_of(folder / "a.mcap").as_json()["recording"]["lost"] >= 5
    assert "frames lost" in recorder.state.error
    following = RecordingThread(str(folder / "a.mcap"), {"run_id": "r"}, Limits(), resume=True)
    following.start()
    feed(following, 15, 1)
    wait_for(lambda: following.state.nbytes, "the next collector records")
    following.finish()
    assert following.state.error == f"{recorder.lost} frames lost"


def test_an_error_in_the_middle_continues_in_a_new_part(
    recorder: RecordingThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    recorder.start()
    feed(recorder, 0, 5)
    wait_for(lambda: recorder.state.nbytes, "the first flush")
    monkeypatch.setattr("ddpwatch.recording.mcap_writer.McapWriter.close_chunk", broken)
    feed(recorder, 5, 3)
    wait_for(lambda: recorder.lost >= 3, "the loss is counted")
    monkeypatch.undo()
    wait_for(lambda: (tmp_path / "disk" / "a.0000.mcap").exists(), "the next part starts")
    feed(recorder, 8, 5)
    recorder.finish()
    assert steps_in(tmp_path / "disk" / "a.mcap") == [*range(5), *range(8, 13)]


def broken(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(recorder: RecordingThread, tmp_path: Path) -> None:
    """What was written stays readable, losses are counted, and recording resumes once there is room again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        (disk / "other").write_bytes(bytes(120_000))
        recorder.start()
        for batch in range(100):
            feed(recorder, batch, 1, payload=16_000)
            wait_for(lambda: not recorder._queue, "the batch is taken")
            if recorder.state.error:
                break
        assert "No space left on device" in recorder.state.error
        written = steps_in(disk / "a.mcap")
        assert written == list(range(len(written)))
        assert len(written) >= 3
        (disk / "other").unlink()
        wait_for(lambda: (disk / "a.0000.mcap").exists(), "it goes on in a new part")
        feed(recorder, 1000, 3)
        recorder.finish()
        assert steps_in(disk / "a.mcap")[-3:] == [1000, 1001, 1002]
        assert report_of(disk / "a.mcap").as_json()["recording"]["lost"] == recorder.lost >= 1
    finally:
        recorder.finish()
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_does_not_answer_delays_nobody(
    recorder: RecordingThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames queue up to the limit; those beyond it are lost and counted, and taking a frame never waits."""
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("ddpwatch.collector.recording_thread.BACKLOG_BYTES", 10_000)
    feed(recorder, 0, 200)  # its thread has not started, so nothing is written
    assert recorder.lost > 100
    assert "the disk is too slow" in recorder.state.error
    recorder.start()
    recorder.finish()
    kept = steps_in(tmp_path / "disk" / "a.mcap")
    assert len(kept) + recorder.lost == 200


def test_a_backlog_loses_no_hello_and_no_layout(
    recorder: RecordingThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make all else readable. Even of them, no sender can queue without bound."""
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("ddpwatch.collector.recording_thread.BACKLOG_BYTES", 10_000)
    monkeypatch.setattr("ddpwatch.collector.recording_thread.RESERVED_BYTES", 30_000)
    feed(recorder, 0, 200)  # its thread has not started, so nothing is written
    for rank in range(20):
        for message in (hello_of(rank, 20), frames.layout(rank)):
            recorder.take_frame(message, Envelope(201 + rank, time.time_ns(), encode(message)))
    refused = recorder.lost
    flood = frames.layout(0)
    flood.params = ["weight" * 100] * 1000
    for number in range(100):
        recorder.take_frame(flood, Envelope(300 + number, time.time_ns(), encode(flood)))
    assert recorder.lost - refused > 90
    recorder.start()
    recorder.finish()
    recorded = [message for message, _ in Recording(tmp_path / "disk" / "a.mcap")]
    assert {m.rank for m in recorded if isinstance(m, Hello)} == set(range(20))
    assert {m.rank for m in recorded if isinstance(m, Layout)} == set(range(20))


@pytest.mark.parametrize("message", [frames.beat(0, 1, "sync"), step_of(0, 1)], ids=["heartbeats", "steps"])
def test_a_backlog_takes_no_more_memory_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    """Small frames cost more than their bytes, and decoded ones several times as much."""
    recorder = RecordingThread(str(tmp_path / "a.mcap"), {}, Limits())  # not started, so nothing is written
    limit, frame = 1 << 20, encode(message)
    monkeypatch.setattr("ddpwatch.collector.recording_thread.BACKLOG_BYTES", limit)
    tracemalloc.start()
    try:
        before, number = tracemalloc.get_traced_memory()[0], 0
        while not recorder.lost:
            number += 1
            received = bytes(bytearray(frame))  # each a copy of its own
            recorder.take_frame(decode(received), Envelope(number << 40, time.time_ns(), received))
        assert 0.5 * limit < tracemalloc.get_traced_memory()[0] - before < 1.2 * limit
    finally:
        tracemalloc.stop()


def test_a_bug_in_the_recorder_is_reported_and_counted(
    recorder: RecordingThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise ZeroDivisionError

    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("ddpwatch.recording.mcap_writer.McapWriter.add_message", wrong)
    recorder.start()
    feed(recorder, 0, 1)
    wait_for(lambda: not recorder.is_alive(), "the recorder gives up")
    feed(recorder, 1, 3)
    assert recorder.state.error == "the recorder failed: ZeroDivisionError; 4 frames lost"


# -- kill -9 -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("run_directory")
def test_a_bug_in_the_diagnosis_does_not_cut_the_recording_off(
    recorder: RecordingThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttachmentBuilder, "documents", lambda builder: 1 / 0)
    (tmp_path / "disk").mkdir()
    recorder.start()
    feed(recorder, 0, 5)
    recorder.finish()
    file = tmp_path / "disk" / "a.mcap"
    assert Recording(file).parts[0].index.complete
    assert steps_in(file) == list(range(5))


def test_a_recording_is_summed_up_however_long_that_takes(
    recorder: RecordingThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine whose cores are taken."""
    monkeypatch.setattr(recording_thread, "CLOSE_S", 0.01)
    begun, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(AttachmentBuilder, "documents", lambda builder: begun.set() or (goes_on.wait(60) and {}))
    (tmp_path / "disk").mkdir()
    recorder.start()
    feed(recorder, 0, 5)
    closing = threading.Thread(target=recorder.finish, args=(0.01,))
    closing.start()
    assert begun.wait(60)
    closing.join(0.2)
    assert closing.is_alive()
    goes_on.set()
    closing.join(60)
    assert Recording(tmp_path / "disk" / "a.mcap").parts[0].index.complete


def test_a_killed_viewer_that_records_harms_nobody(tmp_path: Path) -> None:
    """It waits for a run. After a kill of `ddpwatch record` its file is readable, and the run continues."""
    record = [*DDPWATCH, "record", "-o", str(tmp_path / "b.mcap")]
    viewer = subprocess.Popen(record, stderr=subprocess.PIPE, text=True)
    assert viewer.stderr is not None
    assert viewer.stderr.readline().startswith("ddpwatch: waiting for a run")
    stage = Stage(tmp_path / "own.mcap")
    try:
        stage.send(stage.hello(), *[step_of(0, n) for n in range(20)])
        wait_for(lambda: stage.run_id in [info.run_id for info in rundir.live_runs()], "the run is listed")
        wait_for(lambda: (tmp_path / "b.mcap").exists() and _has_steps(tmp_path / "b.mcap", 20), "it records")
        viewer.kill()
        viewer.communicate()
        stage.send(*[step_of(0, n) for n in range(20, 30)])
        stage.finish()
        assert steps_in(tmp_path / "own.mcap") == list(range(30))
        assert steps_in(tmp_path / "b.mcap") == list(range(20))
    finally:
        stage.close()


def _has_steps(file: Path, count: int) -> bool:
    try:
        return len(steps_in(file)) >= count
    except Exception:  # it was created just now
        return False


# -- live and replayed ---------------------------------------------------------------------------------------


def snapshot(state: RunState) -> object:
    """Everything that a view shows of a state."""
    newest = state.newest_step()
    return (
        state.run_id, state.world_size, state.now_ns, state.frames, list(state.steps),
        state.diagnosis.incidents(), state.diagnosis.lost(),
        {rank: state.status_of(rank) for rank in state.ranks}, state.end,
        None if newest is None else (newest.step, dict(newest.figures), newest.skew),
    )  # fmt: skip


@pytest.mark.usefixtures("run_directory")
def test_live_and_replay_agree_after_every_frame(tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    stage = Stage(file, world_size=2)
    shown = RunState()
    lived = []
    try:
        with live(stage.info) as source:
            # It has its snapshot, from which older statuses are missing: what comes now it sees as it is recorded.
            read_until(source, lambda seen: len(messages(seen, Status)) > 1, "two statuses")
            stage.send(*[m for m, _ in run_of(ranks=2, steps=40, seed=3) if not isinstance(m, Bye)])
            stage.send(Beat(rank=1, at_ns=5, step=39, phase="sync", since_ns=1, in_flight=[1]))
            frames = read_until(source, lambda seen: len(messages(seen, Step)) == 80, "all steps")
            frames += read_until(source, lambda seen: messages(seen, Status), "a status")
            stage.send(*[Bye(rank=rank, by="rank", reason="finished", at_ns=9) for rank in (0, 1)])
            frames += read_until(source, lambda seen: any(m.rank is None for m in messages(seen, Bye)), "the end")
        stage.process.wait()
    finally:
        stage.close()
    recorded = list(Recording(file))
    offset = next(
        n for n, (m, e) in enumerate(recorded) if (m, e.received_ns) == (frames[0][0], frames[0][1].received_ns)
    )
    for message, envelope in frames:
        shown.apply_message(message, envelope.received_ns)
        lived.append(snapshot(shown))
    replayed = RunState()
    for number, (message, envelope) in enumerate(recorded[offset : offset + len(frames)]):
        replayed.apply_message(message, envelope.received_ns)
        assert snapshot(replayed) == lived[number]
    assert asdict(summarise(replayed.recent())) == asdict(summarise(shown.recent()))
    assert len(lived) > 90


# -- the run's end in the file, and the verbs -----------------------------------------------------------------


@pytest.mark.usefixtures("run_directory")
def test_environment_limits_and_what_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_RECORD_EVERY", "10")
    stage = Stage(tmp_path / "run.mcap")
    try:
        stage.send(stage.hello(), *[step_of(0, n) for n in range(30)])
        stage.finish()
    finally:
        stage.close()
    recording = Recording(tmp_path / "run.mcap")
    assert [m.step for m, _ in recording if isinstance(m, Step) and m.hook_ns] == [0, 10, 20]
    assert {"run.json", "findings.json"} <= recording.attachments().keys()
    assert b'"exposed_comm"' in recording.attachments()["findings.json"]


def test_the_verbs(tmp_path: Path) -> None:
    from tests.support.runs import record

    file, other = record(tmp_path / "a.mcap", run_of(steps=40, seed=1)), tmp_path / "b.mcap"
    record(other, run_of(steps=40, seed=2, slower=1.3))
    done = ddpwatch("compare", str(file), str(other), "--fail-if-slower", "5%")
    assert done.returncode == 1
    assert "b is " in done.stdout
    assert "more than 5.0%" in done.stderr
    done = ddpwatch("report", str(file), "--markdown", "--steps", "10:20")
    assert done.returncode == 0
    assert "10 steps" in done.stdout
    done = ddpwatch("report", str(file), "--steps", "500:600")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"ddpwatch: error: {file}: it has none of the selected steps and ranks\n"
        "hint: it has the steps 0 to 39 of the ranks 0 to 1\n"
    )
    done = ddpwatch("export", str(file), "--format", "chrome", "-o", str(tmp_path / "trace.json"))
    assert done.returncode == 0
    assert "ui.perfetto.dev" in done.stderr
    done = ddpwatch("replay", str(file), "--plain", "--follow")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) >= 3
