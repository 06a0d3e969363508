"""Incidents for every kind of text, and the check that ``ddpwatch report --fail-on`` makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.analysis.diagnosis.incident_json import IncidentFigures
from ddpwatch.analysis.diagnosis.kinds import KINDS, Kind
from ddpwatch.analysis.diagnosis.words.account_names import rank_seconds
from ddpwatch.analysis.diagnosis.words.evidence_sentences import evidence_sentences
from ddpwatch.analysis.diagnosis.words.incident_news import is_only_counted
from ddpwatch.analysis.diagnosis.words.lost_time import LEAST_SHARE, seconds_text, share_text
from ddpwatch.analysis.diagnosis.words.sentences import each
from ddpwatch.analysis.diagnosis.words.wording import stack_lines, whose_time
from ddpwatch.analysis.figures import Report
from ddpwatch.common.text import clean, percent
from ddpwatch.common.units import NS_PER_S
from ddpwatch.errors import DdpwatchError, UsageError

MOST_INCIDENTS = 20
ANY = "any"


def shown(incidents: Sequence[IncidentFigures]) -> tuple[Sequence[IncidentFigures], str]:
    """Returns the worst incidents, and how many more there are; "" for none. Infos that cost nothing are counted."""
    costly = [one for one in incidents if not is_only_counted(one.kind, one.severity, one.share)]
    more, trifles = max(0, len(costly) - MOST_INCIDENTS), len(incidents) - len(costly)
    told = [f"{more} more"] if more else []
    told += [f"{trifles} {'' if told else 'more, '}of no cost worth a figure"] if trifles else []
    return costly[:MOST_INCIDENTS], f"… {'; '.join(told)}" if told else ""


def last_line(report: Report) -> str:
    """Returns the verdict, after how somebody stopped the run, unless it says that."""
    said = report.verdict.text
    stopped = [row.message for row in report.incidents if row.kind == "stopped"]
    return said if said.startswith(KINDS["stopped"].name) else "; ".join([*stopped, said])


def advice(report: Report, listed: Sequence[IncidentFigures]) -> str:
    """Returns what to do about the verdict, unless an incident that is listed says that; "" if there is nothing."""
    found = report.verdict.next_step
    return "" if found in [row.next_step for row in listed] else found


def named(kind: Kind, message: str) -> str:
    """Returns what happened, after what kind of incident it is, unless its first words say that."""
    name = KINDS[kind].name
    return message if message.startswith(name) else f"{name}: {message}"


def facts(row: IncidentFigures, report: Report) -> str:
    """Returns when an incident of that report struck, what it cost, what its end would gain."""
    found = [_when(row)]
    if row.period is not None and " in every " not in row.message:
        found.append(each(row.period))
    if row.seconds and row.share and row.share >= LEAST_SHARE:
        unit = rank_seconds(report.run.timing_source)
        cost = f"{seconds_text(row.seconds * NS_PER_S)} {unit}, {share_text(row.share)} of all ranks' time"
        found.append(cost + whose_time(row.kind, row.ranks))
    if row.gain:
        found.append(f"while it lasts, a step would be {percent(row.gain, 1)} shorter without it")
    if row.kind not in ("death", "stopped"):
        found.append("ongoing at the end" if row.open else "over")
    return " · ".join(filter(None, found))


def _when(row: IncidentFigures) -> str:
    since, until, count = row.since_step, row.until_step, row.steps
    if since is None or until is None:
        return ""
    if since == until:
        return f"step {since}"
    times = f", {row.occurrences} times" if row.occurrences > 1 else ""
    return f"steps {since}–{until}{times}" + (f" (seen in {count})" if 0 < count <= until - since else "")


def details(row: IncidentFigures) -> list[str]:
    """Returns lines below an incident: the cause outside the job, and the stacks of a hang."""
    return [*([f"cause: {row.device}"] if row.device else []), *stack_lines(row.ranks, row.evidence)]


def lines_below(row: IncidentFigures) -> list[str]:
    """Returns these lines, and what to do next."""
    return [*details(row), f"next: {row.next_step}"]


def evidence(row: IncidentFigures) -> list[str]:
    """Returns the figures that an incident rests on, in a sentence each."""
    return evidence_sentences(row.evidence, row.steps, row.occurrences)


def parse_kinds(text: str) -> frozenset[str]:
    """Reads ``straggler,hang`` or ``any``.

    Raises:
        UsageError: A kind is not known.
    """
    kinds = frozenset(filter(None, (kind.strip() for kind in text.split(","))))
    if not kinds or not kinds <= {ANY, *KINDS}:
        unknown = ", ".join(sorted(kinds - {ANY, *KINDS})) or text
        raise UsageError(f"{unknown!r} is not a kind of incident", f"give some of {', '.join(KINDS)}, or any")
    return kinds


def fail_if(report: Report, kinds: frozenset[str]) -> None:
    """Fails if there is an incident of these kinds, or of ``any``, that is more than an info.

    A slow host replaces incidents of its ranks, of three kinds.

    Raises:
        DdpwatchError: There is one; the worst is named.
    """
    of_host = [kind for kind, known in KINDS.items() if known.of_host]
    for row in report.incidents:
        meant = {ANY, row.kind, *(of_host if row.kind == "slow_host" else ())}
        if meant & kinds and row.severity != "info":
            raise DdpwatchError(f"{row.kind}: {clean(row.message)}")
