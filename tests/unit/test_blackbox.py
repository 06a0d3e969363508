"""Where black boxes are: in memory, in a directory that only the user can write, never in a file that exists."""

from __future__ import annotations

import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch.run import blackbox, rundir
from ddpwatch.run.blackbox import BlackBox

SHARED_MEMORY = Path("/dev/shm")
needs_shared_memory = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of this test's in memory, in place of /dev/shm."""
    made = SHARED_MEMORY / f"dw-test-{secrets.token_hex(4)}"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(rundir, "SHARED_MEMORY", made)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory on a disk."""
    monkeypatch.setenv("DDPWATCH_DIR", str(tmp_path / "run"))
    if rundir.file_system(tmp_path) == "tmpfs":
        pytest.skip("temporary files are in memory here")
    return tmp_path / "run"


@needs_shared_memory
def test_a_box_is_in_memory_though_the_run_directory_is_not(memory: Path, on_disk: Path) -> None:
    """Writeback of a page on a disk can stall the thread that writes to it: the training thread."""
    path = rundir.blackbox("r", 3)
    assert path is not None
    assert memory in path.parents
    assert stat.S_IMODE(path.parent.lstat().st_mode) == 0o700
    box = BlackBox()
    box.begin_step(7, 5)
    box.open(path)
    box.enter("backward")
    box.launch(2)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert blackbox.read(rundir.blackbox("r", 3)) == blackbox.LastState(7, "backward", [2], 5)
    rundir.remove("r")
    assert not list(memory.rglob("*.box*"))


@needs_shared_memory
def test_a_run_directory_in_memory_has_its_boxes(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", str(memory / "run"))
    assert rundir.blackbox("r", 3) == memory / "run" / "r.box3"


@pytest.mark.parametrize("spoiled", ["disk", "missing", "open to others", "a link"])
def test_without_private_memory_there_is_no_file(spoiled: str, on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat has to do then."""
    shared = on_disk.parent / "shm"
    monkeypatch.setattr(rundir, "SHARED_MEMORY", shared)
    in_memory = spoiled != "disk"
    kind = {True: "tmpfs", False: "ext4"}
    monkeypatch.setattr(rundir, "file_system", lambda path: kind[in_memory and shared in (path, *path.parents)])
    if spoiled != "missing":
        shared.mkdir()
    if spoiled in ("open to others", "a link"):
        path = rundir.blackbox("r", 0)
        assert path is not None
        path.parent.chmod(0o777)
    if spoiled == "a link":
        (shared / "elsewhere").mkdir(mode=0o700)
        path.parent.rmdir()
        path.parent.symlink_to(shared / "elsewhere")
    assert rundir.blackbox("r", 0) is None
    box = BlackBox()
    box.open(rundir.blackbox("r", 0))
    box.enter("forward")
    assert blackbox.read(rundir.blackbox("r", 0)) is None


@pytest.mark.parametrize("link", [False, True])
def test_nothing_that_exists_is_opened_for_writing(link: bool, tmp_path: Path) -> None:
    """Truncating a page that another process has mapped kills that process."""
    path, target = tmp_path / "r.box0", tmp_path / "target"
    target.write_bytes(b"precious")
    path.symlink_to(target) if link else path.write_bytes(b"precious")
    with pytest.raises(OSError, match="File exists"):
        BlackBox().open(path)
    assert path.read_bytes() == target.read_bytes() == b"precious"
