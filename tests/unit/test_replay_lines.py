"""A replay without a dashboard: which lines, at what pace, from where, how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpwatch.messages import Status
from ddpwatch.plain import HEADER, replay_lines
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.seek import locate, parse_target
from tests.support.runs import record, run_of

STEPS = 60  # of 110 ms


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(record(tmp_path / "a.mcap", run_of(steps=STEPS)))


def steps_in(out: str) -> list[int]:
    head, *lines = out.splitlines()
    assert head == HEADER
    return [int(line.split()[0]) for line in lines]


def test_all_lines_at_once(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    replay_lines(recording, sleep=pytest.fail)
    output = capsys.readouterr()
    assert steps_in(output.out) == [17, 36, 55, STEPS - 1]  # every two seconds, and the end
    assert output.err == ""


def test_what_is_sampled_is_counted_and_the_budget_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = list(run_of(steps=STEPS))
    frames.append((Status(at_ns=1, frames=1, bytes=1, lease_ppm=5_000), frames[-1][1]))
    replay_lines(Recording(record(tmp_path / "b.mcap", iter(frames))))
    *_, before, last = capsys.readouterr().out.splitlines()
    assert " 56/56 " in before
    assert "budget" not in before
    assert " 59/59 " in last
    assert last.endswith("; budget 0.5 %")


def test_from_a_place_they_are_the_same(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    replay_lines(recording, locate(recording, parse_target("30")).at_ns)
    printed = capsys.readouterr().out
    assert steps_in(printed) == [48, STEPS - 1]
    replay_lines(recording)
    assert printed.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]


def test_at_a_pace(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    replay_lines(recording, speed=2, sleep=slept.append)
    assert len(slept) == len(steps_in(capsys.readouterr().out))
    assert sum(slept) == pytest.approx(recording.seconds / 2, abs=0.01)


def test_over_and_over_at_the_pace_it_had(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay_lines(recording, loop=True, sleep=sleep)
    assert capsys.readouterr().out.count(HEADER) == 3
    begin_ns, end_ns = recording.span_ns
    assert sum(slept[:4]) == pytest.approx((end_ns - begin_ns) / 1e9, abs=0.01)


def test_a_cut_recording_says_so(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    data = recording.path.read_bytes()
    recording.path.write_bytes(data[: len(data) // 2])
    replay_lines(Recording(recording.path))
    assert capsys.readouterr().err == "ddpwatch: the recording was cut off here\n"
