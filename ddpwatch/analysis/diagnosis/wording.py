"""Phrases that verdicts and findings share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ddpwatch.analysis.diagnosis.blame import Blame, RankLife
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.step import NS_PER_MS
from ddpwatch.messages import NO_LONGER_WATCHED, Beat, Bye

_MOST_NAMED = 6
LIVE_PHASES = {"input": "between steps", "between": "between phases"}  # where a heartbeat says that training is
ACTIVITIES = {
    "data": "waiting for data", "save": "saving", "compile": "compiling", "validation": "in validation",
    "graph": "in CUDA graphs", NO_LONGER_WATCHED: "no longer watched",
}  # fmt: skip
_PLACES = {
    "data": "waiting for data", "exposed_comm": "waiting for buckets", "between": "between steps",
    "other": "between phases", "checkpoint": "in a checkpoint", "compilation": "compiling",
}  # fmt: skip
_ENDS = {**LIVE_PHASES, **ACTIVITIES, "sync": "waiting for buckets"}  # where a rank that ended was
_STACK_FRAMES = 5  # of each rank, in a list
_ITS_PHASES = {
    "data": "its wait for data", "between": "what it does between optimizer and forward",
    "other": "what it does between phases",
}  # fmt: skip


def in_ms(ns: float) -> str:
    """A duration in milliseconds."""
    value = ns / NS_PER_MS
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def phase_named(phase: str) -> str:
    """A rank's phase of a step, as the subject of a sentence about that rank."""
    return _ITS_PHASES.get(phase, f"its {phase}")


def place(phase: str) -> str:
    """Where a rank was that was in a phase of a step, or in a pause."""
    return _PLACES.get(phase, f"in {phase}")


def in_live_phase(phase: str, step: int) -> str:
    """Where a heartbeat says that training is."""
    if phase in LIVE_PHASES:
        return f"{LIVE_PHASES[phase]} at step {step}"
    return f"in {phase or 'an unknown phase'} of step {step}"


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1, 2`` or ``ranks 0–4, 6–15``, of ascending numbers."""
    return _named("rank", ranks)


def buckets_named(indices: Sequence[int]) -> str:
    """``bucket 1``, ``buckets 1, 2`` or ``buckets 0–2``, of ascending numbers."""
    return _named("bucket", indices)


def _named(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'' if len(numbers) == 1 else 's'} {spans(numbers, _MOST_NAMED, ', ')}"


def spans(numbers: Sequence[int], most: int = 4, gap: str = ",") -> str:
    """Ascending numbers, three or more in a row as ``616–623``; the first ``most`` of many such runs."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], value]
        else:
            runs.append([value])
    texts = ["–".join(map(str, run)) if run[-1] - run[0] > 1 else gap.join(map(str, run)) for run in runs]
    return gap.join(texts[:most]) + (f"{gap.strip(',')}…" if len(texts) > most else "")


def without(incident: Incident) -> str:
    """Without what a step would be shorter by the incident's gain. Of late ranks, that is what others wait for them."""
    if not incident.ranks or incident.kind == "slow_link":
        return "without it"
    if incident.phase == "data":  # which is a wait, too
        return f"without the wait for {ranks_named(incident.ranks)}"
    return f"without the wait for {'it' if len(incident.ranks) == 1 else 'them'}"


def how_ended(reason: str, detail: str, signal: int | None) -> str:
    """The end of a rank or a run that did not finish, as a predicate."""
    if reason == "killed":
        return f"was killed ({detail or f'signal {signal}'})"
    if detail.startswith("exited with code"):
        return detail
    what = "died of an exception" if reason == "exception" else "is lost"
    return f"{what} ({detail})" if detail else what


def where_ended(step: int | None, phase: str, in_flight: Sequence[int]) -> str:
    """Where a rank was when it ended, as far as that is known."""
    text = "" if step is None else f" at step {step}"
    text += f" {_ENDS.get(phase, f'in {phase}')}" if phase else ""
    return text + (f", {buckets_named(in_flight)} in flight" if in_flight else "")


# -- hangs and deaths ----------------------------------------------------------------------------------------


def hang_message(blame: Blame, lives: Mapping[int, RankLife], now_ns: int) -> str:
    """Who holds up whom, while that lasts."""
    waiting = [lives[rank] for rank in blame.waiting]
    if not blame.ranks:
        text = f"{ranks_named(blame.waiting)} {_stuck(waiting[0])}"
        return text + ("; each waits in another group" if blame.why == "crossed" else "")
    first = lives[blame.ranks[0]]
    if blame.why == "finished":
        return f"{ranks_named(blame.ranks)} {_has(blame.ranks)} finished{_who_waits(waiting)}"
    if silent_ns := first.silent_ns(now_ns):
        text = f"{ranks_named(blame.ranks)} silent for {silent_ns / 1e9:.0f} s"
        text += "" if first.beat is None else f", last seen in step {first.beat.step}"
    else:
        text = f"{ranks_named(blame.ranks)} {_stuck(first)}"
    return text + (_who_waits(waiting) or _who_is_ahead(blame))


