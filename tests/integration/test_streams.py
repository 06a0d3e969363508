"""Commands whose standard streams are full, closed, no terminal, or lack a character: one line and an exit code."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from ddpwatch.cli import streams
from tests.support.jobs import DDPWATCH, PATIENCE_S, ddpwatch
from tests.support.runs import record, run_of

CLEAR, CSI = "\x1b[2J\x07", "\x9b2J"
COMMANDS = {
    "report": ["report", "FILE"],
    "json": ["report", "--json", "FILE"],
    "compare": ["compare", "FILE", "FILE"],
    "what if": ["whatif", "FILE"],
    "lines": ["replay", "--plain", "FILE"],
    "version": ["--version"],
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a name that clears the terminal and is no UTF-8, and names that are no ASCII."""
    folder = tmp_path_factory.mktemp("streams")
    return record(folder / f"run{CLEAR}\udcff{CSI}.mcap", run_of(steps=40, ranks=4))


def shell(*commands: str, **environment: str) -> list[tuple[str, str, int]]:
    """Commands started at the same time by ``sh``: stdout, stderr and exit code of each."""
    started = [
        subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command in commands
    ]
    return [
        (out.decode(errors="surrogateescape"), err.decode(errors="surrogateescape"), process.returncode)
        for process in started
        for out, err in [process.communicate(timeout=PATIENCE_S)]
    ]


def words(arguments: list[str], file: Path) -> list[str]:
    return [str(file) if word == "FILE" else word for word in arguments]


def line(arguments: list[str], file: Path, redirected: str = "") -> str:
    return f"{shlex.join([*DDPWATCH, *words(arguments, file)])} {redirected}"


@pytest.mark.parametrize(
    ("redirected", "why"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
def test_an_output_that_cannot_be_written_is_an_error(redirected: str, why: str, recording: Path) -> None:
    found = shell(*(line(command, recording, redirected) for command in COMMANDS.values()))
    error = f"ddpwatch: error: cannot write to the standard output: {why}"
    for name, (out, err, code) in zip(COMMANDS, found, strict=True):
        assert (out, err.splitlines()[-1], code) == ("", error, 1), name
        assert "Traceback" not in err


def test_an_output_that_nobody_reads_is_none(recording: Path) -> None:
    ours, its = os.pipe()
    os.close(ours)
    done = subprocess.run([*DDPWATCH, "report", str(recording)], stdout=its, stderr=subprocess.PIPE, check=False)
    os.close(its)
    assert (done.returncode, done.stderr) == (1, b"")


def test_narration_that_cannot_be_written_is_nobodys_loss(recording: Path) -> None:
    """A job goes on, and so does what was asked for."""
    job = shlex.join([*DDPWATCH, "run", "--headless", "--", "sh", "-c", "exit 7"])
    report, missing, *jobs = shell(
        line(["report", "FILE"], recording, "2>/dev/full"),
        line(["report", "FILE"], recording.with_name("none"), "2>/dev/full"),
        f"{job} 2>/dev/full",
        f"{job} >/dev/full 2>/dev/full",
    )
    assert report[1:] == ("", 0)
    assert "Ranks (" in report[0]
    assert missing == ("", "", 2)
    assert [code for *_, code in jobs] == [7, 7]


def test_characters_that_the_encoding_lacks_are_replaced(recording: Path) -> None:
    commands = [line(command, recording) for name, command in COMMANDS.items() if name != "json"]
    for out, err, code in shell(*commands, PYTHONIOENCODING="ascii"):
        assert code == 0, err
        assert (out + err).isascii()


def test_no_name_of_a_file_reaches_the_terminal_as_it_is(recording: Path, tmp_path: Path) -> None:
    none, folder = tmp_path / f"none{CLEAR}\udcff", tmp_path / f"folder{CLEAR}"
    folder.mkdir()
    record(folder / f"a{CLEAR}.mcap")
    (folder / f"b{CLEAR}.mcap").touch()
    (bad := tmp_path / f"bad{CLEAR}.mcap").write_text("bad")
    commands = [
        *((command, recording) for name, command in COMMANDS.items() if name != "version"),
        *((COMMANDS[name], folder) for name in ("report", "lines")),
        *((COMMANDS[name], none) for name in ("report", "compare", "what if")),
        (["report", "FILE"], bad),
        (["export", "FILE", "-o", str(tmp_path / f"out{CLEAR}")], recording),
        (["export", "FILE", "-o", str(none / "out")], recording),
        (["report", "FILE", "--html", str(none / "out")], recording),
        (["whatif", "FILE", "--wire", str(none)], recording),
        (["attach", f"no{CLEAR}"], none),
        (["attach", f"ssh://{CLEAR}"], none),
        (["run", "--headless", "--record", str(none / "x.mcap"), "--", f"none{CLEAR}"], none),
        (["report", "FILE", f"extra{CLEAR}"], recording),
    ]
    said = ""
    for arguments, file in commands:
        done = ddpwatch(*words(arguments, file))
        assert done.returncode in (0, 1, 2)
        assert "Traceback" not in done.stderr
        said += done.stdout + done.stderr
    assert said.count("[2J") > len(commands) / 2  # they are named
    assert not {"\x1b", "\x07", "\x9b"} & set(said)


def test_the_dashboard_does_not_draw_into_a_file(recording: Path, tmp_path: Path) -> None:
    """stdin and stdout are a terminal; textual draws on stderr."""
    ours, its = os.openpty()
    with (tmp_path / "log").open("wb") as log:
        command = [*DDPWATCH, "replay", str(recording)]
        process = subprocess.Popen(command, stdin=its, stdout=its, stderr=log, start_new_session=True)
        os.close(its)
        shown = b""
        try:
            while block := os.read(ours, 1 << 16):
                shown += block
        except OSError:  # it has ended, and closed the terminal
            pass
        assert process.wait(PATIENCE_S) == 0
    os.close(ours)
    assert b"what stands out" in shown
    assert (tmp_path / "log").read_text() == "ddpwatch: no dashboard, since stderr is not the terminal: lines instead\n"


def test_what_python_does_not_buffer_arrives_line_by_line(tmp_path: Path) -> None:
    """With PYTHONUNBUFFERED, as in many containers: what a run says would come after its job."""
    with io.TextIOWrapper((tmp_path / "said").open("wb", buffering=0), write_through=True) as unbuffered:  # type: ignore[arg-type]
        said = streams._over(unbuffered, io.TextIOWrapper, must_arrive=True)
        print("the job goes on", file=said)
        assert (tmp_path / "said").read_text() == "the job goes on\n"
