"""The verdict: one plain sentence with the first thing that an engineer should know."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddpwatch.analysis.diagnosis.incident import Incident, LostTime
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.standing import is_costly, is_ongoing, urgency
from ddpwatch.analysis.diagnosis.thresholds import COSTLY_SHARE, ENOUGH_STEPS, WORTH_SAYING
from ddpwatch.analysis.diagnosis.words.lost_time import lost_text
from ddpwatch.analysis.diagnosis.words.why_unwatched import Facts, why_unwatched
from ddpwatch.analysis.diagnosis.words.wording import PAUSE_NOUNS, how_ended, ranks_named, without
from ddpwatch.analysis.means import ENOUGH_FULL
from ddpwatch.analysis.window import Summary
from ddpwatch.common.text import in_ms, percent
from ddpwatch.wire.messages import Bye

Severity = Literal["none", "ok", "info", "warn", "bad"]
MOST_OTHERS = 2  # incidents that are named besides the worst
MUCH_BETWEEN = 0.2  # of all ranks' time: what is not training
_LOOP = "see what the loop does in the gap, after the optimizer: DataLoader workers or a thread may do it meanwhile"
NOTHING, NONE_OPEN = "nothing stands out", "no incident is ongoing"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What matters most now.

    Attributes:
        kind: A stable word: that of an incident, or ``lost``, ``hidden``, ``unseen``, ``partial``, ``no_comm``,
            ``no_bucket``, ``unmeasured``, ``starting``, ``collecting``, ``no_steps`` or ``ended``.
        rank, bucket: Which ones are to blame, if any.
        ranks: All that are to blame.
        peers: Whom these were compared with, if that is known.
        next_step: What to do about it; empty if there is nothing to do.
        incident: What it is about, if it is an incident that lasts, ended the run, or harmed it for good.
        others: What else is ongoing that counts, by name and ranks, worst first.
    """

    kind: str
    severity: Severity
    text: str
    rank: int | None = None
    bucket: int | None = None
    ranks: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    incident: Incident | None = None
    next_step: str = ""
    others: tuple[str, ...] = ()

    def with_others(self, most: int = MOST_OTHERS) -> str:
        """Returns the sentence, and at most so many of the other incidents."""
        others = ", ".join(self.others[:most])
        return f"{self.text}; also ongoing: {others}" if others else self.text


def verdict(
    summary: Summary,
    incidents: Sequence[Incident],
    ranks: int,
    end: Bye | None = None,
    world_size: int = 0,
    finished_steps: int = 0,
    forwards: bool | None = False,
    issued: bool | None = None,
    lost: LostTime | None = None,
) -> Verdict:
    """Returns what matters most: a death, a hang, the worst incident; else what is lost, if that is much.

    Args:
        summary: The newest steps.
        incidents: All that was found so far.
        ranks: How many ranks are known.
        end: The end of the whole run, once it is over.
        world_size: How many ranks the run has.
        finished_steps: How many steps the run has taken.
        forwards: Whether some rank has called the model with gradients; None if that is not known.
        issued: Whether the watched groups have issued collectives, None if that is not known.
        lost: Where the time went; None if that is not known.
    """
    fatal = [incident for incident in incidents if incident.kind == "death" or _is_of_hang(incident, end)]
    if fatal:
        return of_incident(min(fatal, key=lambda incident: incident.kind != "death"))
    worst = _worst(incidents)
    if worst is not None:
        found = replace(of_incident(worst), others=_others(incidents, worst))
        if worst.severity == "info" or any(_cost(one) > _cost(worst) for one in _worth_naming(incidents)):
            found = replace(found, text=found.text + _past(incidents))
    elif ranks and not finished_steps and not summary.count:
        found = _without_steps(ranks, forwards, end)
    else:
        found = _healthy(summary, incidents, ranks, world_size, issued)
        if (found.severity == "ok" or found.kind == "lost") and lost is not None and lost.costly:
            where = lost_text(lost, of="all ranks' time")
            text = f"{where}; {NONE_OPEN}{_past(incidents)}"
            is_grave = lost.much or bool(_worth_naming(incidents))
            found = Verdict("lost", "warn" if is_grave else "info", text, next_step=lost.next_step)
        if (found.severity == "ok" or found.kind == "lost") and lost is not None:
            found = _with_gaps(found, lost)
    stopped = any(incident.kind == "stopped" for incident in incidents)
    return _prefixed(found, finished_steps, end, stopped)


