import sys
import time
from pathlib import Path

import pytest

from ddpwatch.job.output_copy import BLOCK_BYTES
from ddpwatch.launch import Launch, run_with_dashboard
from ddpwatch.tui.feed.output_tail import OutputTail


def test_whole_lines_once_each(output_buffer):
    tail = OutputTail(output_buffer)
    output_buffer.add_block(b"one\ntw")
    assert tail.lines() == ["one"]
    assert tail.unfinished == "tw"
    assert tail.lines() == []
    output_buffer.add_block(b"o\n\nthree\n")
    assert tail.lines() == ["two", "", "three"]
    assert tail.unfinished == ""


def test_of_a_progress_bar_the_newest_state(output_buffer):
    tail = OutputTail(output_buffer)
    output_buffer.add_block(b"\r 10%\r 20%\r")
    assert tail.lines() == []
    assert tail.unfinished == " 20%"
    output_buffer.add_block(b" 100%\r\ndone\r\n")
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
def test_no_escape_sequence_is_left(output_buffer, written, shown):
    output_buffer.add_block(written + b"\n")
    assert OutputTail(output_buffer).lines() == [shown]


def test_output_that_comes_too_fast_is_left_out_and_counted(output_buffer):
    tail = OutputTail(output_buffer)
    output_buffer.add_block(b"first\n")
    assert tail.lines() == ["first"]
    output_buffer.add_block(b"x" * 9 + b"\n")
    output_buffer.add_block(b"y" * (BLOCK_BYTES - 5) + b"\n")
    output_buffer.add_block(b"end\n")
    assert tail.lines() == [f"… {10 + BLOCK_BYTES - 4} bytes left out …", "end"]
    assert tail.lines() == []


def test_one_endless_line_is_bounded(output_buffer):
    tail = OutputTail(output_buffer)
    for _ in range(3):
        output_buffer.add_block(b"z" * BLOCK_BYTES)
        assert tail.lines() == []
    assert len(tail.unfinished) == BLOCK_BYTES


def test_run_shows_the_dashboard_what_the_job_prints(run_directory, monkeypatch, capfd):
    seen = []

    def dashboard(spec):
        tail, deadline = OutputTail(spec.output), time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            seen.extend(tail.lines())
            time.sleep(0.01)
        seen.append(spec.job)

    monkeypatch.setattr("ddpwatch.tui.app.run_dashboard", dashboard)
    command = [sys.executable, "-c", "print('epoch 1')"]
    assert run_with_dashboard(Launch(command, None, {})) == 0
    assert seen[0] == "epoch 1"
    assert seen[1].startswith(sys.executable)
    out, err = capfd.readouterr()
    assert out == "epoch 1\n"
    where, why = err.splitlines()[-2:]
    assert why == (
        "ddpwatch: nothing was watched: one Python process, and torch has not been imported; "
        "what is watched: models in DistributedDataParallel or FSDP2, and loops whose torch.optim.Optimizer steps"
    )
    path = where.removeprefix("ddpwatch: the job's output is in ")
    assert Path(path).read_text() == "epoch 1\n"
