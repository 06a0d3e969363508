"""Seeking in a recording, selecting from it, following it, merging its parts; and reading hostile files."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mcap.reader import make_reader

from ddpwatch import open_recording
from ddpwatch.errors import UsageError
from ddpwatch.recording import container
from ddpwatch.recording.follow import FollowSource
from ddpwatch.recording.limits import Limits, environment_of, limits_from_environment, parse_bytes
from ddpwatch.recording.part import Part
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.rotation import RotatingWriter, summary_of
from ddpwatch.recording.seek import Position
from ddpwatch.recording.selection import Selection, parse_ranks, parse_steps, selection_of
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import Beat, BucketLayout, Bye, Device, Group, Hello, Layout, Message, Step, encode
from ddpwatch.wire.transport import Envelope

BEGIN = 1_700_000_000 * 10**9
STEP_NS = 10**8


def step(number: int, rank: int = 0) -> Step:
    return Step(
        rank=rank, step=number, start_ns=number * STEP_NS, duration_ns=STEP_NS, hook_param=[0, 1], hook_ns=[1, 2],
        comm_module=[0], comm_label=[0], comm_bytes=[8], comm_ready=[2], comm_launch=[3], comm_done=[9],
    )  # fmt: skip


def messages(steps: int, ranks: int = 2) -> Iterator[tuple[Message, int]]:
    """A run with receive times: hellos, layouts, steps with heartbeats, ends."""
    for rank in range(ranks):
        yield Hello(run_id="r", rank=rank, world_size=ranks, host="h", pid=1), BEGIN
        yield Layout(rank=rank, params=["w", "b"], buckets=[BucketLayout(0, 8, [0, 1])]), BEGIN
    for number in range(steps):
        for rank in range(ranks):
            yield step(number, rank), BEGIN + (number + 1) * STEP_NS + rank
        if number % 5 == 4:
            yield Beat(rank=0, at_ns=1, step=number, phase="input", since_ns=0), BEGIN + (number + 1) * STEP_NS + 50
    for rank in range(ranks):
        yield Bye(rank=rank, by="rank", reason="finished", at_ns=1), BEGIN + (steps + 1) * STEP_NS


def record(path: Path, steps: int = 40, ranks: int = 2, end: bool = True, limits: Limits | None = None) -> Path:
    writer = RotatingWriter(path, {"run_id": "r"}, limits)
    for number, (message, at) in enumerate(messages(steps, ranks)):
        writer.write_message(message, Envelope(number + 1, at, encode(message)))
        if number % 10 == 9:
            writer.flush()
    if end:
        writer.close()
    else:
        writer.flush()
        writer.abandon()
    return path


def steps_of(frames: object) -> list[tuple[int, int]]:
    return [(m.step, m.rank) for m, _ in frames if isinstance(m, Step)]  # type: ignore[attr-defined]


def kinds_of(frames: object) -> list[str]:
    return [type(m).__name__ for m, _ in frames]  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [True, False])
def test_steps_are_found_through_the_index_and_without_it(end: bool, tmp_path: Path) -> None:
    recording = Recording(record(tmp_path / "a.mcap", end=end))
    assert recording.steps == (0, 39)
    assert steps_of(recording.select(Selection(17, 20))) == [(n, r) for n in (17, 18, 19) for r in (0, 1)]
    found = list(recording.select(Selection(17, 20)))
    assert kinds_of(found)[:4] == ["Hello", "Layout", "Hello", "Layout"]  # the context comes first
    assert kinds_of(found)[-2:] == ["Bye", "Bye"]
    assert recording.cut_tail is not end
    assert steps_of(recording.select(Selection(38))) == [(38, 0), (38, 1), (39, 0), (39, 1)]


def test_kinds_keep_their_bits() -> None:
    """Recordings store them, so a new message type comes last."""
    assert container.KINDS[:8] == ("hello", "layout", "step", "beat", "mark", "device", "bye", "status")
    assert container.kind_bit("something new") == 1 << 15


def test_the_last_chunk_is_in_the_index(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "a.mcap")
    writer.write_message(step(7), Envelope(1, BEGIN, encode(step(7))))
    writer.close()
    assert Recording(tmp_path / "a.mcap").steps == (7, 7)


@pytest.mark.parametrize("end", [True, False])
def test_a_time_is_found(end: bool, tmp_path: Path) -> None:
    recording = Recording(record(tmp_path / "a.mcap", end=end))
    everything = list(recording)
    for number in (0, 1, 7, 23, 39):
        at = BEGIN + (number + 1) * STEP_NS
        found = list(recording.seek(at))
        later = [m for m, e in everything if e.received_ns >= at]
        assert [m for m, _ in found][-len(later) :] == later
        assert steps_of(found)[0] == (number, 0)
        assert recording.find_step(number) == Position(at + 1, number)  # once rank 1 has sent it
    assert recording.find_step(1000) is None
    assert recording.find_step(1000, back=True) == recording.find_step(39)


def test_seeking_reads_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(record(tmp_path / "a.mcap", steps=400))
    chunks = len(recording.parts[0].index)
    opened = []
    real = container.unpack_chunk
    monkeypatch.setattr("ddpwatch.recording.part.unpack_chunk", lambda content: opened.append(1) or real(content))
    assert len(steps_of(recording.select(Selection(200, 202)))) == 4
    assert chunks > 60
    assert len(opened) <= 4  # the first (context), the one or two with the steps, the last (goodbyes)


def test_selecting_ranks(tmp_path: Path) -> None:
    recording = Recording(record(tmp_path / "a.mcap", ranks=4))
    found = list(recording.select(selection_of("3:5", "1-2")))
    assert steps_of(found) == [(3, 1), (3, 2), (4, 1), (4, 2)]
    assert {m.rank for m, _ in found} == {1, 2}


@pytest.mark.parametrize(
    ("text", "meant"), [("3:7", (3, 7)), (":7", (0, 7)), ("3:", (3, None)), ("3", (3, 4)), (None, (0, None))]
)
def test_steps_are_given_as_in_python(text: str | None, meant: tuple[int, int | None]) -> None:
    assert parse_steps(text) == meant


@pytest.mark.parametrize("text", ["", "a:b", "7:3", "3:3", "-1:4", "1:2:3"])
def test_steps_that_are_not_valid(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_steps(text)
    assert error.value.hint


@pytest.mark.parametrize("text", ["", "x", "3-1", "1,,2", "-1", "0-99999999"])
def test_ranks_that_are_not_valid(text: str) -> None:
    with pytest.raises(UsageError):
        parse_ranks(text)


def test_other_mcap_tools_read_it(tmp_path: Path) -> None:
    file = record(tmp_path / "a.mcap")
    with file.open("rb") as stream:
        reader = make_reader(stream, validate_crcs=True)
        summary = reader.get_summary()
        assert summary.statistics.message_count == len(list(messages(40)))
        assert {channel.topic for channel in summary.channels.values()} == {"hello", "layout", "step", "beat", "bye"}
        decoded = [msgspec.msgpack.decode(m.data)["type"] for _, _, m in reader.iter_messages(topics=["step"])]
        assert decoded == ["step"] * 80


# -- parts ---------------------------------------------------------------------------------------------------


def test_a_rotated_recording_reads_as_one(tmp_path: Path) -> None:
    expected = [m for m, _ in Recording(record(tmp_path / "one.mcap", steps=200))]
    rotated = Recording(record(tmp_path / "a.mcap", steps=200, limits=Limits(part_bytes=5000)))
    assert len(rotated.parts) > 3
    assert [m for m, _ in rotated] == expected
    assert [e.seq for _, e in rotated] == list(range(1, len(expected) + 1))
    assert not rotated.cut_tail
    assert rotated.steps == (0, 199)


def test_a_part_can_be_read_alone(tmp_path: Path) -> None:
    record(tmp_path / "a.mcap", steps=200, limits=Limits(part_bytes=5000))
    alone = Recording(tmp_path / "a.0001.mcap")
    assert kinds_of(alone)[:4] == ["Hello", "Layout", "Hello", "Layout"]
    assert len(alone.parts) == 1
    assert len(steps_of(alone)) > 4


def groups_of(frames: object) -> list[Group]:
    return [m for m, _ in frames if isinstance(m, Group)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("limits", [Limits(), Limits(max_bytes=160_000)])
def test_groups_are_known_wherever_reading_starts(limits: Limits, tmp_path: Path) -> None:
    """A rank names its groups once. Without them, only ranks of the default group are compared."""
    groups = [Group(rank=rank, id=number, ranks=[0, 1]) for rank in (0, 1) for number in (7, 8)]
    writer = RotatingWriter(tmp_path / "a.mcap", None, limits)
    sent = list(messages(6000))
    sent[30:30] = [(group, sent[30][1]) for group in groups]  # in another chunk than hellos and layouts
    for number, (message, at) in enumerate(sent):
        writer.write_message(message, Envelope(number + 1, at, encode(message)))
        if number % 10 == 9:
            writer.flush()
    writer.close()
    recording = Recording(tmp_path / "a.mcap")
    assert recording.dropped_parts > 2 or not limits.max_bytes
    assert groups_of(recording) == groups
    assert groups_of(recording.select(Selection(5900, 5903))) == groups
    assert groups_of(recording.select(Selection(5900, 5903, frozenset({1})))) == groups[2:]
    assert groups_of(recording.seek(BEGIN + 5900 * STEP_NS)) == groups
    assert groups_of(Recording(recording.parts[0].path)) == groups


@pytest.mark.parametrize("end", [True, False])
def test_what_was_sampled_during_long_steps_is_selected_with_them(end: bool, tmp_path: Path) -> None:
    """Between two steps of some seconds lie chunks without any."""
    writer = RotatingWriter(tmp_path / "a.mcap")
    for number in range(1, 101):
        second = BEGIN + number * 10 * STEP_NS
        device = Device(host="h", kind="cpu", at_ns=number)
        writer.write_message(device, Envelope(2 * number, second, encode(device)))
        writer.flush()
        if number % 5 == 0:
            one = step(number // 5)
            writer.write_message(one, Envelope(2 * number + 1, second, encode(one)))
            writer.flush()
    writer.close() if end else writer.abandon()
    recording = Recording(tmp_path / "a.mcap")
    for first in (1, 8, 20):
        found = [m.at_ns for m, _ in recording.select(Selection(first, first + 1)) if isinstance(m, Device)]
        assert found == list(range(max(5 * first - 4, 1), min(5 * first + 5, 100) + 1))
    assert [m for m, _ in recording.select(Selection(8, 9)) if isinstance(m, Step)] == [step(8)]


def test_the_cap_drops_the_oldest_and_says_so(tmp_path: Path) -> None:
    limits = Limits(max_bytes=160_000)
    recording = Recording(record(tmp_path / "a.mcap", steps=6000, limits=limits))
    assert recording.nbytes <= 160_000 + limits.part_limit
    assert recording.dropped_parts > 2
    found = steps_of(recording)
    assert found[-1] == (5999, 1)
    assert found[0][0] > 100
    assert found == [(n, r) for n in range(found[0][0], 6000) for r in (0, 1)][-len(found) :]
    assert kinds_of(recording)[:4] == ["Hello", "Layout", "Hello", "Layout"]


def test_a_part_is_closed_by_age(tmp_path: Path) -> None:
    now = [0.0]
    writer = RotatingWriter(tmp_path / "a.mcap", None, Limits(part_age_s=60), clock=lambda: now[0])
    for number in range(4):
        now[0] += 40
        writer.write_message(step(number), Envelope(number + 1, BEGIN + number, encode(step(number))))
        writer.flush()
    writer.close()
    assert writer.frames == 4
    assert len(Recording(tmp_path / "a.mcap").parts) == 3


def test_summaries_keep_everything_but_hooks(tmp_path: Path) -> None:
    recording = Recording(record(tmp_path / "a.mcap", limits=Limits(every=10)))
    found = {m.step: m for m, _ in recording if isinstance(m, Step) and m.rank == 0}
    assert [number for number, m in found.items() if m.hook_ns] == [0, 10, 20, 30]
    assert found[7] == summary_of(step(7))
    assert found[7].comm_done == [9]


def test_killed_in_the_middle_of_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording can be opened under its name at any moment."""

    class Killed(BaseException):
        pass

    def kill(writer: RecordingWriter, path: Path) -> None:
        writer.abandon()
        raise Killed

    now = [0.0]
    writer = RotatingWriter(tmp_path / "a.mcap", None, Limits(part_age_s=60), clock=lambda: now[0])
    writer.write_message(step(0), Envelope(1, BEGIN, encode(step(0))))
    writer.flush()
    now[0] = 61
    monkeypatch.setattr(RecordingWriter, "move", kill)
    with pytest.raises(Killed):
        writer.flush()
    assert [message.step for message, _ in Recording(tmp_path / "a.mcap") if isinstance(message, Step)] == [0]


