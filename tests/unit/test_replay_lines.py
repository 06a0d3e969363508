"""A replay without a dashboard: which lines, at what pace, from where, how often."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.recording.seek import locate, parse_target
from ddpwatch.report.build import report_of
from ddpwatch.viewer.plain import HEADER, INDENT, replay_lines
from ddpwatch.wire.messages import Bye, Hello, Status
from tests.support.dashboards import ended_recording
from tests.support.frames import beat
from tests.support.runs import record, run_of
from tests.tui.test_replay import eventful

STEPS = 60  # of 110 ms


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(record(tmp_path / "a.mcap", run_of(steps=STEPS)))


def steps_in(out: str) -> list[int]:
    head, *lines = out.partition("\nincidents")[0].splitlines()
    assert head == HEADER
    return [int(line.split()[0]) for line in lines if not line.startswith(INDENT)]


def test_all_lines_at_once(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    replay_lines(recording, sleep=pytest.fail)
    output = capsys.readouterr()
    assert steps_in(output.out) == [17, 36, 55, STEPS - 1]  # every two seconds, and the end
    assert output.err == ""


@pytest.mark.parametrize(("torch", "says"), [("2.99", "newer than"), ("2.8.0", "older than"), ("2.13", ""), ("", "")])
def test_a_torch_that_is_not_tested_is_named_once(
    torch: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In lines, and in the report's notes."""
    frames = list(run_of(steps=STEPS))
    for message, _ in frames:
        if isinstance(message, Hello):
            message.torch = torch
    path = record(tmp_path / "a.mcap", iter(frames))
    replay_lines(Recording(path), sleep=pytest.fail)
    assert capsys.readouterr().out.count("torch ") == bool(says)
    notes = [note["message"] for note in report_of(path).as_json()["notes"] if note["kind"] == "untested_torch"]
    assert [says in note for note in notes] == [True] * bool(says)


def test_what_is_timed_in_full_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = list(run_of(steps=STEPS))
    frames.append((Status(at_ns=1, frames=1, bytes=1, lease_ppm=5_000), frames[-1][1]))
    replay_lines(Recording(record(tmp_path / "b.mcap", iter(frames))))
    *_, before, last = [line for line in capsys.readouterr().out.splitlines() if "/" in line and line[7].isdigit()]
    assert " 50/50 " in before
    assert re.search(r" 50/50  rank 1 died", last)


def test_a_hang_is_not_said_every_two_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten minutes of it were 300 lines that said the same."""
    frames = [(message, at_ns) for message, at_ns in run_of(steps=STEPS) if not isinstance(message, Bye)]
    for second in range(600):
        at_ns = frames[-1][1] + 10**9
        for rank, phase in ((0, "sync"), (1, "input")):
            since = {"since_ns": at_ns - second * 10**9}
            frames.append((beat(rank, STEPS, phase, at_ns=at_ns, **since), at_ns))
    replay_lines(Recording(record(tmp_path / "a.mcap", iter(frames))), sleep=pytest.fail)
    out = capsys.readouterr().out
    lines = [line for line in out.partition("\nincidents")[0].splitlines() if not line.startswith(INDENT)]
    hung = [line for line in lines if "rank 1 is stuck" in line]
    assert 10 < len(hung) < 30
    assert " for 598 s" in hung[-1]


def test_from_a_place_they_are_the_same(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    """A death, exposed communication, and, from the start, rank 1, which is 2 ms late in each step."""
    replay_lines(recording, locate(recording, parse_target("30")).at_ns)
    printed = capsys.readouterr().out
    assert steps_in(printed) == [48, STEPS - 1]
    replay_lines(recording)
    whole = capsys.readouterr().out
    assert ends(printed)[0] == ends(whole)[0]
    assert ends(printed)[1].startswith("incidents: 3; ")
    assert ends(whole)[1].startswith("incidents: 3; ")


def ends(printed: str) -> tuple[str, str]:
    """The last line on the run, and the heading of its incidents."""
    lines = printed.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("incidents"))
    return lines[at - 1], lines[at]


def test_incidents_have_their_own_lines_and_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 is late from step 60 to 119."""
    file = ended_recording(tmp_path / "a.mcap", eventful())
    replay_lines(Recording(file))
    printed = capsys.readouterr().out
    told = [line.strip() for line in printed.partition("\nincidents")[0].splitlines() if line.startswith(INDENT)]
    late = "rank 1 is late by 40 ms in each step: its backward takes 40 ms longer, from b on"
    was_late = late.replace("is late", "was late").replace("takes", "took")
    told = [line for line in told if not line.startswith("next: ")]
    assert told[1] == late
    ended = re.fullmatch(
        rf"ended: {was_late}; cost (\d\.\d\d) process-seconds, (\d+\.\d) % of all ranks' time", told[2]
    )
    assert ended is not None
    assert ends(printed)[0].endswith("rank 1 was killed (SIGKILL) at step 199 in backward, bucket 1 in flight")
    assert re.match(r"incidents: 3; 15\.\d % lost: 10\.\d % exposed transfer, ", ends(printed)[1])
    rows = printed.splitlines()[-6:]
    assert [line.split()[0] for line in rows[::2]] == ["death", "exposed", "straggler"]
    assert all(line.lstrip().startswith("next: ") for line in rows[1::2])
    row = report_of(file).as_json()["incidents"][2]
    assert (
        f"60–119  {row['seconds']:.2f} process-seconds, {100 * row['share']:.1f} % of all ranks' time"
        in printed.splitlines()[-2]
    )


def test_an_info_of_no_cost_is_only_counted(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 is late, but nobody waits for it."""
    replay_lines(recording)
    printed = capsys.readouterr().out
    found = report_of(recording.path).as_json()["incidents"]
    assert [(row["kind"], row["severity"], row["share"]) for row in found[2:]] == [("straggler", "info", 0.0)]
    listed = printed.partition("\nincidents: 3; ")[2].splitlines()[1:]
    assert [line.split()[0] for line in listed] == ["death", "next:", "exposed", "next:", "…"]
    assert listed[-1] == "  … 1 more, of no cost worth a figure"


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
