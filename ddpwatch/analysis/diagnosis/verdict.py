"""The verdict: one plain sentence with the first thing that an engineer should know."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ddpwatch.analysis.diagnosis.straggler import Straggler
from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS, EXPOSED_SHARE, INPUT_SHARE, STUCK_NS
from ddpwatch.analysis.diagnosis.wording import (
    buckets_named,
    how_ended,
    in_live_phase,
    in_ms,
    phase_named,
    ranks_named,
    where_ended,
)
from ddpwatch.analysis.window import Summary
from ddpwatch.messages import Beat, Bye

Severity = Literal["none", "ok", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What matters most now.

    Attributes:
        kind: A stable word. ``rank_ended``, ``straggler``, ``slow_input`` and ``exposed_comm`` are those of findings;
            others are ``hang``, ``hidden``, ``no_comm``, ``unmeasured``, ``starting``, ``collecting`` and ``ended``.
        rank, bucket: Which ones are to blame, if any.
    """

    kind: str
    severity: Severity
    text: str
    rank: int | None = None
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class Presence:
    """What is known of a rank: its last heartbeat, how it ended, how long it has been silent (ns), its groups."""

    beat: Beat | None = None
    bye: Bye | None = None
    silent_ns: int = 0
    finished_steps: int = 0
    groups: tuple[int, ...] = ()


class LayerNames(Protocol):
    """The names of parameters; "" where a name is not known."""

    def bucket_layer(self, index: int, rank: int | None = None) -> str:
        """The first parameter of a bucket, on a rank."""

    def bucket_params(self, index: int, rank: int | None = None) -> list[str]:
        """All parameters of a bucket, on a rank; empty if they are not known."""

    def layer(self, param: int, rank: int | None = None) -> str:
        """The parameter with that id, on a rank."""


def verdict(
    summary: Summary,
    ranks: Mapping[int, Presence],
    end: Bye | None = None,
    complete: bool = True,
    names: LayerNames | None = None,
) -> Verdict:
    """The most important of: a rank that ended, a hang, a straggler, slow input, exposed communication.

    Args:
        summary: The newest steps.
        ranks: Every known rank.
        end: The end of the whole run, once it is over.
        complete: Whether every rank of the run has attached.
        names: Of buckets and parameters.
    """
    over = end is not None
    return _death(ranks) or _hang(ranks, over) or _prefixed(_performance(summary, ranks, complete, names), ranks, end)


# -- ended ranks and hangs -----------------------------------------------------------------------------------


def _death(ranks: Mapping[int, Presence]) -> Verdict | None:
    dead = {rank: p.bye for rank, p in ranks.items() if p.bye is not None and p.bye.reason != "finished"}
    if not dead:
        return None
    first = min(dead, key=lambda rank: (_by_launcher(dead[rank]), dead[rank].at_ns))
    bye = dead[first]
    text = f"rank {first} {_how(bye)}{where_ended(bye.step, bye.phase, bye.in_flight)}"
    others = sorted(dead.keys() - {first})
    if others:
        text += f"; then {ranks_named(others)} ended too"
    return Verdict("rank_ended", "bad", text + _who_waits(ranks, dead.keys()), rank=first)


def _by_launcher(bye: Bye) -> bool:
    """Whether torchrun probably ended it: once a rank has failed, torchrun terminates the others."""
    return bye.signal == signal.SIGTERM


def _how(bye: Bye) -> str:
    return how_ended(bye.reason, bye.detail, bye.signal)


def _who_waits(ranks: Mapping[int, Presence], dead: Iterable[int]) -> str:
    gone = set(dead)
    waiting = {
        rank: presence.beat
        for rank, presence in ranks.items()
        if rank not in gone and presence.bye is None and presence.beat is not None and presence.beat.in_flight
    }
    if not waiting:
        return ""
    awaited = sorted({bucket for beat in waiting.values() for bucket in beat.in_flight})
    return f"; {ranks_named(sorted(waiting))} wait{'s' if len(waiting) == 1 else ''} for {buckets_named(awaited)}"