def test_a_recordings_name_may_end_in_digits(tmp_path: Path) -> None:
    recording = Recording(record(tmp_path / "run.20261123.mcap", steps=200, limits=Limits(part_bytes=5000)))
    assert len(recording.parts) > 3
    assert recording.missing_parts == 0
    assert len(steps_of(recording)) == 400


def test_a_copy_beside_a_recording_does_not_count(tmp_path: Path) -> None:
    """Nor does one that was made while the recording grew."""
    record(tmp_path / "run.mcap", steps=200, limits=Limits(part_bytes=5000))
    whole = [m for m, _ in Recording(tmp_path / "run.mcap")]
    for name, copied in (("run.mcap", "copy.mcap"), ("run.0001.mcap", "0.mcap"), ("run.mcap", "1.mcap")):
        (tmp_path / copied).write_bytes((tmp_path / name).read_bytes())
    (tmp_path / "1.mcap").write_bytes((tmp_path / "run.mcap").read_bytes()[:-500])
    recording = Recording(tmp_path)
    assert [m for m, _ in recording] == whole
    assert not recording.cut_tail


def test_missing_parts_are_reported(tmp_path: Path) -> None:
    """One in the middle, the oldest, the newest; parts dropped by the cap count separately."""
    record(tmp_path / "a.mcap", steps=200, limits=Limits(part_bytes=5000))
    assert Recording(tmp_path / "a.mcap").missing_parts == 0
    (tmp_path / "a.0002.mcap").unlink()
    (tmp_path / "a.0000.mcap").unlink()
    recording = Recording(tmp_path / "a.mcap")
    assert (recording.missing_parts, recording.dropped_parts) == (2, 0)
    found = {finding["kind"]: finding for finding in report_of(tmp_path / "a.mcap").as_json()["findings"]}
    assert found["missing_parts"]["evidence"] == {"missing_parts": 2}
    assert "dropped_parts" not in found
    assert Recording(tmp_path / "a.0001.mcap").missing_parts == 0  # it was asked for alone
    (tmp_path / "a.mcap").unlink()
    assert Recording(tmp_path).missing_parts == 3
    capped = Recording(record(tmp_path / "b.mcap", steps=6000, limits=Limits(max_bytes=160_000)))
    assert capped.missing_parts == 0
    assert capped.dropped_parts > 2


