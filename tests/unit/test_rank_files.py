"""Rank files: failing disks, which runs are read together, and following all files at once."""

from __future__ import annotations

import json
import resource
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.recording import follow, rank_file
from ddpwatch.recording.failing_disk import ResilientWriter
from ddpwatch.recording.follow import FollowSource
from ddpwatch.recording.limits import Limits
from ddpwatch.recording.rank_file import RankFile
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import Beat, Bye, Hello, Message, Step, encode
from ddpwatch.wire.transport import Envelope, ReceiveClock
from tests.support.frames import layout
from tests.support.runs import hello_of, step_of


@pytest.fixture(autouse=True)
def _one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files write at once, by one clock: two of them may differ by more than steps here do."""
    monkeypatch.setattr("ddpwatch.recording.rank_file.FLUSH_S", 0.0)
    clock = ReceiveClock()
    monkeypatch.setattr(rank_file, "ReceiveClock", lambda: clock)


def hello(rank: int = 0, run_id: str = "train-1", world: int = 2) -> Hello:
    return msgspec.structs.replace(hello_of(rank, world), run_id=run_id)


def started(folder: Path, rank: int = 0, run_id: str = "train-1", world: int = 2) -> RankFile:
    """A rank file with its hello; it retries a failed disk at every frame."""
    file = RankFile(folder, hello(rank, run_id, world), retry_s=0.0)
    file.send(encode(hello(rank, run_id, world)))
    return file


def add(file: RankFile, rank: int, *steps: int) -> None:
    for number in steps:
        file.send(encode(step_of(rank, number)))


def recorded(folder: Path, rank: int = 0, run_id: str = "train-1", steps: int = 5, world: int = 2) -> Path:
    file = started(folder, rank, run_id, world)
    add(file, rank, *range(steps))
    file.send(encode(Bye(rank=rank, by="rank", reason="finished", at_ns=1)))
    file.close()
    return file.path


def steps_of(frames: object) -> list[tuple[int, int]]:
    return [(m.step, m.rank) for m, _ in frames if isinstance(m, Step)]  # type: ignore[attr-defined]


def kinds(folder: Path) -> dict[str, dict[str, object]]:
    return {finding["kind"]: finding for finding in report_of(folder).as_json()["findings"]}


# -- one file ------------------------------------------------------------------------------------------------


def test_files_of_ranks_are_merged(tmp_path: Path) -> None:
    files = [started(tmp_path, rank, "my run/1") for rank in (1, 0)]
    for number in range(3):
        for rank, file in zip((1, 0), files, strict=True):
            add(file, rank, number)
    for file in files:
        file.close()
    assert files[1].path == tmp_path / "my-run-1" / "rank00000.mcap"
    (tmp_path / "my-run-1" / "notes.mcap").write_text("no recording")
    recording = Recording(tmp_path)
    frames = list(recording)
    times = [e.received_ns for _, e in frames]
    assert times == sorted(times)
    assert steps_of(frames) == [(n, r) for n in range(3) for r in (1, 0)]
    assert recording.rank_files == [0, 1]
    assert len(recording.notes) == 1
    assert "not an MCAP recording" in recording.notes[0]


def test_a_file_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    first, second, third = (recorded(tmp_path, steps=n) for n in (3, 4, 5))
    assert [p.parent.name for p in (first, second, third)] == ["train-1", "train-1-2", "train-1-3"]
    assert len(steps_of(Recording(first))) == 3
    assert len(steps_of(Recording(tmp_path))) == 5  # the newest, and none of the others


def test_who_ran_is_attached(tmp_path: Path) -> None:
    """The same document as the collector's, for this rank alone; findings need all ranks."""
    bye = Bye(rank=0, by="rank", reason="exception", detail="X", at_ns=7, step=3, phase="sync", in_flight=[1])
    file = started(tmp_path)
    add(file, 0, 0, 1)
    file.send(encode(bye))
    file.close()
    attachments = AttachmentBuilder()
    for message in (hello(), bye):
        attachments.apply_message(message)
    found = Recording(file.path).attachments()
    assert json.loads(found["run.json"]) == json.loads(attachments.documents()["run.json"])
    assert "findings.json" not in found


def remove_the_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def remove_everything(path: Path) -> None:
    shutil.rmtree(path.parent.parent)


