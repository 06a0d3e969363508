"""What is going on, in one plain sentence: the first thing that an engineer should know."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ddpwatch.analysis.diagnosis.findings import EXPOSED_SHARE, INPUT_SHARE
from ddpwatch.analysis.window import ENOUGH_STEPS, Straggler, Summary
from ddpwatch.messages import Beat, Bye

Severity = Literal["none", "ok", "warn", "bad"]
STUCK_NS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding. ``kind`` is a stable word for tests and filters; ``rank`` and ``bucket`` are to blame, if any."""

    kind: str
    severity: Severity
    text: str
    rank: int | None = None
    bucket: int | None = None


@dataclass(frozen=True, slots=True)
class Presence:
    """How one rank stands: what its last beat said, how it ended, how long it has been silent (ns)."""

    beat: Beat | None = None
    bye: Bye | None = None
    silent_ns: int = 0
    finished_steps: int = 0


class Names(Protocol):
    """What buckets and parameters are called; "" where nobody knows."""

    def bucket_layer(self, index: int) -> str:
        """The first parameter of a bucket."""

    def bucket_params(self, index: int) -> list[str]:
        """The parameters of a bucket; empty where nobody knows."""

    def layer(self, param: int) -> str:
        """A parameter."""


def verdict(
    summary: Summary,
    ranks: Mapping[int, Presence],
    end: Bye | None = None,
    complete: bool = True,
    names: Names | None = None,
) -> Verdict:
    """The most important thing to say: a death, then a hang, then a late rank, slow input, exposed communication.

    Args:
        summary: The newest steps.
        ranks: Every rank known.
        end: The end of the whole run, once there is one.
        complete: Whether every rank of the run has shown itself.
        names: What buckets and parameters are called.
    """
    over = end is not None
    return _death(ranks) or _hang(ranks, over) or _prefixed(_performance(summary, ranks, complete, names), ranks, end)


# -- deaths and hangs ----------------------------------------------------------------------------------------


def _death(ranks: Mapping[int, Presence]) -> Verdict | None:
    dead = {rank: p.bye for rank, p in ranks.items() if p.bye is not None and p.bye.reason != "finished"}
    if not dead:
        return None
    first = min(dead, key=lambda rank: (_by_launcher(dead[rank]), dead[rank].at_ns))
    text = f"rank {first} {_how(dead[first])}{_where(dead[first])}"
    others = sorted(dead.keys() - {first})
    if others:
        text += f"; then {_names(others)} ended too"
    return Verdict("death", "bad", text + _who_waits(ranks, dead.keys()), rank=first)


def _by_launcher(bye: Bye) -> bool:
    """Whether it looks like torchrun's doing: once a rank has failed, it terminates the others."""
    return bye.signal == signal.SIGTERM


def _how(bye: Bye) -> str:
    if bye.reason == "killed":
        return f"was killed ({bye.detail or f'signal {bye.signal}'})"
    what = "died of an exception" if bye.reason == "exception" else "is lost"
    return f"{what} ({bye.detail})" if bye.detail else what


def _where(bye: Bye) -> str:
    text = "" if bye.step is None else f" at step {bye.step}"
    text += f" in {bye.phase}" if bye.phase else ""
    return text + (f", {_buckets(bye.in_flight)} in flight" if bye.in_flight else "")


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
    return f"; {_names(sorted(waiting))} wait{'s' if len(waiting) == 1 else ''} for {_buckets(awaited)}"


def _hang(ranks: Mapping[int, Presence], over: bool) -> Verdict | None:
    if over:
        return None
    silent = [rank for rank, p in ranks.items() if p.bye is None and p.silent_ns > STUCK_NS]
    stuck = {rank: p.beat for rank, p in ranks.items() if p.bye is None and p.beat is not None and _stuck(p.beat)}
    if not silent and not stuck:
        return None
    waiting = {rank: beat for rank, beat in stuck.items() if beat.phase == "sync"}
    blamed = silent or [rank for rank, beat in stuck.items() if beat.phase not in ("", "sync")]
    if not blamed and (behind := _behind(stuck)) is not None:
        return behind
    if not blamed:
        stand = waiting or stuck
        rank, beat = next(iter(stand.items()))
        return Verdict("hang", "bad", f"{_names(sorted(stand))} {_stuck_words(beat)}", rank=rank if waiting else None)
    rank = blamed[0]
    text = _silent_words(rank, ranks[rank]) if silent else f"rank {rank} {_stuck_words(stuck[rank])}"
    return Verdict("hang", "bad", text + _who_waits(ranks, blamed), rank=rank)


def _behind(stuck: Mapping[int, Beat]) -> Verdict | None:
    """The rank that has issued fewer collectives than others is awaited, also where its phase is not known."""
    issued = {rank: beat.issued for rank, beat in stuck.items() if beat.issued is not None}
    rank = min(issued, key=issued.__getitem__, default=None)
    if rank is None or issued[rank] == max(issued.values()):
        return None
    text = f"rank {rank} {_stuck_words(stuck[rank])}; others wait: it has issued {issued[rank]} collectives"
    return Verdict("hang", "bad", f"{text}, they {max(issued.values())}", rank=rank)


def _stuck(beat: Beat) -> bool:
    return beat.at_ns - beat.since_ns > STUCK_NS


