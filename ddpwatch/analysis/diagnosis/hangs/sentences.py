"""Sentences on hangs and deaths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ddpwatch.analysis.diagnosis.hangs.blame import Blame, RankLife
from ddpwatch.analysis.diagnosis.words.wording import (
    ACTIVITIES,
    buckets_named,
    error_quoted,
    how_ended,
    in_live_phase,
    place,
    ranks_named,
    where_ended,
)
from ddpwatch.wire.messages import Beat, Bye


def hang_message(blame: Blame, lives: Mapping[int, RankLife], now_ns: int, site: str = "") -> str:
    """Returns who holds up whom, while that lasts.

    Args:
        blame: Who, and why.
        lives: What is known of the ranks.
        now_ns: By the clock of the ranks' last signs.
        site: Where in the user's code the first rank that is blamed is; empty if that is not known.
    """
    waiting = [lives[rank] for rank in blame.waiting]
    if not blame.ranks:
        text = _stuck(blame.waiting, waiting[0])
        return text + ("; each waits in another group" if blame.why == "crossed" else "")
    first = lives[blame.ranks[0]]
    if blame.why == "finished":
        return f"{ranks_named(blame.ranks)} {_has(blame.ranks)} finished{_who_waits(waiting)}"
    if silent_ns := first.silent_ns(now_ns):
        text = f"{ranks_named(blame.ranks)} {_has(blame.ranks)} been silent for {silent_ns / 1e9:.0f} s"
        text += "" if first.beat is None else f", last seen in step {first.beat.step}"
    else:
        text = _stuck(blame.ranks, first) + _in_parentheses(site)
    return text + (_who_waits(waiting) or _who_is_ahead(blame))


def past_hang_message(
    blame: Blame, phase: str, step: int | None, took_ns: int, sites: Mapping[int, str], mismatch: bool = False
) -> str:
    """Returns who held up whom, once it is over, and at which call sites, as far as these are known."""
    if mismatch:
        return _mismatch_words("waited", sites, took_ns, step)
    stuck = f"stuck for {took_ns / 1e9:.0f} s"
    where = f", {place(phase)}" if phase else ""
    at = "" if step is None else f", at step {step}"
    if not blame.ranks:
        return f"{ranks_named(blame.waiting)} {_was(blame.waiting)} {stuck}{where}{at}"
    if blame.why == "finished":
        return f"{ranks_named(blame.waiting)} waited for {took_ns / 1e9:.0f} s{at}: others had finished"
    text = f"{ranks_named(blame.ranks)} {_was(blame.ranks)} {stuck}{where}{at}"
    text += _in_parentheses(sites.get(blame.ranks[0], ""))
    return text + (f"; {ranks_named(blame.waiting)} waited" if blame.waiting else "")


def mismatch_message(sites: Mapping[int, str], lives: Sequence[RankLife]) -> str:
    """Says that ranks wait for each other in different collectives."""
    first = lives[0]
    return _mismatch_words("wait", sites, first.stillness.still_ns, None if first.beat is None else first.beat.step)


def _mismatch_words(wait: str, sites: Mapping[int, str], took_ns: int, step: int | None) -> str:
    where = "" if step is None else f" in step {step}"
    calls = ", ".join(f"rank {rank} at {site}" for rank, site in sites.items())
    return f"ranks {wait} in different calls for {took_ns / 1e9:.0f} s{where}: {calls}"


def death_message(bye: Bye, others: Sequence[int], alive: Iterable[RankLife]) -> str:
    """Returns who died first, who then, and who waits for them."""
    text = f"rank {bye.rank} {how_ended(bye)}"
    text += where_ended(bye.step, bye.phase, bye.in_flight)
    if others:
        text += f"; then {ranks_named(sorted(others))} ended too"
    return text + _who_waits(alive)


def witness_message(bye: Bye, others: Sequence[int]) -> str:
    """Returns which ranks' collectives failed, while it is not known which other rank has ended."""
    ranks = sorted([bye.rank, *others] if bye.rank is not None else others)
    what = "a collective" if len(ranks) == 1 else "collectives"
    text = f"{what} of {ranks_named(ranks)} failed" + _in_parentheses(error_quoted(bye.detail))
    return text + where_ended(bye.step, bye.phase, bye.in_flight) + "; no other rank's end is known yet"


def stopped_message(bye: Bye) -> str:
    """Returns how a job was stopped, by the first rank that ended."""
    return f"{how_ended(bye).removeprefix('was ')}{where_ended(bye.step, '', ())}"


def _stuck(ranks: Sequence[int], life: RankLife) -> str:
    """Returns where ranks stand still, and for how long, by the first one."""
    beat, who = life.beat, ranks_named(ranks)
    is_stuck = f"{who} {'is' if len(ranks) == 1 else 'are'} stuck"
    if beat is None:
        return is_stuck
    took = f"{life.stillness.still_ns / 1e9:.0f} s"
    if beat.phase == "sync" and not beat.activity:
        what = buckets_named(beat.in_flight) if beat.in_flight else "other ranks"
        return f"{who} {_has(ranks)} been waiting for {what} for {took} in step {beat.step}"
    return f"{is_stuck} {_live_place(beat)} for {took}"


def _in_parentheses(site: str) -> str:
    return f" ({site})" if site else ""


def _live_place(beat: Beat) -> str:
    if beat.activity:
        return f"{ACTIVITIES.get(beat.activity, beat.activity)} at step {beat.step}"
    return in_live_phase(beat.phase, beat.step)


def _who_waits(lives: Iterable[RankLife]) -> str:
    """Returns the ranks with buckets in flight."""
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