@pytest.mark.parametrize("selection", [Selection(), Selection(10, 20), Selection(ranks=frozenset({1}))])
def test_losses_are_reported_for_every_selection(selection: Selection, tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "a.mcap")
    for number, (message, at) in enumerate(messages(40)):
        writer.write_message(message, Envelope(number + 1, at, encode(message)))
    writer.close({"lost": "77"}, {"run.json": b"{}"})
    report = report_of(tmp_path / "a.mcap", selection).as_json()
    assert report["recording"]["lost"] == 77
    assert "recording_lost" in [finding["kind"] for finding in report["findings"]]
    data = (tmp_path / "a.mcap").read_bytes()
    (tmp_path / "cut.mcap").write_bytes(data[:-30])  # without a footer
    assert report_of(tmp_path / "cut.mcap", selection).as_json()["recording"]["lost"] == 77


def test_a_newer_minor_format_is_read_with_a_note(tmp_path: Path) -> None:
    for version, notes in (("1", 0), ("1.0", 0), ("1.1", 1), ("1.23", 1)):
        writer = RecordingWriter(tmp_path / f"{version}.mcap", {"schema_version": version})
        writer.write_message(step(0), Envelope(1, BEGIN, encode(step(0))))
        new = msgspec.msgpack.encode({"type": "something new"})
        writer.write(Envelope(2, BEGIN, new), "something new")
        writer.close()
        recording = Recording(tmp_path / f"{version}.mcap")
        assert len(steps_of(recording)) == 1
        assert len(recording.notes) == notes
        assert all(f"newer ddpwatch (format {version})" in note for note in recording.notes)
        assert recording.skipped == 1