def remove_the_file(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("strike", [remove_the_file, remove_the_folder, remove_everything])
def test_recording_starts_again_after_its_files_are_removed(strike: object, tmp_path: Path) -> None:
    file = started(tmp_path / "files")
    add(file, 0, 0, 1, 2)
    strike(file.path)  # type: ignore[operator]
    add(file, 0, 3, 4, 5, 6)
    file.close()
    assert 1 <= file.lost <= 3
    report = report_of(tmp_path / "files").as_json()
    assert report["recording"]["lost"] == file.lost
    assert report["run"]["world_size"] == 2  # the hello is repeated
    assert report["ranks"][0]["steps"] == 4 - file.lost
    assert {"recording_lost", "missing_parts", "missing_ranks"} <= kinds(tmp_path / "files").keys()
    assert kinds(tmp_path / "files")["recording_lost"]["evidence"] == {"lost": file.lost}


def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = started(tmp_path)
    add(file, 0, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr("ddpwatch.recording.mcap_writer.McapWriter.close_chunk", full)
        add(file, 0, 2, 3)
    add(file, 0, 4, 5)
    file.close()
    assert file.lost == 2
    assert steps_of(Recording(file.path)) == [(n, 0) for n in (0, 1, 4, 5)]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]  # at once, and the sum at the end
    assert "No space left on device" in caplog.text
    assert "2 frames" in caplog.text


def test_a_layout_that_comes_while_the_disk_is_full_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next part has it, and it is no repetition. What the parts before have is repeated there, and read once."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = started(tmp_path)
    add(file, 0, 0)
    with monkeypatch.context() as patch:
        patch.setattr("ddpwatch.recording.mcap_writer.McapWriter.close_chunk", full)
        file.send(encode(layout(0)))
    add(file, 0, 1)
    file.close()
    frames = [type(message).__name__ for message, _ in Recording(file.path)]
    assert frames == ["Hello", "Step", "Layout", "Step"]


def test_killed_after_a_loss(tmp_path: Path) -> None:
    """The metadata of the next part already counts the loss."""
    file = started(tmp_path)
    add(file, 0, 0)
    file.path.unlink()
    add(file, 0, 1, 2, 3)
    assert file.lost >= 1
    found = report_of(tmp_path).as_json()["recording"]
    file.close()
    assert (found["cut_tail"], found["lost"]) == (True, file.lost)


def test_a_path_that_cannot_be_written_to_at_first(tmp_path: Path) -> None:
    """The hello is recorded late, but it is recorded."""
    (tmp_path / "files").write_text("in the way")
    file = started(tmp_path / "files")
    add(file, 0, 0, 1)
    (tmp_path / "files").unlink()
    add(file, 0, 2, 3)
    file.close()
    assert file.lost == 3
    recording = Recording(tmp_path / "files")
    frames = list(recording)
    assert [type(message).__name__ for message, _ in frames] == ["Hello", "Step", "Step"]
    assert recording.seconds < 60  # not since 1970
    assert recording.lost == 3


def test_a_path_that_can_never_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "files").write_text("in the way")
    file = started(tmp_path / "files")
    add(file, 0, 0, 1)
    file.close()
    assert file.lost == 3
    assert "3 frames" in caplog.text


def test_a_disk_that_fails_twice_in_a_row_keeps_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ResilientWriter(tmp_path / "a.mcap", {}, Limits(), retry_s=0.0)
    now_ns = time.time_ns()
    writer.write_message(hello(), Envelope(1, now_ns, encode(hello())))
    for _ in range(2):
        (tmp_path / "a.mcap").unlink()
        writer.flush()
        writer.flush()
    writer.close()
    assert Recording(tmp_path / "a.mcap").span_ns == (now_ns, now_ns)


def test_a_disk_that_works_again_is_used_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("ddpwatch.recording.failing_disk.time.monotonic", lambda: now_s)
    writer = ResilientWriter(tmp_path / "disk" / "a.mcap", {}, Limits())
    while now_s < 600:
        now_s += 0.25
        writer.flush()
    (tmp_path / "disk").mkdir()
    now_s += 3
    writer.flush()
    was_there = (tmp_path / "disk" / "a.mcap").exists()
    writer.close()
    assert was_there


# -- all files of a run, and only these ----------------------------------------------------------------------


def test_a_rank_without_a_file_is_named(tmp_path: Path) -> None:
    recorded(tmp_path, rank=0, world=3)
    found = kinds(tmp_path)["missing_ranks"]
    assert found["evidence"] == {"ranks": [1, 2], "count": 2}
    assert "2 of 3 ranks (1, 2)" in str(found["message"])
    recorded(tmp_path, rank=2, world=3)
    assert kinds(tmp_path)["missing_ranks"]["evidence"] == {"ranks": [1], "count": 1}
    recorded(tmp_path, rank=1, world=3)
    assert "missing_ranks" not in kinds(tmp_path)


