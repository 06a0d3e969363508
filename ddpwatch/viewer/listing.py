"""Lists live runs, of this machine and through ssh of others, each with its verdict."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from ddpwatch.analysis.diagnosis.incident_json import lost_row
from ddpwatch.analysis.figures import VerdictFigures
from ddpwatch.analysis.window import summarise
from ddpwatch.common.text import clean, number, percent, table
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.live_source import LiveSource, snapshot
from ddpwatch.viewer.over_ssh.address import Address, parse
from ddpwatch.viewer.over_ssh.ending import ending
from ddpwatch.viewer.state import RunState

LOOK_S = 3.0  # for a run's frames, for one look
NODE_S = 60.0  # for the answer of another machine
MOST_NODES = 16  # that are asked at a time
_HEADER = ["run", "ranks", "started", "where", "steps/s", "lost", "run before", "recording"]
_BRIEF = 6  # columns, for a screen


class LiveRow(RunInfo, kw_only=True):
    """A run, and how it does. ``node``: the address of its machine, if it was listed through ssh."""

    verdict: VerdictFigures
    steps_per_s: float | None = None
    lost: float | None = None
    node: str = ""


def row_of(info: RunInfo) -> LiveRow:
    """Returns a run with its figures, as far as its collector still knows its steps, or with why there are none."""
    source, state = LiveSource(info.publish), RunState()
    about = msgspec.structs.asdict(info)
    try:
        for message, envelope in snapshot(source, LOOK_S):
            state.apply_message(message, envelope.received_ns, envelope.frame)
    except UsageError as error:
        return LiveRow(**about, verdict=VerdictFigures("unseen", "none", error.message))
    finally:
        source.close()
    summary, diagnosis = summarise(state.window()), state.diagnosis
    rate = None if state.stale(summary.step_ns).steps else summary.rate
    found = state.verdict(summary, diagnosis.incidents())
    verdict = VerdictFigures(found.kind, found.severity, found.with_others(), found.next_step)
    return LiveRow(**about, verdict=verdict, steps_per_s=rate, lost=lost_row(diagnosis.lost()).lost_share)


def rows_here(_: Callable[[str], object]) -> list[LiveRow]:
    """Returns the live runs of this machine."""
    return [row_of(run) for run in rundir.live_runs()]


def rows_on(urls: Iterable[str], note: Callable[[str], object]) -> list[LiveRow]:
    """Returns the live runs of other machines, asked at the same time; ``note`` gets what is wrong with one.

    Raises:
        UsageError: An address is none.
    """
    addresses = [parse(url) for url in urls]

    def ask(address: Address) -> list[LiveRow]:
        try:
            return _rows_at(address)
        except DdpwatchError as error:
            note(str(error))
            return []

    with ThreadPoolExecutor(MOST_NODES) as pool:
        return [row for rows in pool.map(ask, addresses) for row in rows]


def _rows_at(address: Address) -> list[LiveRow]:
    """Asks another machine. Ssh cannot ask for a password: it has no terminal."""
    quiet = {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
    command = address.command("ls", "--json")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=NODE_S, start_new_session=True, env=quiet
        )
    except subprocess.TimeoutExpired as error:
        raise DdpwatchError(f"{address.node}: no answer for {NODE_S:.0f} s") from error
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror}", "DDPWATCH_SSH names another command") from error
    if done.returncode:
        raise ending(address.node, done.returncode, done.stderr.decode(errors="replace")).error
    try:
        rows = msgspec.json.decode(done.stdout or b"[]", type=list[LiveRow])
    except msgspec.DecodeError as error:
        raise DdpwatchError(
            f"{address.node}: it answers something else", "install ddpwatch of the same version there"
        ) from error
    wanted = [row for row in rows if row.run_id.startswith(address.run)]
    return [msgspec.structs.replace(row, node=address._replace(run="").url()) for row in wanted]


def address_of(run: RunInfo) -> str:
    """Returns where a run of another machine is; "" for one of this machine."""
    node = run.node if isinstance(run, LiveRow) else ""
    return parse(node)._replace(run=run.run_id).url() if node else ""


def run_table(runs: Sequence[RunInfo]) -> list[str]:
    """Returns the runs as aligned lines."""
    return table(_HEADER, [[clean(cell) for cell in _cells(info)] for info in runs])


def brief_table(runs: Sequence[RunInfo]) -> list[str]:
    """Returns the same without what is long."""
    return table(_HEADER[:_BRIEF], [[clean(cell) for cell in _cells(info)[:_BRIEF]] for info in runs])


def _cells(info: RunInfo) -> list[str]:
    rate, lost = (info.steps_per_s, info.lost) if isinstance(info, LiveRow) else (None, None)
    started = time.strftime("%H:%M:%S", time.localtime(info.started))
    figures = [number(rate, 2), percent(lost, 1)]
    return [info.run_id, str(info.world_size), started, _place(info), *figures, info.previous, info.recording]


def _place(info: RunInfo) -> str:
    """Returns where a run's collector is. Nobody here knows whether it is alive on another host."""
    if isinstance(info, LiveRow) and info.node:
        return info.node
    if not rundir.is_elsewhere(info):
        return "here"
    return f"on {info.host}" + (", an earlier boot" if info.host == socket.gethostname() else "")
