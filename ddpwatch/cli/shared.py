"""What several commands do: find the run that is meant, open a recording, print."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpwatch.recording.reader import Recording
    from ddpwatch.run.rundir import RunInfo
    from ddpwatch.viewer.follow import ListRuns, Looker
    from ddpwatch.viewer.notify import Call


def say(text: str) -> None:
    """Prints to stderr."""
    print(text, file=sys.stderr, flush=True)


def interrupt_once() -> None:
    """Lets the first Ctrl-C end the command, and has further ones ignored: what it ends takes a moment."""
    import signal

    def interrupt(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)


def say_recording(file: Path, budget_ppm: int) -> None:
    """Says what a recording will hold."""
    from ddpwatch.sampling.lease import detail_name, detail_sentence

    say(f"ddpwatch: recording to {file}; detail {detail_name(budget_ppm)}: {detail_sentence(budget_ppm)}")


def print_json(document: object) -> None:
    """Prints a document to stdout."""
    import json

    import msgspec

    print(json.dumps(msgspec.to_builtins(document), indent=2))


def print_note(note: str) -> None:
    """Prints a note to stderr."""
    say(f"note: {note}")


def opened(file: Path) -> Recording:
    """Opens a recording and prints its notes."""
    from ddpwatch.recording.reader import Recording

    recording = Recording(file)
    for note in recording.notes:
        print_note(note)
    return recording


def is_recording(target: str) -> bool:
    """Returns whether a recording is meant, not a run."""
    from ddpwatch.recording.names import is_path

    return "://" not in target and (Path(target).exists() or is_path(target))


def recording_of(target: str | None) -> Path | None:
    """Returns the recording that is meant, or that a run has left which has ended; None for a live run."""
    from ddpwatch.run import rundir

    if target is not None and is_recording(target):
        return Path(target)
    if "://" in (name := target or "") or any(info.run_id.startswith(name) for info in rundir.live_runs()):
        return None
    left = next(iter(rundir.last_views_of(name)), None)
    if left is not None:
        print_note(f"{rundir.run_of(left)} has ended")
    return left


def is_plain(plain: bool) -> bool:
    """Returns whether lines are printed. Keys come from stdin, and textual draws on stderr, wherever that leads.

    Below ``ddpwatch serve``, both lead to a browser.
    """
    if not plain and "TEXTUAL_DRIVER" in os.environ:
        return False
    if plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    if is_redirected := not sys.stderr.isatty():
        say("ddpwatch: no dashboard, since stderr is not the terminal: lines instead")
    return is_redirected


def no_baseline(baseline: Path | None) -> None:
    """Refuses a baseline where there is no dashboard."""
    if baseline is not None:
        raise UsageError("--baseline needs the dashboard", "ddpwatch compare A B compares two recordings")


def resolve(name: str | None) -> tuple[RunInfo | None, str | None]:
    """Returns the run or the endpoint that a RUN argument names; both None for the newest run."""
    from ddpwatch.run import rundir
    from ddpwatch.viewer.over_ssh.address import SCHEME
    from ddpwatch.wire import transport

    if name is None:
        return None, None
    if "://" in name:
        return None, name if name.startswith(SCHEME) else transport.check_endpoint(name)
    return rundir.find(name), None


def endpoint_of(info: RunInfo | None, endpoint: str | None) -> str:
    """Returns the endpoint to read from: that of the run, of the newest one if none is named."""
    from ddpwatch.run import rundir

    if endpoint is not None:
        return endpoint
    info = info or rundir.newest_run()
    if info is None:
        raise UsageError("no live run", "start one first; `ddpwatch ls` lists the live runs")
    return info.publish


@contextlib.contextmanager
def watching(
    calls: Sequence[Call],
    list_runs: ListRuns,
    endpoint: str | None = None,
    *,
    at_once: bool = False,
    recording: Path | None = None,
    looker: Looker | None = None,
) -> Iterator[None]:
    """Passes on the incidents of runs while the block lasts.

    Args:
        calls: What is done with each.
        list_runs: The runs of now.
        endpoint: Of the one run, instead, if it is not on this machine.
        at_once: Say at once what goes wrong with a call, and not only at the end: no dashboard is in the way.
        recording: The one that is made here.
        looker: Looks at each run, too.
    """
    if not calls and looker is None:
        yield
        return
    from ddpwatch.viewer.follow import following
    from ddpwatch.viewer.notify import Notifier

    notes: list[str] = []
    notifier = Notifier(calls, _say_own if at_once else notes.append, recording=str(recording or ""))
    try:
        with following(list_runs, [notifier.looker, *([looker] if looker else [])], endpoint):
            yield
    finally:
        notifier.close()
        for note in notes:
            _say_own(note)


def alert_calls(on_incident: str | None, notify: str | None) -> Sequence[Call]:
    """Returns what ``--on-incident`` and ``--notify`` ask for.

    Raises:
        UsageError: It is no web address.
    """
    if not (on_incident or notify):
        return []
    from ddpwatch.viewer.notify import calls_of

    return calls_of(on_incident, notify)


def _say_own(text: str) -> None:
    say(f"ddpwatch: {text}")
