"""Phrases that verdicts and findings share."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.analysis.step import NS_PER_MS

_MOST_NAMED = 6
LIVE_PHASES = {"input": "between steps", "between": "between phases"}  # where a heartbeat says that training is
_ITS_PHASES = {"data": "its wait for data", "between": "what it does between optimizer and forward"}


def in_ms(ns: float) -> str:
    """A duration in milliseconds."""
    value = ns / NS_PER_MS
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def phase_named(phase: str) -> str:
    """A rank's phase of a step, as the subject of a sentence about that rank."""
    return _ITS_PHASES.get(phase, f"its {phase}")


def in_live_phase(phase: str, step: int) -> str:
    """Where a heartbeat says that training is."""
    if phase in LIVE_PHASES:
        return f"{LIVE_PHASES[phase]} at step {step}"
    return f"in {phase or 'an unknown phase'} of step {step}"


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 1, 2``; of many, the first few."""
    return _named("rank", ranks)


def buckets_named(indices: Sequence[int]) -> str:
    """``bucket 1`` or ``buckets 1, 2``; of many, the first few."""
    return _named("bucket", indices)


def _named(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_NAMED])) + (" …" if len(numbers) > _MOST_NAMED else "")
    return f"{noun} {shown}" if len(numbers) == 1 else f"{noun}s {shown}"


def how_ended(reason: str, detail: str, signal: int | None) -> str:
    """The end of a rank or a run that did not finish, as a predicate."""
    if reason == "killed":
        return f"was killed ({detail or f'signal {signal}'})"
    what = "died of an exception" if reason == "exception" else "is lost"
    return f"{what} ({detail})" if detail else what


def where_ended(step: int | None, phase: str, in_flight: Sequence[int]) -> str:
    """Where a rank was when it ended, as far as that is known."""
    text = "" if step is None else f" at step {step}"
    text += f" {LIVE_PHASES.get(phase, f'in {phase}')}" if phase else ""
    return text + (f", {buckets_named(in_flight)} in flight" if in_flight else "")