def test_more_files_than_a_process_may_open_by_default(tmp_path: Path) -> None:
    """A job of a thousand ranks has as many, and all are read side by side."""
    for rank in range(40):
        recorded(tmp_path, rank)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
    try:
        assert Recording(tmp_path).rank_files == list(range(40))
        assert len({message.rank for message, _ in Recording(tmp_path) if isinstance(message, Step)}) == 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
        source = FollowSource(tmp_path, sleep=lambda _: None)
        assert len({message.rank for message in read(source) if isinstance(message, Step)}) == 40
        source.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_of_several_runs_the_newest_is_read(tmp_path: Path) -> None:
    """The report leaves out an elastic restart and another job with other ranks."""
    for run_id, ranks, steps in (("b", 4, 7), ("b.1", 2, 3), ("a", 3, 5)):
        for rank in range(ranks):
            recorded(tmp_path, rank, run_id, steps, world=ranks)
    recording = Recording(tmp_path)
    assert sorted(steps_of(recording)) == [(n, r) for n in range(5) for r in range(3)]
    assert recording.notes == [
        f"this is the newest run, {tmp_path / 'a'}; 2 other runs are in the directory, give its path to open it: "
        f"{tmp_path / 'b.1'}, {tmp_path / 'b'}"
    ]
    older = Recording(tmp_path / "b")
    assert len(steps_of(older)) == 28
    assert older.notes == []
    assert report_of(tmp_path).as_json()["recording"]["notes"] == recording.notes


def test_recordings_that_do_not_name_their_run_are_kept_apart(tmp_path: Path) -> None:
    for number, (folder, run_id) in enumerate([("x", "r"), ("y", "r"), ("y", "s")]):
        (tmp_path / folder).mkdir(exist_ok=True)
        writer = RecordingWriter(tmp_path / folder / f"{number}.mcap", {"recorder": "viewer"})
        writer.write_message(hello(0, run_id), Envelope(1, 10**18 + number, encode(hello(0, run_id))))
        writer.close()
    recording = Recording(tmp_path)
    assert [message.run_id for message, _ in recording if isinstance(message, Hello)] == ["s"]
    assert f"{tmp_path / 'y' / '1.mcap'}, {tmp_path / 'x' / '0.mcap'}" in recording.notes[0]


# -- following -----------------------------------------------------------------------------------------------


def read(source: FollowSource) -> list[Message]:
    found: list[Message] = []
    while batch := source.read(0.0):
        found += [message for message, _ in batch]
    return found


def test_all_files_are_followed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order of time, to the end of the last one, and including one that starts later."""
    monkeypatch.setattr(follow, "SEARCH_S", 0.0)
    recorded(tmp_path, 0, "an older run")
    files = [started(tmp_path, 0)]
    source = FollowSource(tmp_path, sleep=lambda _: None)
    assert [type(m).__name__ for m in read(source)] == ["Hello"]
    files.append(started(tmp_path, 1))
    seen = read(source)
    for number in range(20):
        for rank, file in enumerate(files):
            add(file, rank, number)
        seen += read(source)
        assert not source.over
    steps = [(m.step, m.rank) for m in seen if isinstance(m, Step)]
    assert steps == [(n, r) for n in range(20) for r in (0, 1)][: len(steps)]
    assert len(steps) >= 39  # the newest frame waits for one of the other rank
    files[0].close()
    assert not source.over
    files[1].close()
    seen += read(source)
    assert len([m for m in seen if isinstance(m, Step)]) == 40
    assert source.over
    source.close()


def test_a_rank_that_is_behind_is_waited_for_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "HOLD_S", 600.0)
    files = [started(tmp_path, rank) for rank in (0, 1)]
    source = FollowSource(tmp_path, sleep=lambda _: None)
    read(source)
    add(files[0], 0, 0, 1, 2)
    assert not [m for m in read(source) if isinstance(m, Step)]
    files[1].send(encode(Beat(rank=1, at_ns=1, step=0, phase="input", since_ns=0)))
    assert len([m for m in read(source) if isinstance(m, Step)]) == 3
    add(files[0], 0, 3)
    assert not read(source)[1:]
    monkeypatch.setattr(follow, "HOLD_S", 0.0)
    assert [m.step for m in read(source) if isinstance(m, Step)] == [3]
    source.close()
    for file in files:
        file.close()


def test_a_rank_that_is_in_several_files_is_followed_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's own file beside a recording of all, and a second recording that starts later."""
    monkeypatch.setattr(follow, "SEARCH_S", 0.0)

    def start(name: str) -> RecordingWriter:
        writer = RecordingWriter(tmp_path / name, {"run_id": "train-1"})
        write(writer, hello(0), hello(1))
        return writer

    def write(writer: RecordingWriter, *messages: Message) -> None:
        for message in messages:
            writer.write_message(message, Envelope(1, time.time_ns(), encode(message)))
        writer.flush()

    own, root = started(tmp_path, 0), start("run.mcap")
    source = FollowSource(tmp_path, sleep=lambda _: None)
    seen = read(source)
    later = start("later.mcap")
    for number in range(3):
        add(own, 0, number)
        for writer in (root, later):
            write(writer, step_of(0, number), step_of(1, number))
        seen += read(source)
    for file in (own, root, later):
        file.close()
    seen += read(source)
    assert sorted(m.rank for m in seen if isinstance(m, Hello)) == [0, 1]
    assert sorted((m.step, m.rank) for m in seen if isinstance(m, Step)) == [(n, r) for n in range(3) for r in (0, 1)]
    assert source.over
    source.close()
