"""What cannot be decoded in a recording costs little, however much a small file claims to hold."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import zstandard
from mcap.opcode import Opcode

from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.container import CHUNK, HEAD, LENGTH, MESSAGE, records
from ddpwatch.recording.follow import FollowSource
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import Mark, NodeStep, Step, encode
from ddpwatch.wire.node_step import MAX_UNPACKED
from tests.support.runs import record, run_of

FILE_BYTES = 24 << 10
LIMIT = 60  # times what a healthy file of that size takes, 12 ms; without a bound, some took several thousand times
STEP = encode(Step(rank=0, step=1, start_ns=1, duration_ns=1, hook_param=[1] * 480, hook_ns=[1] * 480))
MARK = encode(Mark(rank=0, kind="user", name="still here", start_ns=1))


def chunk(frames: Iterable[bytes]) -> bytes:
    """A chunk with these messages, packed as small as possible."""
    data = b"".join(
        MESSAGE.pack(Opcode.MESSAGE, MESSAGE.size - HEAD.size + len(frame), 1, 1, 1, 1) + frame for frame in frames
    )
    packed = zstandard.ZstdCompressor(level=19).compress(data)
    content = CHUNK.pack(1, 1, len(data), 0, 4) + b"zstd" + LENGTH.pack(len(packed)) + packed
    return HEAD.pack(Opcode.CHUNK, len(content)) + content


def packed(nbytes: int, content: bytes = b"\xc0") -> bytes:
    """A node's step of two ranks that holds nonsense: a list of as many bytes."""
    count = nbytes // len(content)
    nonsense = zstandard.ZstdCompressor(level=19).compress(b"\xdd" + count.to_bytes(4, "big") + content * count)
    return encode(NodeStep(node=1, step=1, ranks=[0, 1], packed=nonsense))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("healthy") / "run.mcap", run_of(steps=60))


def with_chunks(healthy: Path, path: Path, chunks: Iterable[bytes]) -> Path:
    """The head of a healthy recording, and these chunks."""
    with healthy.open("rb") as file:
        first = next(record.offset for record in records(file.fileno()) if record.opcode == Opcode.CHUNK)
        path.write_bytes(file.read(first) + chunk([MARK]) + b"".join(chunks))
    return path


def filled(healthy: Path, path: Path, content: bytes) -> Path:
    """A recording of `FILE_BYTES` with one chunk again and again."""
    return with_chunks(healthy, path, [content] * max(1, FILE_BYTES // len(content)))


def cpu_s(path: Path) -> float:
    """CPU time of a report on a recording."""
    started = time.process_time()
    with contextlib.suppress(DdpwatchError):
        report_of(path)
    return time.process_time() - started


HOSTILE = {
    "empty frames": lambda: chunk([b""] * 2_000_000),
    "empty frames in many chunks": lambda: chunk([b""] * 500),
    "no messages": lambda: chunk([b"\xc1" * 9] * 400),
    "a type that is unknown": lambda: chunk([b"\x81\xa4type\xa1x"] * 380),
    "one large frame": lambda: chunk([bytes(60 << 20)]),
    "many large frames": lambda: chunk([bytes(5 << 20)] * 12),
    "steps that unpack to 4 MiB": lambda: chunk([packed(MAX_UNPACKED - 5)] * 26),
    "steps that are empty": lambda: chunk([packed(MAX_UNPACKED - 5, b"\x80")] * 26),
    "steps of other ranks": lambda: chunk([packed(MAX_UNPACKED - 5, STEP)] * 26),
    "steps in one small frame each": lambda: chunk([packed(1 << 15)] * 160),
    "marks": lambda: chunk([MARK] * 160),
    "a few steps, unpacked by themselves": lambda: chunk([packed(MAX_UNPACKED - 5)]),
}


@pytest.mark.seconds(20)
def test_a_hostile_file_takes_about_as_long_as_a_healthy_one(healthy: Path, tmp_path: Path) -> None:
    healthy_s = min(cpu_s(healthy) for _ in range(3)) * FILE_BYTES / healthy.stat().st_size
    times = {}
    for number, (name, make) in enumerate(HOSTILE.items()):
        path = filled(healthy, tmp_path / f"{number}.mcap", make())
        times[name] = cpu_s(path) / healthy_s
    assert {name: ratio for name, ratio in times.items() if ratio > LIMIT} == {}


def test_a_chunk_that_is_given_up_counts_and_what_was_before_it_is_read(healthy: Path, tmp_path: Path) -> None:
    path = with_chunks(healthy, tmp_path / "run.mcap", [chunk([MARK, packed(MAX_UNPACKED - 5), MARK]), chunk([MARK])])
    recording = Recording(path)
    assert len(list(recording)) == 2
    assert (recording.skipped, recording.cut_tail) == (2, True)
    followed = FollowSource(path)
    assert [len(followed.read(0.0)) for _ in range(3)] == [1, 1, 0]
    assert (followed.unreadable, followed.over) == (2, True)
    followed.close()


def test_frames_of_a_newer_ddpwatch_are_left_out_one_by_one(healthy: Path, tmp_path: Path) -> None:
    """They are not alike, so their chunks are not much smaller than they."""
    unknown = [b"\x82\xa4type\xa3new\xa1x" + b"\xc4\x20" + secrets.token_bytes(32) for _ in range(2_000)]
    path = with_chunks(healthy, tmp_path / "run.mcap", [chunk([*unknown, MARK])] * 3)
    recording = Recording(path)
    assert len(list(recording)) == 4
    assert recording.skipped == 6_000