def _is_of_hang(incident: Incident, end: Bye | None) -> bool:
    """Returns whether an incident is a hang that lasts, or that somebody ended with the job."""
    return incident.kind == "hang" and (bool(incident.evidence.ends) or (incident.open and end is None))


def with_unseen(found: Verdict, unseen: Collection[int]) -> Verdict:
    """Returns the verdict while nothing is known of some ranks: these are not to blame, and not said to be well.

    Args:
        found: The verdict on what is known.
        unseen: The ranks whose hosts are not connected, at least one.
    """
    is_theirs = bool(found.ranks) and set(found.ranks) <= set(unseen)
    if not (is_theirs or found.severity in ("none", "ok") or found.kind == "lost"):
        return found
    ranks = tuple(sorted(unseen))
    are, their = ("is", "its") if len(ranks) == 1 else ("are", "their")
    text = f"{ranks_named(ranks)} {are} unseen: nothing comes from {their} host's agent; before that: {found.text}"
    return Verdict("unseen", "warn", text, ranks=ranks)


def _worst(incidents: Sequence[Incident]) -> Incident | None:
    """Returns the incident that the verdict stays with, unless there is an error besides it."""
    counting = [incident for incident in incidents if incident.counts]
    errors = [incident for incident in counting if incident.severity == "error"]
    foremost = next((incident for incident in errors or counting if incident.foremost), None)
    return foremost or max(errors or counting, key=urgency, default=None)


def _others(incidents: Sequence[Incident], worst: Incident) -> tuple[str, ...]:
    """Names what else goes on and counts, worst first."""
    found = [one for one in incidents if one.counts and is_ongoing(one) and one is not worst]
    return tuple(dict.fromkeys(_named(one) for one in sorted(found, key=urgency, reverse=True)))


def of_incident(incident: Incident) -> Verdict:
    """Returns an incident as a verdict, with what a step would gain without it."""
    text = incident.message + (f" ({incident.device})" if incident.device else "")
    is_over = incident.counts and not is_ongoing(incident)
    if is_over or incident.resting:
        text += f", {'on and off, last in' if incident.resting else 'until'} step {incident.until_step}"
    would = "its steps would have been" if is_over else "a step would be"
    if incident.gain:
        text += f"; {without(incident)}, {would} {_percent(incident.gain)} shorter"
    severity: Severity = "bad" if incident.severity == "error" or KINDS[incident.kind].blames else "warn"
    ranks, peers = _blamed(incident), tuple(incident.evidence.group or ())
    rank = ranks[0] if len(ranks) == 1 else None
    about = (rank, incident.bucket, ranks, peers, incident, incident.next_step)
    return Verdict(incident.kind, severity, text, *about)


def _blamed(incident: Incident) -> tuple[int, ...]:
    """Returns whose doing it is: no rank's, if a link is slow."""
    return () if incident.kind == "slow_link" else incident.ranks


def _percent(share: float) -> str:
    return percent(share, 0 if share >= 0.095 else 1)


def _without_steps(ranks: int, forwards: bool | None, end: Bye | None) -> Verdict:
    why = why_unwatched(Facts(watched=ranks, forwards=forwards))
    if end is not None:
        return Verdict("no_steps", "warn", str(why) if end.reason == "finished" else why.text)
    return Verdict("starting", "none", "waiting for every rank's first step" + (f": {why.text}" if why.text else ""))


def _healthy(
    summary: Summary, incidents: Sequence[Incident], ranks: int, world_size: int, issued: bool | None
) -> Verdict:
    if not ranks or (ranks < world_size and not summary.count):
        return Verdict("starting", "none", "waiting for every rank's first step")
    if summary.count < ENOUGH_STEPS:
        return Verdict("collecting", "none", f"too few steps to say: {summary.count} of {ENOUGH_STEPS} are measured")
    if not summary.communicates:
        return _without_buckets(ranks, issued)
    if summary.estimate.too_few:
        full = summary.estimate.full
        return Verdict("collecting", "none", f"too few steps to say what is exposed: {full} of {ENOUGH_FULL} are full")
    if summary.exposed_ns is None or not summary.step_ns:
        return Verdict("unmeasured", "none", "completion is not measured here, so overlap is unknown")
    known = summary.estimate
    what, ns = "exposed communication", summary.exposed_ns
    if known.transfer_ns is not None and not known.unsplit_ns:
        what, ns = "exposed transfer", known.transfer_ns
    text = f"{what} {in_ms(ns)} of {in_ms(summary.step_ns)} ({_percent(ns / summary.step_ns)})"
    if ranks < world_size:  # as on a host that shows only its own ranks
        text = f"only {ranks} of {world_size} ranks report here, so late ones do not show; {text}"
        return Verdict("partial", "none", text + _past(incidents))
    if is_costly(sum(map(_cost, _worth_naming(incidents)))):
        return Verdict("lost", "warn", f"{NONE_OPEN}; {text}{_past(incidents)}")
    return Verdict("hidden", "ok", f"{NOTHING}; {text}{_past(incidents)}")


