"""What several commands do: find the run that is meant, open a recording, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from ddpwatch.recording.reader import Recording
    from ddpwatch.run.rundir import RunInfo


def say(text: str) -> None:
    """Prints to stderr."""
    print(text, file=sys.stderr, flush=True)


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


def is_plain(plain: bool) -> bool:
    """Returns whether lines are printed. Keys come from stdin, and textual draws on stderr, wherever that leads."""
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


def notifying(
    on_incident: str | None,
    notify: str | None,
    runs: Callable[[], Sequence[RunInfo]],
    endpoint: str | None = None,
    say_later: Callable[[str], object] | None = None,
) -> AbstractContextManager[None]:
    """Returns what passes on incidents while it is entered.

    Args:
        on_incident: A shell command.
        notify: A web address.
        runs: The runs of now.
        endpoint: Of the run, instead, if it is not on this machine.
        say_later: Gets what goes wrong; by default, stderr does.

    Raises:
        UsageError: It is no web address.
    """
    from contextlib import nullcontext

    if not (on_incident or notify):
        return nullcontext()
    from ddpwatch.viewer import notify as notifier

    calls = [notifier.run_command(on_incident)] if on_incident else []
    calls += [notifier.post_to(notify)] if notify else []

    def targets() -> list[notifier.Target]:
        return [(endpoint, None)] if endpoint is not None else [(info.publish, info) for info in runs()]

    return notifier.notifying(calls, targets, say_later or (lambda text: say(f"ddpwatch: {text}")))