@pytest.mark.parametrize("version", ["2", "2.0", "10.1", "", "1.", "1.1.1", "one", "-1", "1" * 99])
def test_a_newer_major_format_is_refused(version: str, tmp_path: Path) -> None:
    RecordingWriter(tmp_path / "a.mcap", {"schema_version": version}).close()
    with pytest.raises(UsageError, match="this ddpwatch reads up to 1"):
        Recording(tmp_path / "a.mcap")


@pytest.mark.parametrize(("text", "nbytes"), [("1M", 1 << 20), ("500MB", 500 << 20), ("1.5 GiB", 3 << 29)])
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


def test_options_become_limits() -> None:
    assert limits_from_environment(environment_of("2GB", 10)) == Limits(max_bytes=2 << 30, every=10)
    assert limits_from_environment(environment_of(None, 1)) == Limits()


@pytest.mark.parametrize("text", ["", "many", "10k", "-5MB", "5 parsecs"])
def test_sizes_that_are_not_valid(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


# -- following -----------------------------------------------------------------------------------------------


def test_a_file_is_followed_while_it_is_written(tmp_path: Path) -> None:
    """Through its rotation to its end, every frame once and in order."""
    sent = [(m, Envelope(n + 1, at, encode(m))) for n, (m, at) in enumerate(messages(100))]
    writer = RotatingWriter(tmp_path / "a.mcap", None, Limits(part_bytes=5000))
    source = FollowSource(tmp_path / "a.mcap", sleep=lambda _: None)
    seen: list[Message] = []
    for number, frame in enumerate(sent):
        writer.write_message(*frame)
        if number % 7 == 6:
            writer.flush()
            while batch := source.read(0):
                seen += [m for m, _ in batch]
            assert not source.over
            assert seen == [m for m, _ in sent[: number + 1]]
    writer.close()
    while not source.over:
        seen += [m for m, _ in source.read(0)]
    source.close()
    assert seen == [m for m, _ in sent]


def test_parts_that_came_while_nobody_looked_are_followed_in_order(tmp_path: Path) -> None:
    """A viewer that was suspended finds several."""
    sent = [(m, Envelope(n + 1, at, encode(m))) for n, (m, at) in enumerate(messages(100))]
    writer = RotatingWriter(tmp_path / "a.mcap", None, Limits(part_bytes=5000))
    source = FollowSource(tmp_path / "a.mcap", sleep=lambda _: None)
    for number, frame in enumerate(sent):
        writer.write_message(*frame)
        if number % 7 == 6:
            writer.flush()
    writer.close()
    seen: list[Message] = []
    while not source.over:
        seen += [m for m, _ in source.read(0)]
    source.close()
    assert len(Recording(tmp_path / "a.mcap").parts) > 3
    assert seen == [m for m, _ in sent]


def test_a_part_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full just then."""
    writer = RotatingWriter(tmp_path / "a.mcap", None, Limits(part_bytes=1))
    source = FollowSource(tmp_path / "a.mcap", sleep=lambda _: None)
    writer.write_message(step(0), Envelope(1, BEGIN, encode(step(0))))

    def fail(*_: object) -> RecordingWriter:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("ddpwatch.recording.rotation.RecordingWriter", fail)
        with pytest.raises(OSError, match="No space"):
            writer.flush()
    writer.abandon()
    assert steps_of(source.read(0)) == [(0, 0)]
    assert source.read(0) == []
    assert not source.over
    writer.reopen()
    writer.write_message(step(1), Envelope(2, BEGIN + 1, encode(step(1))))
    writer.close()
    assert steps_of(source.read(0)) == [(1, 0)]
    assert source.read(0) == []
    assert source.over
    source.close()
    alone = FollowSource(tmp_path / "a.0000.mcap", sleep=lambda _: None)
    assert steps_of(alone.read(0)) == [(0, 0)]
    assert alone.read(0) == []
    assert alone.over
    alone.close()


def test_a_half_written_chunk_is_waited_for(tmp_path: Path) -> None:
    data = record(tmp_path / "a.mcap").read_bytes()
    growing = tmp_path / "b.mcap"
    growing.write_bytes(data[:200])
    source = FollowSource(growing, sleep=lambda _: None)
    seen = []
    for length in range(200, len(data) + 97, 97):
        with growing.open("r+b") as file:
            file.seek(length - 97)
            file.write(data[length - 97 : length])
        seen += source.read(0)
    assert [m for m, _ in seen] == [m for m, _ in messages(40)]
    source.read(0)
    assert source.over
    source.close()


# -- hostile files -------------------------------------------------------------------------------------------


def chunk_of(packed: bytes, size: int, name: bytes = b"zstd") -> bytes:
    content = struct.pack("<QQQII", 1, 2, size, 0, len(name)) + name + struct.pack("<Q", len(packed)) + packed
    return struct.pack("<BQ", 6, len(content)) + content


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """Neither in an honest chunk nor in one that lies about its size."""
    bomb = zstandard.compress(bytes(200 << 20))
    data = record(tmp_path / "a.mcap", end=False).read_bytes()
    for claimed in (200 << 20, 1000):
        (tmp_path / "b.mcap").write_bytes(data + chunk_of(bomb, claimed))
        recording = Recording(tmp_path / "b.mcap")
        assert len(steps_of(recording)) == 80
        assert recording.cut_tail


@settings(max_examples=250)
@example(seed=4770830)  # an attachment of 2⁶³ bytes
@given(seed=st.integers(0, 1 << 30))
def test_damage_anywhere_is_survived(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bits flipped at random offsets: every way of reading gives a prefix, or a UsageError."""
    folder = tmp_path_factory.getbasetemp()
    intact = folder / "intact.mcap"
    data = bytearray((intact if intact.exists() else record(intact)).read_bytes())
    dice = random.Random(seed)
    for _ in range(dice.randint(1, 6)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    file = folder / "damaged.mcap"
    file.write_bytes(data[: dice.randrange(len(data) // 2, len(data) + 1)])
    good = [(n, r) for n in range(40) for r in (0, 1)]
    try:
        recording = Recording(file)
        assert steps_of(recording) == good[: len(steps_of(recording))]
        assert set(steps_of(recording.select(Selection(10, 30)))) <= set(good[20:60])
        list(recording.seek(BEGIN + 20 * STEP_NS))
        recording.attachments()
    except UsageError as error:
        assert "\n" not in error.message  # noqa: PT017 - either is fine


def test_selections_narrow_each_other(tmp_path: Path) -> None:
    opened = open_recording(record(tmp_path / "a.mcap", ranks=4), steps="10:20", ranks="0-2")
    assert steps_of(opened.select(ranks="2-3").frames()) == [(n, 2) for n in range(10, 20)]
    assert steps_of(opened.select(steps="15:99").select(steps=":17", ranks="1").frames()) == [(15, 1), (16, 1)]
    assert steps_of(opened.select(steps="30:40").frames()) == []
    assert steps_of(opened.select(ranks="3").frames()) == []
    assert opened.select().metrics()["steps"] == opened.metrics()["steps"]


def test_a_chunk_made_unrecognisable_is_not_skipped_in_silence(tmp_path: Path) -> None:
    file = record(tmp_path / "a.mcap")
    data = bytearray(file.read_bytes())
    data[Part(file).index[3].offset] ^= 0x80  # its opcode
    file.write_bytes(data)
    recording = Recording(file)
    found = steps_of(recording)
    assert found == [(n, r) for n in range(40) for r in (0, 1)][: len(found)]
    assert 0 < len(found) < 40
    assert recording.cut_tail
    follow = FollowSource(file)
    try:
        followed = []
        while not follow.over:
            followed += steps_of(follow.read(0.0))
        assert followed == found
    finally:
        follow.close()


def test_an_index_that_lies_is_not_believed(tmp_path: Path) -> None:
    """If rows point nowhere or backwards, the reader walks from record to record."""
    file = record(tmp_path / "a.mcap")
    data = file.read_bytes()
    rows = b"".join(row.pack() for row in Part(file).index)
    offset_of_rows = data.rindex(rows)
    for offset in (1 << 60, 0):
        lying = data[: offset_of_rows + 56] + struct.pack("<Q", offset) + data[offset_of_rows + 64 :]
        (tmp_path / "b.mcap").write_bytes(lying)
        recording = Recording(tmp_path / "b.mcap")
        assert len(steps_of(recording.select(Selection(10, 12)))) == 4


def test_what_cannot_be_a_recording(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recording in this directory"):
        Recording(tmp_path)
    with pytest.raises(UsageError, match="no recording was given"):
        Recording([])
    with pytest.raises(UsageError, match="No such file"):
        Recording(tmp_path / "missing.mcap")
