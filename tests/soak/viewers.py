"""The audience of the soak test (`soak.py`): viewers that come and go at random, and are killed or suspended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.viewer.state import RunState
from tests.soak.jobs import BIN, Ledger, Place

KINDS = ("ls", "ls", "lines", "lines", "record", "record", "source", "source", "source", "dashboard")
ENDS = ("interrupted", "interrupted", "killed", "suspended")
LEAVE_S = 60.0
ASK_S = 3.0
NO_TRACEBACK = "viewers have no traceback"


def audience(place: Place, name: str, dice: random.Random, stop: threading.Event) -> None:
    """Viewers, one after the other, until it is time to stop."""
    for number in range(1 << 60):
        if stop.wait(dice.uniform(0.1, 2.0)):
            return
        kind = dice.choice(KINDS)
        place.ledger.checked[f"· viewers: {kind}"] += 1
        log = place.base / "viewers" / f"{name}{number}-{kind}.log"
        try:
            if kind == "source":
                read_along(dice, stop)
            else:
                visit(place.ledger, kind, log, dice, stop)
        except Exception as error:
            place.ledger.check(NO_TRACEBACK, False, log, f"{kind}: {error!r}")


def a_run(dice: random.Random) -> rundir.RunInfo | None:
    """Any live run."""
    runs = rundir.live_runs()
    return dice.choice(runs) if runs else None


def read_along(dice: random.Random, stop: threading.Event) -> None:
    """A viewer in this process."""
    if (info := a_run(dice)) is None:
        return
    state, deadline = RunState(), time.monotonic() + dice.uniform(0.5, 6.0)
    with contextlib.closing(LiveSource(info.publish)) as source:
        while time.monotonic() < deadline and state.end is None and not stop.is_set():
            for message, envelope in source.read(0.2):
                state.apply_message(message, envelope.received_ns)


def visit(ledger: Ledger, kind: str, log: Path, dice: random.Random, stop: threading.Event) -> None:
    """A viewer process; how it ends is drawn."""
    info = a_run(dice)
    recording = log.with_suffix(".mcap")
    command = {
        "ls": ["ls"],
        "lines": ["attach", *([info.run_id] if info is not None else []), "--plain"],
        "record": ["record", *([info.run_id] if info is not None else []), "-o", str(recording)],
        "dashboard": ["attach"],
    }[kind]
    end = dice.choice(ENDS) if kind != "ls" else "by itself"
    with started(command, log, terminal=kind == "dashboard") as (process, ask):
        if end != "by itself":
            rest(process, dice.uniform(0.2, 8.0), stop)
            disturb(process, end, dice, stop)
        left = leaves(process, ask if end in ("interrupted", "suspended") else None)
    ledger.check("viewers end when they are asked to", left, log, f"{kind}, {end}")
    text = log.read_text(errors="replace")
    raised = text.count("Traceback") - text.count("KeyboardInterrupt")  # Ctrl-C while Python is still importing
    ledger.check(NO_TRACEBACK, raised <= 0, log, f"{kind}, {end}: exit code {process.returncode}")
    if kind == "record" and recording.exists() and recording.stat().st_size:
        check_opens(ledger, recording, end)


@contextlib.contextmanager
def started(
    command: list[str], log: Path, terminal: bool
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], object]]]:
    """``ddpwatch`` in a session of its own, for the dashboard in a terminal of 80 × 24. Killed at the end.

    Yields:
        The process, and what asks it to leave: Ctrl-C, or the key q in a terminal.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        source: int = subprocess.DEVNULL
        target: int = output.fileno()
        if terminal:
            master, source = pty.openpty()
            target = source
            fcntl.ioctl(source, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            copier = threading.Thread(target=copy, args=(master, log), daemon=True)
            copier.start()
            stack.callback(copier.join, LEAVE_S)
        process = subprocess.Popen(
            [BIN / "ddpwatch", *command], stdin=source, stdout=target, stderr=target, start_new_session=True
        )
        if terminal:
            os.close(source)
        ask = partial(os.write, master, b"q") if terminal else partial(process.send_signal, signal.SIGINT)
        try:
            yield process, ask
        finally:
            process.kill()
            process.wait()


def copy(terminal: int, log: Path) -> None:
    """Writes what a terminal shows to a file, until the other side closes it."""
    with log.open("ab") as file, contextlib.suppress(OSError):
        while data := os.read(terminal, 1 << 16):
            file.write(data)
    os.close(terminal)


def rest(process: subprocess.Popen[bytes], seconds: float, stop: threading.Event) -> None:
    """Lets the viewer watch for some time, or until it leaves."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None and not stop.is_set():
        time.sleep(0.05)


def disturb(process: subprocess.Popen[bytes], end: str, dice: random.Random, stop: threading.Event) -> None:
    """Kills the viewer, or suspends it for a few seconds."""
    if end == "killed":
        process.kill()
    elif end == "suspended":
        process.send_signal(signal.SIGSTOP)
        stop.wait(dice.uniform(1.0, 5.0))
        process.send_signal(signal.SIGCONT)
        rest(process, 2.0, stop)


def leaves(process: subprocess.Popen[bytes], ask: Callable[[], object] | None = None) -> bool:
    """Whether the viewer leaves. It is asked more than once: a terminal forgets keys when a program takes it over."""
    deadline = time.monotonic() + LEAVE_S
    while process.poll() is None and time.monotonic() < deadline:
        if ask is not None:
            with contextlib.suppress(OSError):
                ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ASK_S)
    return process.poll() is not None


def check_opens(ledger: Ledger, recording: Path, end: str) -> None:
    """What a viewer has recorded opens, even if it was killed."""
    try:
        frames = sum(1 for _ in Recording(recording))
        ledger.check("viewers' recordings open", True, recording, str(frames))
    except (DdpwatchError, OSError, ValueError) as error:
        ledger.check("viewers' recordings open", False, recording, f"{end}: {error!r}")
    recording.unlink()


def rss_mib(pid: int) -> float:
    """A process's resident memory in MiB; 0 if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(psutil.Process(pid).memory_info().rss / 2**20)
    return 0.0
