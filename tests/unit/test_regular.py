"""What is no regular file holds up nobody, wherever it is found: a pipe that nobody writes to would do so for ever."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.launch import Launch
from ddpwatch.recording.follow import FollowSource
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.run import blackbox, rundir
from ddpwatch.run.regular import MOST_BYTES, NOT_REGULAR, open_regular, read_regular, write_whole
from ddpwatch.sampling.lease import Lease
from ddpwatch.tui.settings import load_settings
from ddpwatch.whatif.command import read_wire
from ddpwatch.wire.keys import SECRET_FILE, seal_of
from tests.support.runs import record

pytestmark = pytest.mark.usefixtures("run_directory")
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """An opened pipe would wait for ever; a signal ends that."""

    def give_up(*_: object) -> None:
        raise AssertionError("it waits for somebody")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_link_to_a_pipe(path: Path) -> None:
    os.mkfifo(target := path.with_name(f"{path.name}.target"))
    path.symlink_to(target)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


KINDS = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe behind a link": a_link_to_a_pipe,
}  # fmt: skip
EVERY_KIND = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@EVERY_KIND
def test_nothing_but_files_is_read(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(path := tmp_path / "x.mcap")
    opened = descriptors()
    readers: list[Callable[[], object]] = [
        lambda: Recording(path), lambda: FollowSource(path), lambda: read_wire(path), lambda: load_settings(path),
        lambda: seal_of({SECRET_FILE: str(path)}),
    ]  # fmt: skip
    for reader in readers:
        with pytest.raises(UsageError, match=r"x\.mcap.*(not a regular file|no recording in this directory)"):
            reader()
    with pytest.raises(OSError, match=NOT_REGULAR):
        open_regular(path)
    Lease().open(path)
    assert blackbox.read(path) is None
    assert descriptors() == opened


@EVERY_KIND
def test_beside_recordings_it_is_left_out(make: Callable[[Path], object], tmp_path: Path) -> None:
    record(tmp_path / "a.mcap")
    make(tmp_path / "b.mcap")
    recording = Recording(tmp_path)
    assert any(recording)
    assert [note for note in recording.notes if "b.mcap" in note] == [f"left out: {tmp_path / 'b.mcap'}: {NOT_REGULAR}"]


@EVERY_KIND
@pytest.mark.parametrize("age_s", [0, 10**7])
def test_in_the_run_directory_it_is_no_run_and_no_last_view(
    make: Callable[[Path], object], age_s: int, run_directory: Path
) -> None:
    for name in ("x.json", "y.mcap", "z.log", "x.note"):
        make(path := run_directory / name)
        with contextlib.suppress(OSError):
            os.utime(path, times=(path.stat().st_mtime - age_s,) * 2)
    assert rundir.live_runs() == rundir.runs_elsewhere() == rundir.last_views() == []
    with pytest.raises(DdpwatchError, match="no live run"):
        rundir.find("x")


@EVERY_KIND
def test_after_a_job_it_is_not_taken_for_a_rank_file(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", str(tmp_path))
    (tmp_path / "run").mkdir()
    launch = Launch(["true"], None, {})
    make(tmp_path / "run" / "rank00000.mcap")
    assert launch.recorded() == []


def test_a_pipe_without_a_reader_is_not_recorded_to(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "run.mcap")
    with pytest.raises(UsageError, match="No such device"):
        RecordingWriter(path)


def test_what_is_read_whole_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "wire.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(OSError, match="too large"):
        read_regular(path)
    with pytest.raises(UsageError, match="too large"):
        read_wire(path)


def test_a_file_is_written_whole_in_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "note"
    for content in (b"first", b"second"):
        write_whole(path, content)
        assert read_regular(path) == content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_of_a_file_that_cannot_be_written_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", b"it cannot be replaced")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
    try:
        with pytest.raises(OSError, match="No space"):
            write_whole(tmp_path / "note", b"four")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