def _hang(ranks: Mapping[int, Presence], over: bool) -> Verdict | None:
    if over:
        return None
    silent = [rank for rank, p in ranks.items() if p.bye is None and p.silent_ns > STUCK_NS]
    stuck = {rank: p.beat for rank, p in ranks.items() if p.bye is None and p.beat is not None and _stuck(p.beat)}
    if not silent and not stuck:
        return None
    waiting = {rank: beat for rank, beat in stuck.items() if beat.phase == "sync"}
    blamed = silent or [rank for rank, beat in stuck.items() if beat.phase not in ("", "sync")]
    if not blamed and (behind := _behind(stuck, ranks)) is not None:
        return behind
    if not blamed:
        blocked = waiting or stuck
        rank, beat = next(iter(blocked.items()))
        return Verdict(
            "hang", "bad", f"{ranks_named(sorted(blocked))} {_stuck_words(beat)}", rank=rank if waiting else None
        )
    rank = blamed[0]
    text = _silent_words(rank, ranks[rank]) if silent else f"rank {rank} {_stuck_words(stuck[rank])}"
    return Verdict("hang", "bad", text + _who_waits(ranks, blamed), rank=rank)


def _behind(stuck: Mapping[int, Beat], ranks: Mapping[int, Presence]) -> Verdict | None:
    """Blames the rank that has issued fewer collectives than others in its groups, without knowing its phase."""
    issued: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, beat in stuck.items():
        if beat.issued is not None:
            issued.setdefault(ranks[rank].groups, {})[rank] = beat.issued
    behind = [counts for counts in issued.values() if min(counts.values()) < max(counts.values())]
    if not behind:
        return None
    counts = max(behind, key=lambda counts: max(counts.values()) - min(counts.values()))
    rank = min(counts, key=counts.__getitem__)
    text = f"rank {rank} {_stuck_words(stuck[rank])}; others wait: it has issued {counts[rank]} collectives"
    return Verdict("hang", "bad", f"{text}, they {max(counts.values())}", rank=rank)


def _stuck(beat: Beat) -> bool:
    return beat.at_ns - beat.since_ns > STUCK_NS


def _stuck_words(beat: Beat) -> str:
    took = f"{(beat.at_ns - beat.since_ns) / 1e9:.0f} s"
    if beat.phase == "sync":
        what = buckets_named(beat.in_flight) if beat.in_flight else "other ranks"
        return f"waiting for {what} for {took} in step {beat.step}"
    return f"{in_live_phase(beat.phase, beat.step)} for {took}"


def _silent_words(rank: int, presence: Presence) -> str:
    text = f"rank {rank} silent for {presence.silent_ns / 1e9:.0f} s"
    beat = presence.beat
    return text if beat is None else f"{text}, last seen in step {beat.step}"


# -- performance ---------------------------------------------------------------------------------------------


def _performance(summary: Summary, ranks: Mapping[int, Presence], complete: bool, names: LayerNames | None) -> Verdict:
    if not ranks or (not complete and not summary.count):
        return Verdict("starting", "none", "waiting for every rank's first step")
    if summary.count < ENOUGH_STEPS:
        return Verdict("collecting", "none", f"collecting: {summary.count} of {ENOUGH_STEPS} steps for a first verdict")
    if not summary.communicates:
        why = "one rank has nobody to talk to" if len(ranks) == 1 else "no bucket was launched"
        return Verdict("no_comm", "ok", f"no communication: {why}")
    return _late(summary, names) or _input(summary) or _exposed(summary, names)


