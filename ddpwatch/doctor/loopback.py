"""The self-test: a made-up rank, a real collector, a viewer and a recording, in a private directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddpwatch.doctor.check import Check, Section, error_text
from ddpwatch.recording.reader import Recording
from ddpwatch.run import clock, rundir
from ddpwatch.run.subprocesses import module_command
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire import transport
from ddpwatch.wire.messages import RANK_MESSAGES, Beat, BucketLayout, Bye, Hello, Layout, Message, Step, encode

RUN_ID = "loop"
STEPS = 30
EXPECTED_S = 3.0
DEADLINE_S = 20.0  # for everything, until the collector has ended
_section = Section("self-test")
Start = Callable[[Path], "subprocess.Popen[bytes]"]


class SelfTestError(Exception):
    """A step of the self-test failed."""


def start_collector(recording: Path) -> subprocess.Popen[bytes]:
    """Starts the collector for the run `RUN_ID` of one rank, as rank 0 does."""
    arguments = ["--run-id", RUN_ID, "--world-size", "1", "--watch-pid", str(os.getpid()), "--record", str(recording)]
    with open(rundir.log(RUN_ID), "xb") as log:
        return subprocess.Popen(
            module_command("ddpwatch.collector", *arguments),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def check(directory: Path, start: Start = start_collector) -> Check:
    """Runs the self-test below a run directory, and leaves nothing there."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="doctor-", dir=directory))
    try:
        with _run_directory(folder):
            loop = Loopback(folder)
            try:
                loop.run(start)
                loop.end()
            except Exception as error:  # whatever it is, the path does not work
                return failed(loop.doing, error, loop.log())
            finally:
                loop.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return passed(len(loop.sent), loop.latencies_ns, time.monotonic() - began)


def failed(doing: str, error: Exception, log: str) -> Check:
    """Returns the step that failed, and the collector's last words."""
    said = f"; the collector's log ends with: {log}" if log else ""
    return _section.fail("loopback", f"{doing}: {error_text(error)}{said}", "if all else here is ok, report this line")


def passed(frames: int, latencies_ns: list[int], seconds: float) -> Check:
    """Returns what came through, and how fast."""
    latency = f"{statistics.median(latencies_ns) / 1e6:.1f} ms from rank to viewer (p50)"
    text = f"{frames} frames came through and were recorded, {latency}, {seconds:.1f} s in all"
    if seconds > EXPECTED_S:
        return _section.warn("loopback", f"{text}, above {EXPECTED_S:.0f} s", "is this machine busy, or its disk slow?")
    return _section.ok("loopback", text)


class Loopback:
    """One rank's socket, its collector, and a viewer.

    Attributes:
        doing: The step that is under way.
        sent: The frames of the rank.
        latencies_ns: From sending a step to its arrival at the viewer.
    """

    def __init__(self, folder: Path) -> None:
        self.doing = "prepare"
        self.sent: list[bytes] = []
        self.latencies_ns: list[int] = []
        self._received: list[bytes] = []
        self._run_ended = False
        self._recording = folder / "recording.mcap"
        self._deadline_s = time.monotonic() + DEADLINE_S
        self._process: subprocess.Popen[bytes] | None = None
        ingest, publish = rundir.endpoints(RUN_ID)
        self._context = transport.Context()
        self._rank = transport.rank_push(self._context)
        self._rank.connect(ingest)
        self._viewer = LiveSource(publish)

    def run(self, start: Start) -> None:
        """Runs everything from the start of the collector to its recording."""
        self.doing = "start the collector"
        self._process = start(self._recording)
        self.doing = "send a hello through it"
        self._pass_on(_hello(), _layout())
        self.doing = "send steps through it"
        for number in range(STEPS):
            sent_ns = time.monotonic_ns()
            self._pass_on(_step(number, sent_ns))
            self.latencies_ns.append(time.monotonic_ns() - sent_ns)
        self._pass_on(Beat(rank=0, at_ns=time.monotonic_ns(), step=STEPS, phase="input", since_ns=0))
        self.doing = "say goodbye"
        self._pass_on(Bye(rank=0, by="rank", reason="finished", at_ns=time.monotonic_ns()))
        self._until(lambda: self._run_ended)
        self.doing = "wait for its recording"
        self._until(rundir.last_view(RUN_ID).exists)  # the collector writes it once the recording is closed
        self.doing = "read the recording"
        self._compare_recording()

    def end(self) -> None:
        """Ends the collector, and looks for what it has left.

        Raises:
            SelfTestError: It does not end, or leaves its sockets.
        """
        self.doing = "end the collector"
        assert self._process is not None
        self._process.terminate()  # it would linger for viewers that attach late
        try:
            code = self._process.wait(max(0.0, self._deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise SelfTestError("it runs on after SIGTERM") from None
        left = [path.name for path in rundir.directory().glob(f"{RUN_ID}.*") if path.suffix in (".json", ".in", ".pub")]
        if code or left:
            raise SelfTestError(f"it left {', '.join(left)}" if left else f"exit code {code}")

    def log(self) -> str:
        """Returns the last line of the collector's log; empty without one."""
        try:
            lines = rundir.log(RUN_ID).read_text(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """Closes the sockets; kills the collector if it is still there."""
        self._rank.close(linger=0)
        self._context.term()
        self._viewer.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _pass_on(self, *messages: Message) -> None:
        """Sends messages as the rank, and waits until the viewer has them."""
        for message in messages:
            self.sent.append(encode(message))
            self._rank.send(self.sent[-1])
        self._until(lambda: len(self._received) >= len(self.sent))
        if self._received != self.sent:
            raise SelfTestError("the viewer received other frames than those that were sent")

    def _until(self, condition: Callable[[], bool]) -> None:
        """Reads as the viewer until the condition holds."""
        while not condition():
            if self._process is not None and self._process.poll() is not None:
                raise SelfTestError(f"the collector ended with exit code {self._process.returncode}")
            if time.monotonic() > self._deadline_s:
                raise SelfTestError(f"nothing more came within {DEADLINE_S:.0f} s")
            for message, envelope in self._viewer.read(0.02):
                if isinstance(message, Bye) and message.rank is None:
                    self._run_ended = True
                elif isinstance(message, RANK_MESSAGES):
                    self._received.append(envelope.frame)

    def _compare_recording(self) -> None:
        recording = Recording(self._recording)
        frames = [envelope.frame for message, envelope in recording if isinstance(message, RANK_MESSAGES)]
        if recording.cut_tail or frames[: len(self.sent)] != self.sent:
            raise SelfTestError(f"of {len(self.sent)} frames it has {len(set(frames) & set(self.sent))}")


@contextlib.contextmanager
def _run_directory(folder: Path) -> Iterator[None]:
    """Makes a folder the run directory, with no other setting of ddpwatch's."""
    before = {name: value for name, value in os.environ.items() if name.startswith("DDPWATCH")}
    for name in before:
        del os.environ[name]
    os.environ["DDPWATCH_DIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["DDPWATCH_DIR"]
        os.environ.update(before)


def _hello() -> Hello:
    return Hello(
        run_id=RUN_ID, rank=0, world_size=1, host="doctor", pid=os.getpid(), boot_id=clock.boot_id(),
        time_ns=clock.time_namespace(), backend="none", module="self-test", parameters=2,
    )  # fmt: skip


def _layout() -> Layout:
    return Layout(rank=0, module_name="self-test", params=["weight", "bias"], buckets=[BucketLayout(0, 8, [1, 0])])


def _step(number: int, now_ns: int) -> Step:
    return Step(rank=0, step=number, start_ns=now_ns - 1_000_000, duration_ns=1_000_000)
