"""Answers ``ddpwatch whatif`` from frames: a recording's, or what a running job's collector retains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

from ddpwatch.errors import UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.run.regular import read_regular
from ddpwatch.whatif.answer import WhatIf, WhatIfAnswer
from ddpwatch.whatif.recorded import Recorded, recorded_of
from ddpwatch.whatif.scenarios import Change, parse_hook
from ddpwatch.whatif.summary import not_predicted
from ddpwatch.whatif.wire import Wire, parse_wire

if TYPE_CHECKING:
    from ddpwatch.viewer.live_source import LiveSource

LEAST_CAP_MIB, MOST_CAP_MIB = 0.001, 4096.0


@dataclass
class WhatIfOptions:
    """What the command line asks for: the values of each option."""

    caps: str | None = None
    first_cap: str | None = None
    hooks: str | None = None
    links: str | None = None
    without_rank: int | None = None
    worlds: str | None = None
    accumulate: str | None = None
    bucket_view: bool = False
    static_graph: bool = False
    no_input: bool = False
    perfect: bool = False

    def changes(self) -> list[Change]:
        """Returns each option's changes alone, and each two options' together; empty if nothing is asked for.

        Raises:
            UsageError: A value is not valid.
        """
        firsts = _numbers("--first-cap", self.first_cap, LEAST_CAP_MIB, MOST_CAP_MIB)
        caps = _numbers("--cap", self.caps, LEAST_CAP_MIB, MOST_CAP_MIB)
        hooks = (self.hooks or "").split(",")
        options = [
            [Change(cap_mib=cap, first_mib=first) for first in (firsts or (None,)) for cap in caps]
            or [Change(first_mib=first) for first in firsts],
            [Change(hook=hook) for hook in dict.fromkeys(map(parse_hook, filter(str.strip, hooks)))],
            [Change(link=link) for link in _numbers("--link", self.links, 0.01, 1000) if link != 1],
            [] if self.without_rank is None else [Change(without_lateness_of=self.without_rank)],
            [Change(world=int(world)) for world in _numbers("--ranks", self.worlds, 2, 65536, whole=True)],
            [Change(accumulate=int(k)) for k in _numbers("--accumulate", self.accumulate, 2, 1024, whole=True)],
            [Change(bucket_view=True)] if self.bucket_view else [],
            [Change(static_graph=True)] if self.static_graph else [],
            [Change(no_input=True)] if self.no_input else [],
            [Change(perfect=True)] if self.perfect else [],
        ]
        alone = [change for changes in options for change in changes]
        pairs = [a | b for one, other in combinations(options, 2) for a, b in product(one, other)]
        if not alone and self.links is not None:
            raise UsageError("--link 1 changes nothing", "give e.g. --link 2")
        return alone + pairs


def _numbers(option: str, text: str | None, least: float, most: float, whole: bool = False) -> list[float]:
    """Returns the numbers of a list, each once."""
    try:
        found = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        found = [least - 1]
    if not all(least <= number <= most and (not whole or number == int(number)) for number in found):
        kind = f"{'whole ' if whole else ''}numbers from {least:g} to {most:g}"
        raise UsageError(f"{option} {text} is not a list of {kind}", f"give e.g. {option} 2,4")
    return list(dict.fromkeys(found))


def recorded_in(file: Path) -> tuple[Recorded, list[str]]:
    """Returns what a recording shows, with notes about it.

    Raises:
        UsageError: It cannot be read, or carries no prediction.
    """
    recording = Recording(file)
    try:
        found = recorded_of(message for message, _ in recording)
    except UsageError as error:
        if recording.cut_tail:
            raise UsageError(f"{file} is cut off or damaged, and before that: {error.message}", error.hint) from None
        raise
    notes = [*recording.notes, *recording.left_out]
    if recording.cut_tail:
        notes[-1] = f"{file} is cut off or damaged; {len(found.steps)} steps timed in full before that are used"
    return found, notes


def recorded_live(source: LiveSource) -> Recorded:
    """Returns what a running job's collector retains.

    Raises:
        UsageError: It does not answer, or that carries no prediction.
    """
    from ddpwatch.viewer.live_source import snapshot

    try:
        return recorded_of(message for message, _ in snapshot(source))
    finally:
        source.close()


def read_wire(file: Path) -> Wire:
    """Reads ``wire.json``.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        return parse_wire(read_regular(file))
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror or error}", "make one with python -m ddpwatch.whatif.sweep"
        ) from None


def answer(recorded: Recorded, changes: Sequence[Change], wire: Wire | None = None) -> WhatIfAnswer:
    """Returns the answer, as ``ddpwatch whatif --json`` prints it; without changes, to what is worth trying."""
    asked = WhatIf(recorded, wire)
    if not changes:
        asked.note_what_is_missing()
    return asked.answer(asked.ask(list(changes) or list(asked.default_changes())))


def check_answered(found: WhatIfAnswer) -> None:
    """Passes if anything was predicted.

    Raises:
        UsageError: All that was asked for was refused.
    """
    if not found.scenarios:
        raise UsageError(
            "not predicted: " + "; ".join(f"{changes}: {why}" for changes, why in not_predicted(found.refused))
        )
