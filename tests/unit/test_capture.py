"""Recording as a viewer: when it ends, and how it reports a failing disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.recording.limits import Limits
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.viewer.capture import capture
from ddpwatch.wire.messages import Bye, Message, Status, Step, encode
from ddpwatch.wire.transport import Envelope, Frame
from tests.support.runs import run_of


class Played:
    """A source that yields a run in batches, and calls ``before`` ahead of each."""

    def __init__(self, frames: list[tuple[Message, int]], before: Callable[[int], object] = lambda batch: None) -> None:
        self.over = False
        self.unreadable = 0
        self.missed = 0
        self.trouble = ""
        self.notes: list[str] = []
        self.closed = False
        self._frames = [(m, Envelope(n + 1, at, encode(m))) for n, (m, at) in enumerate(frames)]
        self._before = before
        self._batch = 0

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        self._before(self._batch)
        self._batch += 1
        batch, self._frames = self._frames[:10], self._frames[10:]
        return batch

    def close(self) -> None:
        self.closed = True


def run(steps: int = 30) -> list[tuple[Message, int]]:
    return [*run_of(steps=steps), (Bye(rank=None, by="collector", reason="finished", at_ns=1), 2 * 10**18)]


def steps_in(file: Path) -> list[int]:
    return [m.step for m, _ in Recording(file) if isinstance(m, Step) and m.rank == 0]


def test_until_the_run_ends(tmp_path: Path) -> None:
    source = Played(run())
    assert capture(source, tmp_path / "a.mcap", None, None) == len(run())
    assert steps_in(tmp_path / "a.mcap") == list(range(30))
    assert source.closed
    assert "findings.json" in Recording(tmp_path / "a.mcap").attachments()


def test_what_the_viewer_missed_is_lost_to_the_recording(tmp_path: Path) -> None:
    source = Played(run())
    source.missed = 12
    capture(source, tmp_path / "a.mcap", None, None)
    report = report_of(tmp_path / "a.mcap").as_json()
    assert report["recording"]["lost"] == 12
    assert [f["evidence"] for f in report["findings"] if f["kind"] == "recording_lost"] == [{"lost": 12}]


STATUS = (Status(at_ns=1, frames=1, bytes=1), 10**18)


def test_as_many_steps_as_wanted(tmp_path: Path) -> None:
    capture(Played([STATUS, *run()]), tmp_path / "a.mcap", None, 5)
    assert steps_in(tmp_path / "a.mcap") == list(range(6))


def test_steps_of_the_snapshot_are_older_than_those_wanted(tmp_path: Path) -> None:
    frames = run()
    live = next(at for at, (message, _) in enumerate(frames) if isinstance(message, Step) and message.step == 20)
    capture(Played([*frames[:live], STATUS, *frames[live:]]), tmp_path / "a.mcap", None, 5)
    assert steps_in(tmp_path / "a.mcap") == list(range(26))


def test_within_limits(tmp_path: Path) -> None:
    capture(Played(run()), tmp_path / "a.mcap", None, None, Limits(every=10))
    detailed = [m.step for m, _ in Recording(tmp_path / "a.mcap") if isinstance(m, Step) and m.hook_ns and m.rank == 0]
    assert detailed == [0, 10, 20]


def test_the_error_of_a_failing_disk_says_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpwatch.viewer.capture.FLUSH_S", 0.0)
    folder = tmp_path / "disk"
    folder.mkdir()

    def vanish(batch: int) -> None:
        if batch == 3:
            shutil.move(folder, tmp_path / "elsewhere")

    source = Played(run(), vanish)
    with pytest.raises(DdpwatchError, match="removed; recorded 40 frames before that") as error:
        capture(source, folder / "a.mcap", None, None)
    assert error.value.exit_code == 1
    assert error.value.hint
    assert source.closed
    assert len(list(Recording(tmp_path / "elsewhere" / "a.mcap"))) == 40


def test_a_path_that_cannot_be_written_to(tmp_path: Path) -> None:
    source = Played(run())
    with pytest.raises(UsageError, match="No such file or directory"):
        capture(source, tmp_path / "missing" / "a.mcap", None, None)
    assert source.closed


def test_the_recording_knows_the_job_s_commit(tmp_path: Path) -> None:
    file = tmp_path / "run.mcap"
    capture(Played([*run_of(steps=3)]), file, None, 1, commit="0123456789ab")
    assert Recording(file).metadata["commit"] == "0123456789ab"
