"""Runs all checks, and shows them as text or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpwatch.common.text import clean, counted
from ddpwatch.doctor import configuration, directory, loopback, runs, system, terminal, training
from ddpwatch.doctor.check import Check, Section, State
from ddpwatch.run import rundir

MARKS: dict[State, str] = {"ok": "ok", "none": "--", "warn": "warn", "fail": "FAIL"}
COLOURS: dict[State, str] = {"ok": "32", "none": "2", "warn": "33", "fail": "31;1"}
NAME_WIDTH = 13
_INDENT = " " * (NAME_WIDTH + 10)
Checks = Callable[[], Iterable[Check]]


def examine() -> Iterator[Check]:
    """Yields all checks. Torch comes last: importing it takes seconds."""
    failed = False
    for found in guarded("run directory", directory.checks):
        failed = failed or found.state == "fail"
        yield found
    if not failed:
        yield from guarded("runs", runs.checks)
    yield from guarded("configuration", configuration.checks)
    yield from guarded("terminal", terminal.checks)
    yield from guarded("system", system.checks)
    if failed:
        text = "not run: it needs the run directory"
        yield Section("self-test").none("loopback", text, "see above")
    else:
        yield from guarded("self-test", lambda: [loopback.check(rundir.directory())])
    yield from guarded("training", training.checks)


def guarded(section: str, checks: Checks) -> Iterator[Check]:
    """Yields the checks; one that cannot be made is a line, too."""
    try:
        yield from checks()
    except Exception as error:
        text = f"could not be checked: {type(error).__name__}: {error}"
        yield Section(section).warn("other", text, "this is a fault of the doctor: please report it")


def print_report(as_json: bool, echo: Callable[[str], None]) -> bool:
    """Prints the report: JSON at the end, text as soon as each check is made.

    Returns:
        Whether ddpwatch can watch here.
    """
    seen: list[Check] = []
    look = Look.of(os.environ, sys.stdout.isatty(), sys.stdout.encoding, bool(sys.flags.utf8_mode))
    for check in examine():
        if not as_json:
            for line in lines(check, look, is_new_section=not seen or seen[-1].section != check.section):
                echo(line)
        seen.append(check)
    echo(json.dumps(document(seen), indent=2) if as_json else last_line(seen, look))
    return worst(seen) != "fail"


@dataclass(frozen=True, slots=True)
class Look:
    """What the output can show."""

    coloured: bool
    unicode: bool

    @classmethod
    def of(cls, environ: Mapping[str, str], is_terminal: bool, encoding: str, utf8_mode: bool) -> Look:
        """Returns the look of a text on this output."""
        dumb = environ.get("TERM", "") in terminal.DUMB
        utf8 = terminal.is_utf8(encoding) and terminal.is_utf8(terminal.locale_of(environ, utf8_mode))
        return cls(is_terminal and not dumb and not environ.get("NO_COLOR"), utf8)


def lines(check: Check, look: Look, is_new_section: bool) -> Iterator[str]:
    """Yields one check, with its hint; a section starts with its name."""
    if is_new_section:
        yield check.section
    name, text, hint = (_printable(part, look) for part in (check.name, check.text, check.hint))
    yield f"  {_mark(check.state, look)}  {name:<{NAME_WIDTH}}  {text}"
    if check.state != "ok":
        yield f"{_INDENT}-> {hint}"


def last_line(checks: Sequence[Check], look: Look) -> str:
    """Returns the summary, with the mark of what matters most."""
    return f"{_mark(worst(checks), look)}  {summary(checks)}"


def document(checks: Sequence[Check]) -> dict[str, Any]:
    """Returns the report as JSON; docs/metrics.md describes it."""
    return {
        "state": worst(checks),
        "summary": summary(checks),
        "checks": [
            {"section": c.section, "name": c.name, "state": c.state, "text": c.text, "hint": c.hint} for c in checks
        ],
    }


def worst(checks: Iterable[Check]) -> State:
    """Returns the state that matters most: ok, warn or fail. What is not here is no fault."""
    states = {check.state for check in checks}
    return "fail" if "fail" in states else "warn" if "warn" in states else "ok"


def summary(checks: Sequence[Check]) -> str:
    """Returns one line about all."""
    failures = [f"{check.section}: {check.name}" for check in checks if check.state == "fail"]
    warnings = sum(check.state == "warn" for check in checks)
    if failures:
        return f"ddpwatch cannot watch here ({', '.join(failures)})"
    if warnings:
        return f"ddpwatch works here, but for {counted(warnings, 'warning')}"
    return "ddpwatch works here"


def _mark(state: State, look: Look) -> str:
    mark = f"{MARKS[state]:<4}"
    return f"\x1b[{COLOURS[state]}m{mark}\x1b[0m" if look.coloured else mark


def _printable(text: str, look: Look) -> str:
    """Returns the text as this output can show it.

    Names of files may hold anything, also bytes that are no character.
    """
    text = clean(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    return text if look.unicode else text.encode("ascii", "backslashreplace").decode()
