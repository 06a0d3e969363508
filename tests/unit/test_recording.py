"""Recordings: what was written is read, and a cut costs no more than the frames after it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from ddpwatch.cli import app
from ddpwatch.errors import UsageError
from ddpwatch.recording.failing_disk import ResilientWriter
from ddpwatch.recording.limits import Limits
from ddpwatch.recording.names import parts_of, reserve
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.rotation import RotatingWriter
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import Beat, Step, encode
from ddpwatch.wire.transport import Envelope
from tests.support.runs import record


def beat(number: int) -> Beat:
    return Beat(rank=0, at_ns=number, step=number, phase="input", since_ns=0)


def write(path: Path, count: int, flush_every: int = 5, close: bool = True) -> None:
    writer = RecordingWriter(path, {"run_id": "r"})
    for number in range(count):
        writer.write(Envelope(number + 1, 1_000 + number, encode(beat(number))), "beat")
        if number % flush_every == flush_every - 1:
            writer.flush()
    if close:
        writer.close()
    else:
        writer.flush()
        writer.abandon()


def numbers(recording: Recording) -> list[int]:
    return [message.step for message, _ in recording if isinstance(message, Beat)]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.mcap", 23)
    recording = Recording(tmp_path / "a.mcap")
    assert [(m, e.received_ns) for m, e in recording] == [(beat(n), 1_000 + n) for n in range(23)]
    assert (recording.frames, recording.cut_tail, recording.skipped) == (23, False, 0)
    assert recording.metadata["run_id"] == "r"
    assert numbers(recording) == list(range(23))  # a second pass


def test_a_file_without_its_end_is_read_up_to_its_last_flush(tmp_path: Path) -> None:
    write(tmp_path / "a.mcap", 20, close=False)
    recording = Recording(tmp_path / "a.mcap")
    assert numbers(recording) == list(range(20))
    assert recording.cut_tail


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """Never a traceback, always a prefix, and never more than with a later cut."""
    file, shortest = tmp_path / "a.mcap", 20
    write(file, 20)
    assert numbers(Recording(file)) == list(range(20))
    for length in reversed(range(file.stat().st_size)):
        os.truncate(file, length)
        try:
            found = numbers(Recording(file))
        except UsageError:
            found = []
        assert found == list(range(len(found)))
        assert len(found) <= shortest
        shortest = len(found)
    assert shortest == 0


def test_damage_in_the_middle_ends_the_reading_there(tmp_path: Path) -> None:
    write(tmp_path / "a.mcap", 20)
    data = bytearray((tmp_path / "a.mcap").read_bytes())
    offset = data.index(b"zstd", data.index(b"zstd") + 1) + 40  # inside the second chunk
    data[offset : offset + 8] = bytes(8)
    (tmp_path / "a.mcap").write_bytes(data)
    recording = Recording(tmp_path / "a.mcap")
    found = numbers(recording)
    assert found == list(range(len(found)))
    assert len(found) < 20
    assert recording.cut_tail


def test_frames_of_unknown_type_are_skipped_and_counted(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "a.mcap")
    for number, frame in enumerate([encode(beat(0)), msgspec.msgpack.encode({"type": "new"}), encode(beat(1))]):
        writer.write(Envelope(number, number + 1, frame), "beat")
    writer.close()
    recording = Recording(tmp_path / "a.mcap")
    assert numbers(recording) == [0, 1]
    assert recording.skipped == 1
    found = report_of(tmp_path / "a.mcap").as_json()["findings"]
    assert [finding["kind"] for finding in found] == ["skipped"]
    assert found[0]["message"].startswith("frames left out: 1, ")


def test_who_reads_only_a_part_of_a_recording_says_so(tmp_path: Path) -> None:
    """Reports have it among their notes, and the dashboard says it at the end."""
    whole, part = record(tmp_path / "whole.mcap"), tmp_path / "part.mcap"
    writer = RecordingWriter(part)
    for message, envelope in Recording(whole):
        writer.write_message(message, envelope)
    writer.write(Envelope(1000, envelope.received_ns, msgspec.msgpack.encode({"type": "new"})), "beat")
    writer.close()
    said = "frames left out: 1, damaged or of a type unknown to this version of ddpwatch"
    for command in (
        ["compare", str(whole)],
        ["export", f"--output={tmp_path / 'out.json'}"],
        ["replay", "--plain"],
        ["whatif"],
    ):
        done = CliRunner().invoke(app, [*command, str(part)])
        assert said in done.output, (command, done.output)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89MCAP0\r\n", b"\x89MCAP0\r\n" + bytes(100)])
def test_what_is_not_a_recording_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.mcap").write_bytes(content)
    with pytest.raises(UsageError) as error:
        report_of(tmp_path / "a.mcap").as_json()
    assert error.value.exit_code == 2
    assert "\n" not in error.value.message
    assert error.value.hint


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpwatch.recording.writer.SCHEMA_VERSION", 2)
    write(tmp_path / "a.mcap", 1)
    with pytest.raises(UsageError, match=r"recorded in format '2\.0'"):
        Recording(tmp_path / "a.mcap")


def test_a_file_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        RecordingWriter(tmp_path / "missing" / "a.mcap")


def test_a_recorded_step_is_small(tmp_path: Path) -> None:
    """60 events a step (50 hooks, 10 bucket stamps) with jitter, in chunks of a second at 10 steps/s."""
    writer = RecordingWriter(tmp_path / "a.mcap")
    for number in range(100):
        jitter = [(number * 7919 + i * 104729) % 50_000 for i in range(60)]
        step = Step(
            rank=0, step=number, start_ns=10**15 + number * 10**8, duration_ns=10**8 + jitter[0],
            hook_param=list(range(50)), hook_ns=[10**6 * i + jitter[i] for i in range(50)],
            comm_module=[0] * 5, comm_label=list(range(5)), comm_bytes=[1 << 20] * 5,
            comm_ready=[10**7 * i for i in range(5)], comm_launch=[10**7 * i + jitter[50 + i] for i in range(5)],
            comm_done=[10**7 * i + 5 * 10**6 + jitter[55 + i] for i in range(5)],
        )  # fmt: skip
        writer.write(Envelope(number + 1, 10**18 + number * 10**8, encode(step)), "step")
        if number % 10 == 9:
            writer.flush()
    writer.close()
    assert (tmp_path / "a.mcap").stat().st_size / 100 <= 600


# -- what is there already -----------------------------------------------------------------------------------


def test_a_recording_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "a.mcap"
    RecordingWriter(file).close()
    before = file.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        RecordingWriter(file)
    assert file.read_bytes() == before
    (tmp_path / "empty.mcap").touch()
    RecordingWriter(tmp_path / "empty.mcap").close()


def test_the_parts_of_another_recording_are_not_overwritten(tmp_path: Path) -> None:
    (part := tmp_path / "a.0000.mcap").write_text("of another")
    with pytest.raises(UsageError, match="exists"):
        RotatingWriter(tmp_path / "a.mcap")
    part.unlink()
    writer = RotatingWriter(tmp_path / "a.mcap", None, Limits(part_bytes=1))
    part.write_text("of another")
    with pytest.raises(FileExistsError):
        writer.flush()
    writer.abandon()
    assert part.read_text() == "of another"
    assert reserve(tmp_path / "a.mcap") == tmp_path / "a-2.mcap"


def test_a_file_that_took_the_name_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a.mcap"
    writer = RotatingWriter(file)
    file.unlink()
    file.write_text("of another")
    with pytest.raises(OSError, match="removed"):
        writer.flush()
    with pytest.raises(FileExistsError):
        writer.reopen()
    writer.abandon()
    assert file.read_text() == "of another"


def test_a_reserved_name_is_free_for_its_recorder_only(tmp_path: Path) -> None:
    file, other = reserve(tmp_path / "a.mcap"), reserve(tmp_path / "a.mcap")
    assert [file.name, other.name] == ["a.mcap", "a-2.mcap"]
    assert not file.exists()  # a job that is killed now leaves no recording that cannot be read
    RotatingWriter(file).close()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".mcap"] == ["a.mcap"]
    os.utime(tmp_path / "a-2.mcap.next", times=(0, 0))
    assert reserve(tmp_path / "a.mcap").name == "a-2.mcap"


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Files cannot grow beyond that: what a disk does that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def add(writer: ResilientWriter, *numbers: int) -> None:
    for number in numbers:
        writer.write_message(beat(number), Envelope(number + 1, 1_000 + number, encode(beat(number))))
    writer.flush()


def test_each_frame_is_kept_or_counted_wherever_the_disk_is_full(tmp_path: Path) -> None:
    """A chunk may be on it, and what describes the chunk not."""
    writer = ResilientWriter(tmp_path / "whole.mcap", {}, Limits())
    sizes = []
    for number in (0, 2):
        add(writer, number, number + 1)
        sizes.append(writer.nbytes or 0)
    writer.close()
    for room in range(*sizes):
        file = tmp_path / f"{room}.mcap"
        writer = ResilientWriter(file, {}, Limits(), retry_s=0.0)
        add(writer, 0, 1)
        with room_for(room):
            add(writer, 2, 3)
        add(writer, 4, 5)
        writer.close()
        assert (numbers(Recording(file)), writer.lost) == ([0, 1, 4, 5], 2)


def test_what_reached_the_disk_is_not_lost_if_the_next_part_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> RecordingWriter:
        raise OSError(28, "No space left on device")

    writer = ResilientWriter(tmp_path / "a.mcap", {}, Limits(part_bytes=1))
    monkeypatch.setattr(RotatingWriter, "_next_writer", full)
    add(writer, 0, 1)
    assert writer.error == "No space left on device"
    assert (numbers(Recording(tmp_path / "a.mcap")), writer.lost) == ([0, 1], 0)


def died(path: Path, first: int, limits: Limits | None = None, resume: bool = True) -> None:
    """What a recorder leaves that is killed after a few frames, of which the oldest parts may be gone by the cap."""
    writer = RotatingWriter(path, {"run_id": "r"}, limits, resume=resume)
    for number in range(first, first + 5):
        writer.write_message(beat(number), Envelope(number + 1, 1_000 + number, encode(beat(number))))
        writer.flush()
    writer.abandon()


def test_another_recorder_goes_on_with_a_recording(tmp_path: Path) -> None:
    file = tmp_path / "a.mcap"
    for first in (0, 5, 10):
        died(file, first)
    recording = Recording(file)
    assert numbers(recording) == list(range(15))
    assert (len(recording.parts), recording.missing_parts, recording.dropped_parts) == (3, 0, 0)
    file.rename(tmp_path / "a.0002.mcap")  # killed before the next part had the name
    died(file, 15)
    assert numbers(Recording(file)) == list(range(20))


def test_it_keeps_to_the_cap(tmp_path: Path) -> None:
    write(one := tmp_path / "one.mcap", 1)  # about as large as a part, most of which says what a heartbeat is
    file, limits = tmp_path / "parts" / "a.mcap", Limits(max_bytes=4 * one.stat().st_size, part_bytes=700)
    file.parent.mkdir()
    for first in range(0, 40, 5):
        died(file, first, limits)
    recording = Recording(file)
    assert sum(path.stat().st_size for path in file.parent.iterdir()) <= 4 * one.stat().st_size
    assert recording.dropped_parts > 0
    assert recording.missing_parts == 0
    kept = numbers(recording)
    assert kept == list(range(kept[0], 40))


def test_the_cap_removes_no_other_recording(tmp_path: Path) -> None:
    """One whose name looks like that of an older part."""
    write(one := tmp_path / "one.mcap", 1)
    file, other = tmp_path / "parts" / "a.mcap", tmp_path / "parts" / "a.2024.mcap"
    limits = Limits(max_bytes=4 * one.stat().st_size, part_bytes=700)
    file.parent.mkdir()
    died(file, 0, limits)
    write(other, 1)
    for first in range(5, 40, 5):
        died(file, first, limits)
    assert other.exists()
    recording = Recording(file)
    assert recording.dropped_parts > 0
    assert recording.missing_parts == 0


def test_parts_beyond_ten_thousand_are_its_own(tmp_path: Path) -> None:
    """On a fast job with a small cap, they come within a day."""
    died(tmp_path / "a.mcap", 0)
    part = tmp_path / "a.mcap"
    for number in (9999, 10_000):
        (tmp_path / f"a.{number}.mcap").write_bytes(part.read_bytes())
    (tmp_path / "a.20261123.mcap").write_bytes(part.read_bytes())  # a recording of its own
    assert [path.name for path in parts_of(part)] == ["a.9999.mcap", "a.10000.mcap"]


def test_it_does_not_adopt_the_recording_of_another_run(tmp_path: Path) -> None:
    write(file := tmp_path / "a.mcap", 5)
    before = file.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        RotatingWriter(file, {"run_id": "another"}, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mcap"]
    assert file.read_bytes() == before
