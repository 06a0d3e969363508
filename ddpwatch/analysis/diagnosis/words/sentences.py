"""What a late rank does, in a sentence, and the names in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ddpwatch.analysis.diagnosis.incident import Incident, ModuleBucket
from ddpwatch.analysis.diagnosis.words.wording import ms_named, phase_named, ranks_named


class LayerNames(Protocol):
    """The names of parameters; "" where a name is not known."""

    def bucket_layer(self, index: int, rank: int | None = None, module: int | None = None) -> str:
        """Returns the largest parameter of a bucket, on a rank, of a module; of a parameter group its name."""

    def unit(self, rank: int | None = None, module: int | None = None) -> str:
        """Returns what is communicated, by a module: bucket, parameter group, or collective."""

    def bucket_params(self, index: int, rank: int | None = None, module: int | None = None) -> list[str]:
        """Returns all parameters of a bucket, on a rank, of a module; empty if they are not known."""

    def layer(self, param: int, rank: int | None = None) -> str:
        """Returns the parameter with that id, on a rank."""


def late_rank_sentence(incident: Incident, names: LayerNames | None) -> str:
    """Returns what a late rank does, or did, and why, as far as that is known."""
    rank, evidence = incident.ranks[0], incident.evidence
    is_late, gets, takes = ("is late", "gets", "takes") if incident.open else ("was late", "got", "took")
    whose = f"rank {rank}'s pipeline stage" if evidence.own_stage else f"rank {rank}"
    text = f"{whose} {is_late} by {ms_named(evidence.late_ms)}{_how_often(incident)}"
    text += _whose(evidence.group or ())
    if incident.kind == "drift":
        text += f", and {gets} later and later"
    parts = dict(evidence.parts_ms or {})
    if phase := incident.phase or next(iter(parts), ""):
        longer_ms = evidence.excess_ms if incident.phase else parts[phase]
        text += f": {phase_named(phase, evidence.rest_after)} {takes} {ms_named(longer_ms)} longer"
    text += _where(incident, names)
    return text + "".join(f"; {phase_named(one)} {ms_named(ms)}" for one, ms in parts.items() if one != phase)


def _where(incident: Incident, names: LayerNames | None) -> str:
    """Names where in the backward a rank loses time, as far as that is known."""
    rank = incident.ranks[0]
    if incident.evidence.throughout:
        return " throughout"
    if names is not None and incident.param is not None and (layer := names.layer(incident.param, rank)):
        return f", from {layer} on"
    phase_known = bool(incident.phase or incident.evidence.parts_ms)
    if incident.bucket is not None and (incident.phase == "backward" or not phase_known):
        bucket = incident.module or 0, incident.bucket
        return f", from {unit(names, bucket, rank)} {bucket_named(bucket, names, rank)} on"
    return ""


def _whose(ranks: Sequence[int]) -> str:
    """Names a group, unless it is the ranks from 0 on."""
    return "" if list(ranks) == list(range(len(ranks))) else f" in its group ({ranks_named(ranks)})"


def _how_often(incident: Incident) -> str:
    if incident.kind != "intermittent":
        return " in each step"
    if incident.period is not None:
        return f" in {each(incident.period)}"
    return f" in {incident.steps} of {incident.evidence.watched_steps} timed steps"


def each(period: int) -> str:
    """Returns ``every step``, ``every 2nd step``."""
    return "every step" if period == 1 else f"every {ordinal(period)} step"


def ordinal(number: int) -> str:
    """Returns ``2nd``, ``3rd``, ``4th``."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def unit(names: LayerNames | None, bucket: ModuleBucket, rank: int | None = None) -> str:
    """Returns what is communicated: bucket, parameter group, or collective."""
    return "bucket" if names is None else names.unit(rank, bucket[0])


def bucket_named(bucket: ModuleBucket, names: LayerNames | None, rank: int | None = None) -> str:
    """Returns the bucket's index, with its module's number unless that is 0, and its largest parameter, if known.

    Of a job's own collective, the place that issues it.
    """
    module, index = bucket
    number = f"{module}:{index}" if module else str(index)
    layer = names.bucket_layer(index, rank, module) if names is not None else ""
    if layer and unit(names, bucket, rank) == "collective":
        return layer
    return f"{number} ({layer})" if layer else number
