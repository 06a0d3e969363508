"""A live run through ssh: a fake ssh command, the real other end, and a fake collector."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.viewer.over_ssh import address, link, protocol
from ddpwatch.viewer.over_ssh.ending import ending
from ddpwatch.viewer.plain import HEADER, lines
from ddpwatch.wire.messages import Bye, Status
from tests.support.fake_ssh import FakeSsh
from tests.support.publisher import Publisher

RUN = "train-1"
URL = f"ssh://me@node/{RUN}"
SAYS = "ddpwatch-stdio {} 9.9 train-1 2\n"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    made = FakeSsh(tmp_path)
    monkeypatch.setenv("DDPWATCH_SSH", str(made.path))
    monkeypatch.setattr(link, "PAUSES_S", (0.01,))
    return made


@pytest.fixture
def claim(run_directory: Path) -> Iterator[list[int]]:
    """A live run; it ends when the claim is closed."""
    ingest, publish = rundir.endpoints(RUN)
    claims = [rundir.claim(RUN)]
    info = RunInfo(
        run_id=RUN, ingest=ingest, publish=publish, pid=1, world_size=2, started=1.0, boot_id=rundir.clock.boot_id()
    )
    rundir.publish(claims[0], info)
    yield claims
    for file in claims:
        os.close(file)


@pytest.fixture
def publisher(claim: list[int]) -> Iterator[Publisher]:
    made = Publisher(rundir.endpoints(RUN)[1])
    yield made
    made.close()


@pytest.fixture
def source(ssh: FakeSsh, publisher: Publisher) -> Iterator[LiveSource]:
    made = LiveSource(URL)
    yield made
    made.close()


def read_until(source: LiveSource, condition: Callable[[list[int]], object]) -> list[int]:
    """The numbers of the frames that come until the condition holds."""
    found: list[int] = []
    deadline = time.monotonic() + 60.0
    while not condition(found):
        assert time.monotonic() < deadline, (found, source.trouble)
        found += [envelope.seq for _, envelope in source.read(0.05)]
    return found


def read(source: LiveSource, count: int) -> list[int]:
    return read_until(source, lambda found: len(found) >= count)


def wait_for(publisher: Publisher, request: bytes) -> None:
    """Waits until the collector has received a request."""
    deadline = time.monotonic() + 60.0
    while publisher.request() != request:
        assert time.monotonic() < deadline, request


def process_of(source: LiveSource) -> link.subprocess.Popen[bytes]:
    assert isinstance(source._socket, link.SshLink)
    assert source._socket._process is not None
    return source._socket._process


def test_the_snapshot_and_then_the_live_stream(ssh: FakeSsh, publisher: Publisher, source: LiveSource) -> None:
    publisher.answer([3, 7, 8], 8)
    publisher.live(8, 9)
    assert read(source, 4) == [3, 7, 8, 9]
    assert (source.missed, source.trouble) == (0, "")
    assert ssh.calls() == [f"-T me@node ddpwatch _stdio {RUN}"]


def test_ssh_dies_in_the_middle(publisher: Publisher, source: LiveSource) -> None:
    """The viewer connects again, and has each frame once: those of the gap come from another snapshot."""
    publisher.answer([1, 2], 2)
    publisher.live(3)
    assert read(source, 3) == [1, 2, 3]
    process_of(source).kill()
    assert read_until(source, lambda _: source.trouble) == []
    assert source.trouble == "me@node: ssh was killed by SIGKILL; trying again"
    publisher.live(4, 5)  # to nobody
    read_until(source, lambda _: not source.trouble)
    wait_for(publisher, b"\x01live")
    publisher.live(6)
    publisher.answer([3, 4, 5, 6], 6, source)
    publisher.live(7)
    assert read(source, 4) == [4, 5, 6, 7]
    assert source.missed == 0


def test_ssh_dies_in_the_middle_of_a_frame(ssh: FakeSsh, publisher: Publisher) -> None:
    """The part of a frame is dropped, and the frame comes with the snapshot."""
    first_line = len(protocol.opening(RUN, 2).line())
    ssh.relays(after=f"| {{ dd bs=1 count={first_line + 200} 2>/dev/null; kill -9 $$; }}")
    source = LiveSource(URL)
    ssh.relays()  # next time
    publisher.answer([1, 2, 3, 4], 4)
    before = read_until(source, lambda _: source.trouble)
    assert "SIGKILL" in source.trouble
    assert before == list(range(1, len(before) + 1))
    assert 0 < len(before) < 4
    read_until(source, lambda _: not source.trouble)
    source._ask_at_s = 0.0  # it would ask after `ANSWER_S`
    source.read(0.0)
    publisher.answer([1, 2, 3, 4], 4)
    assert before + read(source, 4 - len(before)) == [1, 2, 3, 4]
    source.close()


def test_a_budget_reaches_the_collector_and_ends_with_the_viewer(ssh: FakeSsh, publisher: Publisher) -> None:
    source = LiveSource(URL, budget_ppm=5000)
    process = process_of(source)
    wait_for(publisher, b"\x01want.5000")
    source.close()
    wait_for(publisher, b"\x00want.5000")
    assert process.returncode is not None


def test_the_other_end_goes_when_its_input_closes(publisher: Publisher, source: LiveSource) -> None:
    """So it does when the viewer is killed."""
    process = process_of(source)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_a_run_that_is_gone_is_given_up(claim: list[int], publisher: Publisher, source: LiveSource) -> None:
    publisher.answer([1], 1)
    assert read(source, 1) == [1]
    os.close(claim.pop())
    read_until(source, lambda _: source.over)
    assert source.trouble == "me@node: no frame from the collector for 0 s: it is gone"


def test_the_run_has_ended_when_ssh_is_back(
    ssh: FakeSsh, claim: list[int], publisher: Publisher, source: LiveSource
) -> None:
    publisher.answer([1], 1)
    assert read(source, 1) == [1]
    process_of(source).kill()
    os.close(claim.pop())
    read_until(source, lambda _: source.over)
    assert source.trouble == f"me@node: no live run called '{RUN}' (`ddpwatch ls` lists the live runs)"


def test_without_a_way_back_it_gives_up(
    ssh: FakeSsh, publisher: Publisher, source: LiveSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh.fails(255, "ssh: connect to host node port 22: No route to host\n")
    process_of(source).kill()
    read_until(source, lambda _: len(ssh.calls()) > 2)
    assert not source.over
    monkeypatch.setattr(link, "GIVE_UP_S", 0.0)
    read_until(source, lambda _: source.over)
    assert source.trouble.startswith("me@node: ssh ended with exit code 255: ssh: connect to host node port 22: No")


def test_a_connection_without_a_byte_is_dead(
    publisher: Publisher, source: LiveSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SILENT_S", 0.0)
    read_until(source, lambda _: source.trouble)
    assert source.trouble == "me@node: nothing came for 0 s; trying again"


def test_what_a_login_shell_prints_is_skipped(ssh: FakeSsh, publisher: Publisher) -> None:
    ssh.relays(before="echo Welcome; echo to the node; printf '$ '; echo Last login >&2")
    source = LiveSource(URL)
    publisher.answer([1], 1)
    assert read(source, 1) == [1]
    source.close()


def test_without_a_name_it_is_the_newest_run(ssh: FakeSsh, publisher: Publisher) -> None:
    """And the same one after a broken connection."""
    source = LiveSource("ssh://node:2222")
    process_of(source).kill()
    read_until(source, lambda _: source.trouble)
    read_until(source, lambda _: not source.trouble)
    assert ssh.calls() == ["-T -p 2222 node ddpwatch _stdio", f"-T -p 2222 node ddpwatch _stdio {RUN}"]
    source.close()


def test_plain_lines(ssh: FakeSsh, publisher: Publisher, capsys: pytest.CaptureFixture[str]) -> None:
    text = lines(URL)
    assert next(text) == HEADER
    publisher.answer([1], 1)
    publisher.message(2, Status(at_ns=1, frames=1, bytes=1, recording="/runs/a b.mcap", recording_bytes=1))
    publisher.message(3, Bye(rank=None, by="collector", reason="finished", at_ns=1))
    assert list(text)[1:] == ["recorded: ddpwatch report '/runs/a b.mcap'"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("code", "stderr", "stdout", "message", "hint"),
    [
        (
            255,
            "Warning: new key\nme@node: Permission denied\n",
            "",
            "exit code 255: me@node: Permission denied",
            "ssh me",
        ),
        (127, "bash: ddpwatch: command not found\n", "", "me@node: bash: ddpwatch: command not found", "PATH"),
        (2, "Try 'ddpwatch -h'\nError: No such command '_stdio'.\n", "", "No such command", "the same version"),
        (2, "ddpwatch: error: no live run\nhint: start one\n", "", "me@node: no live run", "start one"),
        (1, "", "This account is \x1b[31mnot available.\n", "me@node: This account is [31mnot available.", ""),
        (0, "", "", "me@node: ssh ended with exit code 0", ""),
        (0, "", SAYS.format(7), "ddpwatch 9.9 there does not speak", "install the same one"),
        (0, "", "x" * 70_000, "something other than ddpwatch answers", "login shell"),
        (0, "", SAYS.format(1) + "Password:" * 10, "a message of", "terminal"),
    ],
)
def test_no_connection_is_one_line_and_a_hint(
    ssh: FakeSsh, code: int, stderr: str, stdout: str, message: str, hint: str
) -> None:
    ssh.fails(code, stderr, stdout)
    with pytest.raises(DdpwatchError) as failure:
        LiveSource(URL).read(1.0)
    assert message in failure.value.message
    assert hint in failure.value.hint
    assert failure.value.message.isprintable()


def test_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_SSH", "/nowhere/ssh -4")
    with pytest.raises(UsageError, match="cannot start /nowhere/ssh: No such file"):
        LiveSource(URL)
    monkeypatch.setenv("DDPWATCH_SSH", "ssh '")
    with pytest.raises(UsageError, match="DDPWATCH_SSH: No closing quotation"):
        LiveSource(URL)


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("ssh://node", "-T node ddpwatch _stdio"),
        ("ssh://node/", "-T node ddpwatch _stdio"),
        ("ssh://a.b@login-1.site/train-12", "-T a.b@login-1.site ddpwatch _stdio train-12"),
        ("ssh://me@[fe80::1%eth0]:2222/r", "-T -p 2222 me@fe80::1%eth0 ddpwatch _stdio r"),
    ],
)
def test_the_command(url: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_SSH", "ssh -F 'my config'")
    assert address.parse(url).command() == ["ssh", "-F", "my config", *command.split()]


@pytest.mark.parametrize(
    "url",
    [
        "ssh://", "ssh://-oProxyCommand=touch x", "ssh://-l/r", "ssh://a@-x", "ssh://node/-r", "ssh://node/a;b",
        "ssh://node/$(x)", "ssh://node/../r", "ssh://node name", "ssh://node:x/r", "ssh://node/r\n", "ssh://nöde",
    ],
)  # fmt: skip
def test_no_option_and_nothing_for_a_shell(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a run"):
        address.parse(url)


def test_pieces_of_any_size() -> None:
    messages = [[b"live", bytes(16), b"x" * n] for n in (0, 1, 300)]
    sent = b"Hi\n" + protocol.opening("r", 3).line() + b"".join(map(protocol.pack, messages))
    for size in (1, 7, len(sent)):
        unpacker = protocol.Unpacker()
        pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
        assert [message for piece in pieces for message in unpacker.feed(piece)] == messages
        assert unpacker.opening == protocol.opening("r", 3)


@pytest.mark.parametrize("ranks", ["²", "9" * 5000, "-1", ""])
def test_a_first_line_that_makes_no_sense_is_refused(ranks: str) -> None:
    line = protocol.opening("r", 3).line().decode().removesuffix("3\n") + ranks
    with pytest.raises(DdpwatchError, match="does not speak"):
        list(protocol.Unpacker().feed(f"{line}\n".encode()))


def test_requests() -> None:
    for topic in (b"live", b"snap.0123456789abcdef", b"want.10000", b"stacks.4294967295.1048575.0.100000"):
        assert protocol.parse_request(protocol.request(b"+", topic).rstrip()) == (b"+", topic)
    for line in (b"", b"live", b"+other", b"+snap." + b"x" * 100, b"!live"):
        assert protocol.parse_request(line) is None


def test_an_exit_code_of_ddpwatch_is_final() -> None:
    codes = (0, 1, 2, 126, 127, 137, 255, -9)
    assert [code for code in codes if ending("node", code, "").final] == [1, 2, 126, 127]


def test_a_signal_without_a_name_is_named_by_its_number() -> None:
    assert ending("node", -40, "").error.message == "node: ssh was killed by signal 40"
    assert ending("node", -9, "").error.message == "node: ssh was killed by SIGKILL"