def _late(summary: Summary, names: LayerNames | None) -> Verdict | None:
    straggler = summary.straggler
    if straggler is None:
        return None
    what = _what(summary, straggler, names)
    text = f"rank {straggler.rank} is late: launches {what} {in_ms(straggler.late_ns)} after the first rank"
    if straggler.peers:
        text += f" of its group ({ranks_named(straggler.peers)})"
    text += f" (p50 of {straggler.steps} steps)"
    if straggler.phase:
        text += f"; {phase_named(straggler.phase)} takes {in_ms(straggler.excess_ns)} longer"
    if names is not None and straggler.param is not None and (layer := names.layer(straggler.param, straggler.rank)):
        text += f", from {layer} on"
    return Verdict("straggler", "bad", text, rank=straggler.rank, bucket=straggler.bucket)


def _what(summary: Summary, straggler: Straggler, names: LayerNames | None) -> str:
    if straggler.bucket is None:
        return "its buckets"
    layer = _in_layer(straggler.bucket, names, straggler.rank)
    return f"bucket {straggler.bucket}{layer}{_onwards(summary, straggler.bucket)}"


def _in_layer(bucket: int, names: LayerNames | None, rank: int | None = None) -> str:
    """The bucket's first parameter in brackets, if it is known."""
    layer = names.bucket_layer(bucket, rank) if names is not None else ""
    return f" ({layer})" if layer else ""


def _onwards(summary: Summary, bucket: int) -> str:
    return " and later ones" if any(index > bucket for index in summary.bucket_exposed_ns) else ""


def _input(summary: Summary) -> Verdict | None:
    """The ranks wait for data, and longer than for communication."""
    data_ns = summary.phases_ns.get("data", 0.0)
    if not summary.step_ns or data_ns < max(INPUT_SHARE * summary.step_ns, summary.exposed_ns or 0):
        return None
    figures = f"{in_ms(data_ns)} of {in_ms(summary.step_ns)} ({100 * data_ns / summary.step_ns:.0f} %)"
    return Verdict("slow_input", "warn", f"slow input: the loop waits {figures} for data")


def _exposed(summary: Summary, names: LayerNames | None) -> Verdict:
    if summary.exposed_ns is None or summary.waited_ns is None or not summary.step_ns:
        return Verdict("unmeasured", "none", "when buckets complete is not measured here, so overlap is unknown")
    share = summary.exposed_ns / summary.step_ns
    figures = f"{in_ms(summary.exposed_ns)} of {in_ms(summary.step_ns)} ({100 * share:.0f} %)"
    if share < EXPOSED_SHARE:
        return Verdict("hidden", "ok", f"communication is hidden behind compute: exposed only {figures}")
    if summary.waited_ns < EXPOSED_SHARE * (summary.step_p50_ns or 0.0):  # full steps are few, and one was disturbed
        waits = f"a backward waits {in_ms(summary.waited_ns)} for its buckets (p50)"
        return Verdict("hidden", "ok", f"communication is hidden behind compute in most steps: {waits}")
    worst = max(summary.bucket_exposed_ns, key=summary.bucket_exposed_ns.__getitem__, default=None)
    text = f"exposed communication {figures}"
    if worst is not None:
        last = "last bucket" if worst == max(summary.bucket_exposed_ns) else "bucket"
        text += f": {last} {worst}{_in_layer(worst, names)} alone {in_ms(summary.bucket_exposed_ns[worst])}"
    return Verdict("exposed_comm", "warn", text, bucket=worst)


def _prefixed(found: Verdict, ranks: Mapping[int, Presence], end: Bye | None) -> Verdict:
    """Adds how the run ended, unless it finished and there is a verdict on it."""
    if end is None or (end.reason == "finished" and found.severity != "none"):
        return found
    steps = max((presence.finished_steps for presence in ranks.values()), default=0)
    how = "finished" if end.reason == "finished" else f"the run {_how(end)}"
    text = f"{how} after {steps} steps" + (f"; {found.text}" if found.severity != "none" else "")
    return Verdict("ended", "ok" if end.reason == "finished" else "bad", text, found.rank, found.bucket)