def past_hang_message(
    blame: Blame, phase: str, step: int | None, took_ns: int, sites: Mapping[int, str] | None = None
) -> str:
    """Who held up whom, once it is over; of a mismatch, at which call sites."""
    if sites is not None:
        return _mismatch_words("waited", sites, took_ns, step)
    stuck = f"stuck for {took_ns / 1e9:.0f} s"
    where = f", {place(phase)}" if phase else ""
    at = "" if step is None else f", at step {step}"
    if not blame.ranks:
        return f"{ranks_named(blame.waiting)} {_was(blame.waiting)} {stuck}{where}{at}"
    if blame.why == "finished":
        return f"{ranks_named(blame.waiting)} waited for {took_ns / 1e9:.0f} s{at}: others had finished"
    text = f"{ranks_named(blame.ranks)} {_was(blame.ranks)} {stuck}{where}{at}"
    return text + (f"; {ranks_named(blame.waiting)} waited" if blame.waiting else "")


def mismatch_message(sites: Mapping[int, str], lives: Sequence[RankLife]) -> str:
    """Ranks that wait for each other in different collectives."""
    first = lives[0]
    return _mismatch_words("wait", sites, first.stillness.still_ns, None if first.beat is None else first.beat.step)


def _mismatch_words(wait: str, sites: Mapping[int, str], took_ns: int, step: int | None) -> str:
    where = "" if step is None else f" in step {step}"
    calls = ", ".join(f"rank {rank} at {site}" for rank, site in sites.items())
    return f"ranks {wait} in different calls for {took_ns / 1e9:.0f} s{where}: {calls}"


def death_message(bye: Bye, others: Sequence[int], alive: Iterable[RankLife]) -> str:
    """Who died first, who then, and who waits for them."""
    text = f"rank {bye.rank} {how_ended(bye.reason, bye.detail, bye.signal)}"
    text += where_ended(bye.step, bye.phase, bye.in_flight)
    if others:
        text += f"; then {ranks_named(sorted(others))} ended too"
    return text + _who_waits(alive)


def stack_lines(incident: Incident) -> list[str]:
    """Where the ranks of a hang are: the call sites, then the innermost calls of each rank."""
    evidence = incident.evidence
    sites: Mapping[int, str] = evidence.get("call_sites", {})
    lines = [f"rank {rank} {_role(rank, incident)} {site}" for rank, site in sites.items()]
    for rank, frames in evidence.get("stacks", {}).items():
        lines.append(f"rank {rank}, innermost call first:")
        lines += [f"  {frame}" for frame in frames[:_STACK_FRAMES]]
        lines += [f"  … {len(frames) - _STACK_FRAMES} more"] if len(frames) > _STACK_FRAMES else []
    return lines + [f"rank {rank}: no stack, {why}" for rank, why in evidence.get("no_stack", {}).items()]


def _role(rank: int, incident: Incident) -> str:
    if not incident.ranks:
        return "is at"
    return "holds up the others at" if rank in incident.ranks else "waits at"


def _stuck(life: RankLife) -> str:
    """Where a rank stands still, and for how long."""
    beat = life.beat
    if beat is None:
        return "stuck"
    took = f"{life.stillness.still_ns / 1e9:.0f} s"
    if beat.phase == "sync" and not beat.activity:
        what = buckets_named(beat.in_flight) if beat.in_flight else "other ranks"
        return f"waiting for {what} for {took} in step {beat.step}"
    return f"{_live_place(beat)} for {took}"


def _live_place(beat: Beat) -> str:
    if beat.activity:
        return f"{ACTIVITIES.get(beat.activity, beat.activity)} at step {beat.step}"
    return in_live_phase(beat.phase, beat.step)


def _who_waits(lives: Iterable[RankLife]) -> str:
    """The ranks with buckets in flight."""
    waiting = {life.rank: life.beat.in_flight for life in lives if life.beat is not None and life.beat.in_flight}
    if not waiting:
        return ""
    awaited = sorted({bucket for buckets in waiting.values() for bucket in buckets})
    return f"; {ranks_named(sorted(waiting))} wait{'s' if len(waiting) == 1 else ''} for {buckets_named(awaited)}"


def _who_is_ahead(blame: Blame) -> str:
    if not blame.waiting:
        return ""
    if not blame.issued:
        return f"; {ranks_named(blame.waiting)} wait{'s' if len(blame.waiting) == 1 else ''}"
    fewest, most = min(blame.issued.values()), max(blame.issued.values())
    if len(blame.ranks) == 1:
        return f"; it has issued {fewest} collectives, the ranks that wait {most}"
    return f"; these have issued {fewest} collectives, the ranks that wait {most}"


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _was(ranks: Sequence[int]) -> str:
    return "was" if len(ranks) == 1 else "were"
