"""Phrases that verdicts and findings share."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from ddpwatch.analysis.diagnosis.incident import End, Evidence, Incident, StackGroup, is_by_ctrl_c
from ddpwatch.analysis.diagnosis.kinds import KINDS, Kind
from ddpwatch.common.text import UNKNOWN, in_ms, percent, spans
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.wire.messages import NO_LONGER_WATCHED, BusyProcess, Bye

_MOST_NAMED = 6
_MOST_OF_ERROR = 100  # characters of an exception that a sentence quotes
_CPP_PLACE = re.compile(r"[\[(]?[\w./]*/[\w./-]+\.(?:cc|cpp|cu|hp?p?):\d+[\])]?[,:]? ?")  # where C++ raised it
LIVE_PHASES = {  # where a heartbeat says that training is
    "input": "between steps", "between": "between phases", "sync": "waiting for buckets",
}  # fmt: skip
ACTIVITIES = {
    "data": "waiting for data", "save": "saving", "compile": "compiling", "validation": "in validation",
    "graph": "in CUDA graphs", NO_LONGER_WATCHED: "no longer watched",
}  # fmt: skip
_PLACES = {
    "data": "waiting for data", "exposed_comm": "waiting for buckets", "between": "between steps",
    "other": "between phases", "checkpoint": "in a checkpoint", "compilation": "compiling",
}  # fmt: skip
PAUSE_NOUNS = {  # what a pause is, where marks or heartbeats say it
    "gc": "garbage collection", "checkpoint": "checkpoint", "validation": "validation", "compilation": "compilation",
}  # fmt: skip
_ENDS = {**LIVE_PHASES, **ACTIVITIES}  # where a rank that ended was
_STACK_FRAMES = 5  # of each rank, in a list
_ITS_PHASES = {
    "data": "its wait for data", "between": "its gap before the forward",
    "other": "the rest of its step",
}  # fmt: skip

_ITS_RESTS = {
    "forward": "what it does between forward and backward (the loss)",
    "backward": "what it does between backward and optimizer",
    "optimizer": "what it does after the optimizer's step",
}


def ms_named(ms: float | None) -> str:
    """Returns a duration that is given in milliseconds; a dash if it is not known."""
    return UNKNOWN if ms is None else in_ms(ms * NS_PER_MS)


def longer_than(times: float, when: str) -> str:
    """Returns ``27 % longer than before``, or ``3.1 times as long as before``, of what takes so many times as long."""
    if times >= 2:
        return f"{times:.1f} times as long as {when}"
    longer = times - 1
    return f"{percent(longer, 1 if longer < 0.095 else 0)} longer than {when}"


def phase_named(phase: str, rest_after: str | None = None) -> str:
    """Returns a rank's phase of a step, as the subject of a sentence about that rank; the rest by what comes before."""
    if phase == "other" and rest_after in _ITS_RESTS:
        return _ITS_RESTS[rest_after]
    return _ITS_PHASES.get(phase, f"its {phase}")


def place(phase: str) -> str:
    """Returns where a rank was that was in a phase of a step, or in a pause."""
    return _PLACES.get(phase, f"in {phase}")


def in_live_phase(phase: str, step: int) -> str:
    """Returns where a heartbeat says that training is."""
    if phase in LIVE_PHASES:
        return f"{LIVE_PHASES[phase]} at step {step}"
    return f"in {phase or 'an unknown phase'} of step {step}"


def ranks_named(ranks: Sequence[int]) -> str:
    """Returns ``rank 1``, ``ranks 1, 2`` or ``ranks 0–4, 6–15``, of ascending numbers."""
    return _named("rank", ranks)


def buckets_named(indices: Sequence[int]) -> str:
    """Returns ``bucket 1``, ``buckets 1, 2`` or ``buckets 0–2``, of ascending numbers."""
    return _named("bucket", indices)


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'' if len(numbers) == 1 else 's'} {spans(numbers, _MOST_NAMED, ', ')}"


def processes_named(busy: Iterable[BusyProcess], ranks: Mapping[int, int] = MappingProxyType({})) -> str:
    """Returns processes with the CPU time that they use; with the rank, by pid, that one is."""
    named = ((f"rank {ranks[one.pid]}" if one.pid in ranks else one.name or "?", one) for one in busy)
    return ", ".join(f"{name} (pid {one.pid}) {one.cpu:.0f} % of a core" for name, one in named)