def _stuck_words(beat: Beat) -> str:
    took = f"{(beat.at_ns - beat.since_ns) / 1e9:.0f} s"
    if beat.phase == "sync":
        what = _buckets(beat.in_flight) if beat.in_flight else "other ranks"
        return f"waiting for {what} for {took} in step {beat.step}"
    return f"in {beat.phase or 'an unknown phase'} of step {beat.step} for {took}"


def _silent_words(rank: int, presence: Presence) -> str:
    text = f"rank {rank} silent for {presence.silent_ns / 1e9:.0f} s"
    beat = presence.beat
    return text if beat is None else f"{text}, last seen in step {beat.step}"


# -- performance ---------------------------------------------------------------------------------------------


def _performance(summary: Summary, ranks: Mapping[int, Presence], complete: bool, names: Names | None) -> Verdict:
    if not ranks or (not complete and not summary.count):
        return Verdict("starting", "none", "waiting for every rank's first step")
    if summary.count < ENOUGH_STEPS:
        return Verdict("collecting", "none", f"collecting: {summary.count} of {ENOUGH_STEPS} steps for a first verdict")
    if not summary.communicates:
        why = "one rank has nobody to talk to" if len(ranks) == 1 else "no bucket was launched"
        return Verdict("no-comm", "ok", f"no communication: {why}")
    return _late(summary, names) or _input(summary) or _exposed(summary, names)


def _late(summary: Summary, names: Names | None) -> Verdict | None:
    slowest = summary.slowest
    if slowest is None:
        return None
    text = (
        f"rank {slowest.rank} is late: launches {_what(summary, slowest, names)} {_ms(slowest.late_ns)} after the first"
    )
    text += f" rank (p50 of {slowest.steps} steps)"
    if slowest.phase:
        text += f"; its {slowest.phase} takes {_ms(slowest.excess_ns)} longer"
    if names is not None and slowest.param is not None and (layer := names.layer(slowest.param)):
        text += f", from {layer} on"
    return Verdict("late-rank", "bad", text, rank=slowest.rank, bucket=slowest.bucket)


def _what(summary: Summary, slowest: Straggler, names: Names | None) -> str:
    if slowest.bucket is None:
        return "its buckets"
    return f"bucket {slowest.bucket}{_in_layer(slowest.bucket, names)}{_onwards(summary, slowest.bucket)}"


def _in_layer(bucket: int, names: Names | None) -> str:
    """The bucket's first parameter in brackets, if it is known."""
    layer = names.bucket_layer(bucket) if names is not None else ""
    return f" ({layer})" if layer else ""


def _onwards(summary: Summary, bucket: int) -> str:
    return " and later ones" if any(index > bucket for index in summary.bucket_exposed_ns) else ""


def _input(summary: Summary) -> Verdict | None:
    """All ranks wait for their input, and longer than for communication."""
    if not summary.step_ns or summary.input_ns is None or summary.input_ns < INPUT_SHARE * summary.step_ns:
        return None
    if summary.input_ns < (summary.exposed_ns or 0):
        return None
    share = 100 * summary.input_ns / summary.step_ns
    text = (
        f"slow input: {_ms(summary.input_ns)} of {_ms(summary.step_ns)} ({share:.0f} %) pass before the forward starts"
    )
    return Verdict("slow-input", "warn", text)


def _exposed(summary: Summary, names: Names | None) -> Verdict:
    if not summary.measured or summary.exposed_ns is None or summary.waited_ns is None or not summary.step_ns:
        return Verdict("unmeasured", "none", "when buckets complete is not measured here, so overlap is unknown")
    # Few steps are recorded in full, and one may have been disturbed; all of them tell how long they waited.
    exposed_ns = min(summary.exposed_ns, summary.waited_ns)
    share = exposed_ns / summary.step_ns
    figures = f"{_ms(exposed_ns)} of {_ms(summary.step_ns)} ({100 * share:.0f} %)"
    if share < EXPOSED_SHARE:
        return Verdict("hidden", "ok", f"communication is hidden behind compute: exposed only {figures}")
    worst = max(summary.bucket_exposed_ns, key=summary.bucket_exposed_ns.__getitem__, default=None)
    text = f"exposed communication {figures}"
    if worst is not None:
        last = "last bucket" if worst == max(summary.bucket_exposed_ns) else "bucket"
        text += f": {last} {worst}{_in_layer(worst, names)} alone {_ms(summary.bucket_exposed_ns[worst])}"
    return Verdict("exposed", "warn", text, bucket=worst)


def _prefixed(found: Verdict, ranks: Mapping[int, Presence], end: Bye | None) -> Verdict:
    """A run that is over in another way than its ranks say, or that was too short to judge, says so."""
    if end is None or (end.reason == "finished" and found.severity != "none"):
        return found
    steps = max((presence.finished_steps for presence in ranks.values()), default=0)
    how = "finished" if end.reason == "finished" else f"the run {_how(end)}"
    text = f"{how} after {steps} steps" + (f"; {found.text}" if found.severity != "none" else "")
    return Verdict("ended", "ok" if end.reason == "finished" else "bad", text, found.rank, found.bucket)


def _ms(ns: float) -> str:
    value = ns / 1e6
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:6]) + (" …" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _buckets(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:6]) + (" …" if len(indices) > 6 else "")
    return f"bucket {shown}" if len(indices) == 1 else f"buckets {shown}"
