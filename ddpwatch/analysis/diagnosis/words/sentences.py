"""Sentences on late ranks, pauses, and what slows all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ddpwatch.analysis.diagnosis.incident import Incident, ModuleBucket
from ddpwatch.analysis.diagnosis.words.wording import ms_named, phase_named, place, ranks_named
from ddpwatch.common.text import in_ms


class LayerNames(Protocol):
    """The names of parameters; "" where a name is not known."""

    def bucket_layer(self, index: int, rank: int | None = None, module: int | None = None) -> str:
        """Returns the first parameter of a bucket, on a rank, of a module; of a parameter group its name."""

    def unit(self, rank: int | None = None) -> str:
        """Returns what is communicated: bucket, or parameter group."""

    def bucket_params(self, index: int, rank: int | None = None, module: int | None = None) -> list[str]:
        """Returns all parameters of a bucket, on a rank, of a module; empty if they are not known."""

    def layer(self, param: int, rank: int | None = None) -> str:
        """Returns the parameter with that id, on a rank."""


_PAUSE_NOUNS = {"gc": "garbage collection", "checkpoint": "checkpoint", "compilation": "compilation"}


def late_rank_sentence(incident: Incident, names: LayerNames | None) -> str:
    """Returns what a late rank does, or did, and why, as far as that is known."""
    rank, evidence = incident.ranks[0], incident.evidence
    is_late, gets, takes = ("is late", "gets", "takes") if incident.open else ("was late", "got", "took")
    text = f"rank {rank} {is_late} by {ms_named(evidence.late_ms)}{_how_often(incident)}"
    text += _whose(evidence.group or ())
    if incident.kind == "drift":
        text += f", and {gets} later and later"
    if incident.phase:
        text += f": {phase_named(incident.phase)} {takes} {ms_named(evidence.excess_ms)} longer"
    if names is not None and incident.param is not None and (layer := names.layer(incident.param, rank)):
        text += f", from {layer} on"
    elif incident.bucket is not None and incident.phase in ("", "backward"):
        bucket = incident.module or 0, incident.bucket
        text += f", from {unit(names, rank)} {bucket_named(bucket, names, rank)} on"
    return text


def _whose(ranks: Sequence[int]) -> str:
    """Names a group, unless it is the ranks from 0 on."""
    return "" if list(ranks) == list(range(len(ranks))) else f" in its group ({ranks_named(ranks)})"


def _how_often(incident: Incident) -> str:
    if incident.kind != "intermittent":
        return " in each step"
    if incident.period is not None:
        return f" in every {ordinal(incident.period)} step"
    return f" in {incident.steps} of {incident.evidence.watched_steps} watched steps"


def ordinal(number: int) -> str:
    """Returns ``2nd``, ``3rd``, ``4th``."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def unit(names: LayerNames | None, rank: int | None = None) -> str:
    """Returns what is communicated: bucket, or parameter group."""
    return "bucket" if names is None else names.unit(rank)


def bucket_named(bucket: ModuleBucket, names: LayerNames | None, rank: int | None = None) -> str:
    """Returns the bucket's index, with its module's number unless that is 0, and its first parameter, if known."""
    module, index = bucket
    number = f"{module}:{index}" if module else str(index)
    layer = names.bucket_layer(index, rank, module) if names is not None else ""
    return f"{number} ({layer})" if layer else number


def pause_sentence(ranks: Sequence[int], phase: str, step: int, longest_ns: int, count: int) -> str:
    """Returns a pause of one rank or of all."""
    who = ranks_named(ranks) if ranks else "every rank"
    what = _PAUSE_NOUNS.get(phase, phase)
    why = f" ({what})" if phase in _PAUSE_NOUNS or phase == "validation" else f" {place(phase)}" if phase else ""
    if count > 1:
        return f"{who} paused {count} times{why}, for up to {in_ms(longest_ns)}"
    return f"{who} paused for {in_ms(longest_ns)}{why} at step {step}"


def exposed_sentence(
    share: float,
    bucket: ModuleBucket | None,
    which: str,
    names: LayerNames | None,
    is_open: bool,
    is_split: bool = True,
) -> str:
    """Names transfers that no compute hides; if waits could not be split off, both.

    Args:
        share: Of a step.
        bucket: The one that is exposed most.
        which: In launch order: ``first``, ``middle``, ``last`` or ``only``; empty if that is not known.
        names: Of parameters.
        is_open: Whether that lasts.
        is_split: Whether waits were split off.
    """
    hides, take = ("hides", "take") if is_open else ("hid", "took")
    what = "transfers" if is_split else "waits or transfers (unknown which, as not all ranks can be compared)"
    text = f"exposed communication: {what} that no compute {hides} {take} {100 * share:.0f} % of a step"
    if bucket is None:
        return text
    part = "all" if which == "only" else "most"
    the = f"the {which} " if which in ("only", "first", "last") else ""
    middle = ", one in the middle" if which == "middle" else ""
    return f"{text}, {part} of it {the}{unit(names)} {bucket_named(bucket, names)}{middle}"


def input_sentence(share: float, is_open: bool) -> str:
    """Says that all ranks wait for data."""
    return f"slow input: the loop {'waits' if is_open else 'waited'} for data during {100 * share:.0f} % of a step"


def link_sentence(slower: float, ranks: Sequence[int], busbw: tuple[float, float] | None, is_open: bool) -> str:
    """Says that transfers have become slower.

    Args:
        slower: How many times as long they take.
        ranks: Among these; empty for all.
        busbw: Before and since (GB/s).
        is_open: Whether that lasts.
    """
    among = f" among {ranks_named(ranks)}" if ranks else ""
    text = f"transfers{among} {'take' if is_open else 'took'} {slower:.1f} times as long as before"
    return text if busbw is None else f"{text} (busbw {busbw[1]:.3g} instead of {busbw[0]:.3g} GB/s)"


def drift_sentence(growth: float, is_open: bool) -> str:
    """Says that all ranks get slower and slower."""
    get, takes = ("get", "takes") if is_open else ("got", "took")
    return f"all ranks {get} slower and slower: a step {takes} {100 * growth:.0f} % longer than at first"


def slower_sentence(longer: float, is_open: bool) -> str:
    """Says that all ranks are slower from a step on."""
    are, takes = ("are", "takes") if is_open else ("were", "took")
    return f"all ranks {are} slower: a step {takes} {100 * longer:.0f} % longer than before"