def without(incident: Incident) -> str:
    """Names what a step would be shorter without. Of late ranks, that is what others wait for them."""
    if not incident.ranks or incident.kind == "slow_link":
        return "without it"
    if incident.phase == "data":  # which is a wait, too
        return f"without the wait for {ranks_named(incident.ranks)}"
    return f"without the wait for {'it' if len(incident.ranks) == 1 else 'them'}"


def whose_time(kind: Kind, ranks: Collection[int]) -> str:
    """Returns what is added to the cost of an incident: whose time that is, or why lost time may be less."""
    if ranks and kind == "hang":
        return f", as the others waited; the time of {ranks_named(sorted(ranks))} is lost, too"
    if ranks and (KINDS[kind].late or kind in ("pause", "death")):  # their own time is not in it
        return ", as the others waited"
    if kind in ("slow_device", "too_many_threads") or (kind == "drift" and not ranks):
        return ", with slower compute, which is no lost time"
    return ""


def how_ended(end: End | Bye) -> str:
    """Returns the end of a rank or a run that did not finish, as a predicate."""
    detail = error_quoted(end.detail)
    if is_by_ctrl_c(end):
        return f"was stopped by Ctrl-C ({detail or 'SIGINT'})"
    if end.reason == "killed":
        return f"was killed ({detail or f'signal {end.signal}'})"
    if detail.startswith("exited with code"):
        return detail
    what = "died of an exception" if end.reason == "exception" else "is lost"
    return f"{what} ({detail})" if detail else what


def error_quoted(detail: str) -> str:
    """Returns as many sentences of an exception as are short, or the start of the first, without places in C++."""
    text = _CPP_PLACE.sub("", detail)
    if len(text) <= _MOST_OF_ERROR:
        return text
    sentences = text[:_MOST_OF_ERROR].rpartition(". ")[0]
    return sentences or text[: _MOST_OF_ERROR - 1].rstrip() + "…"


def where_ended(step: int | None, phase: str, in_flight: Sequence[int]) -> str:
    """Returns where a rank was when it ended, as far as that is known."""
    text = "" if step is None else f" at step {step}"
    text += f" {_ENDS.get(phase, f'in {phase}')}" if phase else ""
    return text + (f", {buckets_named(in_flight)} in flight" if in_flight else "")


def stack_lines(blamed: Collection[int], evidence: Evidence) -> list[str]:
    """Returns where the ranks of a hang are: a line for those at the same place, then their innermost calls.

    Args:
        blamed: The incident's ranks.
        evidence: Its evidence.
    """
    groups = evidence.stacks or ()
    silent = [f"rank {rank}: no stack, {why}" for rank, why in (evidence.no_stack or {}).items()]
    return [*places_of(groups, blamed), *call_lines(groups), *silent]


def call_lines(groups: Iterable[StackGroup]) -> list[str]:
    """Returns the innermost calls of each group."""
    lines: list[str] = []
    for group in groups:
        lines.append(f"{ranks_named(group.ranks)}, innermost call first:")
        lines += [f"  {frame}" for frame in group.frames[:_STACK_FRAMES]]
        left_out = len(group.frames) - _STACK_FRAMES
        lines += [f"  … {left_out} more"] if left_out > 0 else []
    return lines


def places_of(groups: Iterable[StackGroup], blamed: Collection[int]) -> list[str]:
    """Returns where each group is: ``15 ranks (0–4, 6–15) wait at main.py:210 in train (all_reduce)``."""
    found = []
    for group in groups:
        ranks, inner = group.ranks, f" ({group.inner})" if group.inner else ""
        many = f"{len(ranks)} ranks ({spans(ranks, _MOST_NAMED, ', ')})"
        found.append(f"{many if len(ranks) > 3 else ranks_named(ranks)} {_role(ranks, blamed)} {group.site}{inner}")
    return found


def _role(ranks: Sequence[int], blamed: Collection[int]) -> str:
    one = len(ranks) == 1
    if not blamed:
        return "is at" if one else "are at"
    if set(blamed).isdisjoint(ranks):
        return "waits at" if one else "wait at"
    return f"hold{'s' if one else ''} up the others at"
