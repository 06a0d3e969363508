"""The copy of a job's output: in memory, in a file of two parts, and past a disk that fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch.errors import DdpwatchError
from ddpwatch.job import output_copy
from ddpwatch.job.job_output import OutputPipe
from ddpwatch.job.output_copy import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    CUT,
    DONE,
    MISSING,
    OLDER,
    TOTAL,
    OutputBuffer,
    copy_output,
    older_part,
)
from tests.support.jobs import PATIENCE_S, wait_for

KIB = 1024


@pytest.fixture
def buffer() -> Iterator[OutputBuffer]:
    made = OutputBuffer.create()
    yield made
    os.close(made.descriptor)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "output" / "job.out"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_copy, "RETRY_S", 0.01)


@contextlib.contextmanager
def copying(buffer: OutputBuffer, path: Path, part_bytes: int = output_copy.PART_BYTES) -> Iterator[int]:
    """Where a job prints to; at the end of the block, the job ends and all is copied."""
    read_end, write_end = os.pipe()
    thread = threading.Thread(target=copy_output, args=(read_end, buffer, path, part_bytes))
    thread.start()
    try:
        yield write_end
    finally:
        os.close(write_end)
        thread.join()
        os.close(read_end)


def write(pipe: int, data: bytes) -> None:
    with open(pipe, "wb", closefd=False) as file:
        file.write(data)


def numbered(size: int) -> bytes:
    """Lines that are all different."""
    return b"".join(b"%07d\n" % number for number in range(size // 8))


def test_what_is_added_is_read_across_the_end_of_the_memory(buffer: OutputBuffer) -> None:
    data = numbered(CAPACITY_BYTES + 5 * BLOCK_BYTES)
    offset = 0
    for place in range(0, len(data), BLOCK_BYTES - 8):
        buffer.add_block(data[place : place + BLOCK_BYTES - 8])
        start, block = buffer.read(offset)
        assert (start, block) == (offset, data[offset : start + len(block)])
        offset = start + len(block)
    assert offset == len(data)
    start, block = buffer.read(0)
    assert start == len(data) + BLOCK_BYTES - CAPACITY_BYTES, "the oldest bytes were overwritten"
    assert block == data[start : start + BLOCK_BYTES]
    assert buffer.newest(0) == (len(data) - BLOCK_BYTES, data[-BLOCK_BYTES:])


def test_the_file_is_the_output_and_private(buffer: OutputBuffer, path: Path) -> None:
    data = bytes(range(256)) * 8 * KIB
    with copying(buffer, path) as pipe:
        write(pipe, data)
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_of_a_long_output_the_newest_two_parts_are_kept(buffer: OutputBuffer, path: Path) -> None:
    data = numbered(1000 * KIB)
    with copying(buffer, path, 64 * KIB) as pipe:
        write(pipe, data)
    parts = [older_part(path), path]
    kept = b"".join(part.read_bytes() for part in parts)
    assert [part.stat().st_size for part in parts] == [64 * KIB, 40 * KIB]
    assert data.endswith(kept)
    assert (buffer.get(OLDER), buffer.get(CUT), buffer.get(MISSING)) == (64 * KIB, 896 * KIB, 0)


def test_the_output_flows_on_past_a_disk_that_fails(buffer: OutputBuffer, path: Path) -> None:
    """A file is in the place of the directory; then it goes."""
    path.parent.write_text("")
    data = numbered(2 * CAPACITY_BYTES)
    with copying(buffer, path) as pipe:
        write(pipe, data)
        wait_for(lambda: buffer.why, "the copy fails")
        wait_for(lambda: buffer.newest(0)[1] == data[-BLOCK_BYTES:], "the newest output is in memory")
        path.parent.unlink()
        wait_for(path.exists, "the copy is tried again")
        write(pipe, b"last\n")
    missing = buffer.get(MISSING)
    note, kept = path.read_bytes().split("bytes left out: File exists …\n".encode())
    assert note.decode().strip() == f"… {missing}"
    assert kept == data[missing:] + b"last\n"


def test_a_disk_that_hangs_holds_nothing_up(buffer: OutputBuffer, path: Path) -> None:
    """Opening a named pipe hangs until there is a reader."""
    path.parent.mkdir(mode=0o700)
    os.mkfifo(path)
    data = numbered(2 * CAPACITY_BYTES)
    with copying(buffer, path) as pipe:
        write(pipe, data)
        wait_for(lambda: buffer.newest(0)[1] == data[-BLOCK_BYTES:], "all was taken off the pipe")
        opened = os.open(path, os.O_RDONLY)
        path.unlink()
        os.close(opened)
    assert data.endswith(path.read_bytes()[-BLOCK_BYTES:])


def test_a_file_that_is_removed_is_made_again(buffer: OutputBuffer, path: Path) -> None:
    with copying(buffer, path) as pipe:
        write(pipe, b"first\n")
        wait_for(lambda: path.exists() and path.read_bytes(), "the first line is copied")
        path.unlink()
        path.parent.rmdir()
        write(pipe, b"second\n")
        wait_for(lambda: path.exists() and path.read_bytes() == b"second\n", "the second line is copied")
        shutil.rmtree(path.parent)
    assert not path.parent.exists(), "without further output, it stays removed"
    assert (buffer.get(MISSING), buffer.why) == (6, "the file was removed")


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_directory_that_is_not_private_is_left_alone(buffer: OutputBuffer, path: Path, kind: str) -> None:
    if kind == "a link":
        (path.parent.parent / "elsewhere").mkdir(mode=0o700)
        path.parent.symlink_to("elsewhere")
    else:
        path.parent.mkdir(mode=0o755)
    with copying(buffer, path) as pipe:
        write(pipe, b"secret")
    assert not path.exists()
    assert "not a private directory" in buffer.why


def test_without_a_home_directory_nothing_is_written(
    buffer: OutputBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with copying(buffer, Path("~/.local/state/ddpwatch/output/job.out")) as pipe:
        write(pipe, b"text")
    assert not list(tmp_path.iterdir())
    assert buffer.why == "no home directory"


def test_old_outputs_are_removed_but_no_live_one(buffer: OutputBuffer, path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    now_s = time.time()
    others = [path.with_name(f"{number}.out") for number in range(30)]
    for number, other in enumerate(others):
        for part in (other, older_part(other)):
            part.write_text("")
            os.utime(part, (now_s - 60 * number - 60,) * 2)
    aged, live = path.with_name("aged.out"), others[25]
    aged.write_text("")
    for part in (others[3], older_part(others[3])):
        os.utime(part, (now_s - output_copy.KEEP_S - 60,) * 2)
    others[24].unlink()  # where the disk was full when a new part was due, there is only the older one
    with live.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with copying(buffer, path):
            pass
    kept = {*others[:3], *others[4:19], aged, live, path}
    assert set(path.parent.glob("*.out")) == kept
    assert set(path.parent.glob("*.1")) == {older_part(other) for other in kept - {aged, path}}


def test_a_live_output_counts_as_locked(buffer: OutputBuffer, path: Path) -> None:
    with copying(buffer, path):
        wait_for(path.exists, "the file is there")
        wait_for(lambda: output_copy._is_live(path), "it is locked")
    assert not output_copy._is_live(path)


def test_a_limit_on_file_sizes_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> OutputBuffer:
        raise OSError(27, "File too large")

    monkeypatch.setattr(OutputBuffer, "create", refuse)
    with pytest.raises(DdpwatchError, match="cannot take the job's output: File too large") as caught:
        OutputPipe("job")
    assert "--headless" in caught.value.hint


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputPipe:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return OutputPipe("job")


@pytest.mark.parametrize(
    ("why", "numbers", "notes"),
    [
        ("", {}, ["the job's output is in PATH"]),
        ("", {TOTAL: 9, DONE: 9}, ["the job's output is in PATH"]),
        ("", {TOTAL: 9, DONE: 9, OLDER: 5}, ["the job's output is in PATH.1 and PATH"]),
        (
            "",
            {TOTAL: 9 << 20, DONE: 9 << 20, OLDER: 3 << 20, CUT: 2 << 20},
            ["the job's output is in PATH.1 and PATH (the newest 7 MiB)"],
        ),
        (
            "No space left on device",
            {TOTAL: 9, DONE: 6, MISSING: 2},
            ["the job's output is in PATH", "5 bytes of it are missing there: No space left on device"],
        ),
        ("Is a directory", {TOTAL: 9}, ["nothing of the job's output is in PATH: Is a directory"]),
        ("", {TOTAL: 9}, ["nothing of the job's output is in PATH: not written yet"]),
    ],
)
def test_the_last_lines_say_where_the_output_is(
    output: OutputPipe, why: str, numbers: dict[int, int], notes: list[str]
) -> None:
    for number, value in numbers.items():
        output.buffer.set(number, value)
    output.buffer.why = why
    assert [note.replace(str(output.path), "PATH") for note in output.notes()] == notes


def test_where_no_process_can_be_started_this_one_copies(output: OutputPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    write(output.pipe, b"text")
    output.start_copy()
    output.wait(PATIENCE_S)
    assert output.path.read_bytes() == b"text"