def _with_gaps(found: Verdict, lost: LostTime) -> Verdict:
    """Returns a verdict that says how much time lies between steps if that is much, and more than is lost."""
    between = sum(account.ns for account in lost.accounts if (account.name, account.phase) == ("other", "between"))
    share = between / max(1, lost.rank_ns)
    if share < max(MUCH_BETWEEN, lost.share or 0.0):
        return found
    text = found.text.replace(NOTHING, NONE_OPEN).replace(" of all ranks' time lost", " lost", 1)
    return replace(
        found, text=f"{percent(share)} of all ranks' time is the gap before the forward; {text}", next_step=_LOOP
    )


def _without_buckets(ranks: int, issued: bool | None) -> Verdict:
    """Says that there was no communication, if sequence numbers stand still: nothing else shows it."""
    if ranks == 1:
        return Verdict("no_comm", "ok", "no communication: one rank has nobody to talk to")
    if issued is None:
        return Verdict("no_bucket", "none", "no bucket was seen; whether the ranks communicate otherwise is not known")
    if issued:
        return Verdict("no_bucket", "none", "no bucket was launched; the ranks' other collectives are not timed")
    return Verdict("no_comm", "ok", "no communication: no bucket was launched")


def _past(incidents: Sequence[Incident]) -> str:
    """Names the costliest incident that is over; those of ranks come first."""
    over = _worth_naming(incidents)
    if not over:
        return ""
    cost = sum(map(_cost, over))
    costliest = max(over, key=lambda incident: (bool(_blamed(incident)), _cost(incident)))
    more = f" and {len(over) - 1} more" if len(over) > 1 else ""
    return f"; earlier: {_dated(costliest)}{more}, {_percent(cost)} of all ranks' time"


def _worth_naming(incidents: Sequence[Incident]) -> list[Incident]:
    """Returns what is over, and worth a word: of infos, what took 5 % of the run."""
    least = {"info": COSTLY_SHARE}
    over = [incident for incident in incidents if not (incident.open or incident.counts)]
    return [one for one in over if _cost(one) >= least.get(one.severity, WORTH_SAYING)]


def _cost(incident: Incident) -> float:
    """Returns an incident's share of the run, as far as that is known."""
    return incident.share or 0.0


def _named(incident: Incident) -> str:
    """Returns what an incident is and whose, as short as can be."""
    kind, whose = KINDS[incident.kind], f" ({ranks_named(incident.ranks)})" if incident.ranks else ""
    noun = PAUSE_NOUNS.get(incident.phase) if incident.kind in ("pause", "intermittent") else None
    return f"{noun or kind.in_sentences or kind.name}{whose}"


def _dated(incident: Incident) -> str:
    """Returns what an incident was, whose, and when."""
    since, until = incident.since_step, incident.until_step
    when = "" if since is None else f" at step {since}" if until in (None, since) else f" in steps {since}–{until}"
    return f"{_named(incident)}{when}"


def _prefixed(found: Verdict, steps: int, end: Bye | None, stopped: bool) -> Verdict:
    """Adds how the run ended, unless it finished, or was stopped by hand, and there is a verdict on it."""
    is_known = found.severity != "none" or found.kind == "collecting"
    well = stopped or (end is not None and end.reason == "finished")
    if end is None or (well and found.severity != "none" and found.kind != "no_steps"):
        return found
    ended = how_ended(end)
    how = "stopped by Ctrl-C" if stopped else "finished" if well else f"the run {ended}"
    text = f"{how} after {steps} steps" + (f"; {found.text}" if is_known and found.text else "")
    if well and found.kind in ("no_steps", "collecting"):
        return replace(found, text=text)
    return replace(found, kind="ended", severity="ok" if well else "bad", text=text)
