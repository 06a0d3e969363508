import sys
import time

import pytest

from ddpwatch.launch import Launch, run_with_dashboard
from ddpwatch.tui.feed.job_output import MAX_READ_BYTES, OutputTail


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "job.out"
    path.write_bytes(b"")
    return path


def add(file, data):
    with file.open("ab") as out:
        out.write(data)


def test_whole_lines_once_each(file):
    tail = OutputTail(file)
    add(file, b"one\ntw")
    assert tail.lines() == ["one"]
    assert tail.unfinished == "tw"
    assert tail.lines() == []
    add(file, b"o\n\nthree\n")
    assert tail.lines() == ["two", "", "three"]
    assert tail.unfinished == ""


def test_of_a_progress_bar_the_newest_state(file):
    tail = OutputTail(file)
    add(file, b"\r 10%\r 20%\r")
    assert tail.lines() == []
    assert tail.unfinished == " 20%"
    add(file, b" 100%\r\ndone\r\n")
    assert tail.lines() == [" 100%", "done"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\x1b[1;32mgood\x1b[0m", "good"),
        (b"a\x1b[2Kb\x1b[?25l", "ab"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1b(Bplain\x1bM", "plain"),
        (b"a\tb", "a       b"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_no_escape_sequence_is_left(file, written, shown):
    add(file, written + b"\n")
    assert OutputTail(file).lines() == [shown]


def test_output_that_comes_too_fast_is_left_out_and_counted(file):
    tail = OutputTail(file)
    add(file, b"first\n")
    assert tail.lines() == ["first"]
    add(file, b"x" * 9 + b"\n")
    add(file, b"y" * (MAX_READ_BYTES - 5) + b"\n")
    add(file, b"end\n")
    assert tail.lines() == [f"… {10 + MAX_READ_BYTES - 4} bytes left out …", "end"]
    assert tail.lines() == []


def test_one_endless_line_is_bounded(file):
    tail = OutputTail(file)
    for _ in range(3):
        add(file, b"z" * MAX_READ_BYTES)
        assert tail.lines() == []
    assert len(tail.unfinished) == MAX_READ_BYTES


def test_a_file_that_is_not_there(tmp_path):
    assert OutputTail(tmp_path / "none").lines() == []


def test_run_shows_the_dashboard_what_the_job_prints(tmp_path, monkeypatch, capfd):
    seen = []

    def dashboard(spec):
        tail, deadline = OutputTail(spec.output), time.monotonic() + 20
        while not seen and time.monotonic() < deadline:
            seen.extend(tail.lines())
            time.sleep(0.01)
        seen.append(spec.job)

    monkeypatch.setenv("DDPWATCH_DIR", str(tmp_path))
    monkeypatch.setattr("ddpwatch.tui.app.run_dashboard", dashboard)
    command = [sys.executable, "-c", "print('epoch 1')"]
    assert run_with_dashboard(Launch(command, None, {})) == 0
    assert seen[0] == "epoch 1"
    assert seen[1].startswith(sys.executable)
    assert capfd.readouterr().out == "epoch 1\n"
