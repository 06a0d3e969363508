"""Compares what ddpwatch says of a case with its truth: while the job ran, and in the report on its recording."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.thresholds import EXPOSED_SHARE, INPUT_SHARE, OVER_SHARE
from ddpwatch.analysis.diagnosis.words.incident_news import costs_nothing
from ddpwatch.analysis.diagnosis.words.wording import ranks_named
from ddpwatch.analysis.run import Run
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of_recording
from ddpwatch.wire.messages import RankSample
from tests.support.field.case import Case, Truth

RECORDING, OUTPUT = "run.mcap", "output.txt"  # in a case's folder, beside its ranks' notes
ALARMS = ("warning", "error")
COST_WITHIN = 0.15
LOOK_STEPS, LOOK_EVERY = 48, 8  # how often to look whether it is named: after every step at first, then less often
NUMBER = re.compile(r"[\d.,]+")


class NotedStep(NamedTuple):
    """What a rank notes of a step; times in ns."""

    step: int
    started: int
    computed: int
    reduced: int
    ended: int


@dataclass(frozen=True)
class Notes:
    """What one rank did, by its own clock.

    Attributes:
        struck: In which steps the fault took how long (ns).
        backwards: Of which steps, when their gradients were there, and when these were reduced.
        fetched: In which steps the loop waited for a batch for how long (ns).
    """

    steps: Sequence[NotedStep]
    struck: Sequence[tuple[int, int]]
    backwards: Sequence[tuple[int, int, int]]
    fetched: Sequence[tuple[int, int]]


def notes_of(folder: Path, ranks: int) -> list[Notes]:
    """Reads the notes of all ranks; those of a rank that has left none are empty."""
    found = []
    for rank in range(ranks):
        file = folder / f"notes-{rank}.json"
        about = json.loads(file.read_text()) if file.exists() else {}
        steps = [NotedStep(*step) for step in about.get("steps", ())]
        backwards = about.get("backwards") or [(at.step, at.computed, at.reduced) for at in steps]
        found.append(Notes(steps, about.get("struck", ()), backwards, about.get("fetched", ())))
    return found


def true_cost_ns(truth: Truth, notes: Sequence[Notes]) -> float | None:
    """Returns the rank-time that a fault cost by the ranks' notes; None if that is not to be judged.

    ``struck``: the others waited as long as the fault took, or all ranks were in it. ``lead``: they waited from when
    the last of them had its gradients until the rank had, less what they had waited without the fault. ``jitter``: each
    waited for the last one. ``exposed``: all waited from when the last one had its gradients until they were reduced;
    ``repeated``: where another reduction of the step followed.
    """
    if not truth.cost:
        return None
    if truth.cost == "struck":
        of_ranks = [sum(ns for step, ns in one.struck if step >= truth.since) for one in notes]
        return sum(of_ranks) if not truth.ranks else (len(notes) - 1) * sum(of_ranks[rank] for rank in truth.ranks)
    if truth.cost in ("exposed", "repeated"):
        return _exposed_ns(notes, truth.since, is_last=None if truth.cost == "exposed" else False)
    rows = _rows(notes, truth.since)
    computed = [[at.computed for at in row] for row in rows]
    if truth.cost == "jitter":
        return sum(max(row) - at for row in computed for at in row)
    rank = truth.ranks[0]
    delays = _delays(notes[rank])
    found = 0
    for row in rows:
        lead = row[rank].computed - max(at.computed for other, at in enumerate(row) if other != rank)
        found += max(0, lead) - max(0, lead - delays.get(row[rank].step, lead))
    return (len(notes) - 1) * found


def _delays(notes: Notes) -> dict[int, int]:
    """Returns by how much the fault delayed a rank's gradients (ns), by step: all of its lateness where none is noted.

    A fault that fits between the reduction and the end of its step came after these, so it delayed the next one's.
    """
    after = {at.step: at.ended - at.reduced for at in notes.steps}
    found = dict.fromkeys(after, 0) if notes.struck else {}
    for step, ns in notes.struck:
        delayed = step + (after.get(step, 0) >= ns)
        found[delayed] = found.get(delayed, 0) + ns
    return found


def _rows(notes: Sequence[Notes], since: int) -> list[tuple[NotedStep, ...]]:
    """Returns the steps that all ranks noted, from one on, without the first."""
    rows = zip(*[one.steps for one in notes], strict=False)
    return [row for row in rows if row[0].step >= max(since, 1)]


def _exposed_ns(notes: Sequence[Notes], since: int, until: int | None = None, is_last: bool | None = None) -> int:
    """Returns for how long all ranks only waited for transfers; ``is_last``: in steps' last backwards, or in others."""
    found, rows = 0, list(zip(*[one.backwards for one in notes], strict=False))
    for row, after in zip_longest(rows, rows[1:]):
        step = row[0][0]
        ends = after is None or after[0][0] != step
        if max(since, 1) <= step <= (step if until is None else until) and is_last in (None, ends):
            found += len(row) * (min(reduced for *_, reduced in row) - max(computed for _, computed, _ in row))
    return found


@dataclass
class Judgement:
    """What was judged of one case; each part is right or not.

    Attributes:
        found: The incident that is meant; None if there is none, or if there is to be none.
        parts: By name, whether it is right; what does not matter is left out.
        others: Warnings and errors that are not true.
        cost: By how much the cost is wrong, as a share.
        named_after: In how many steps it was named.
        verdict: The report's.
        starved: The share of their time for which ranks waited for a core: much of it blurs what was planned.
    """

    case: Case
    found: Incident | None = None
    parts: dict[str, bool] = field(default_factory=dict)
    others: list[Incident] = field(default_factory=list)
    cost: float | None = None
    named_after: int | None = None
    verdict: str = ""
    starved: float | None = None

    @property
    def word(self) -> str:
        """``right``, ``partly`` or ``wrong``: nothing of it, somebody else, or an alarm about a healthy job."""
        if all(self.parts.values()):
            return "right"
        return "partly" if self.case.truth.kinds and self.parts["found"] else "wrong"


def judge(case: Case, folder: Path) -> Judgement:
    """Reads a case's recording step by step, as a viewer would have, and then as a report."""
    truth, judgement = case.truth, Judgement(case)
    run, samples = Run(), list[RankSample]()
    for message, envelope in Recording(folder / RECORDING):
        if isinstance(message, RankSample):
            samples.append(message)
        for across in run.apply_message(message, envelope.received_ns):
            passed = across.step - truth.since
            due = passed >= 0 and (passed < LOOK_STEPS or passed % LOOK_EVERY == 0)
            if due and judgement.named_after is None and matching(truth, run.diagnosis.incidents(), case.ranks):
                judgement.named_after = passed + 1
    for _ in run.rest():
        pass
    if spans_ns := sum(sample.span_ns for sample in samples):
        judgement.starved = sum(sample.wait_ns or 0 for sample in samples) / spans_ns
    incidents = run.diagnosis.incidents()
    report: dict[str, Any] = report_of_recording(Recording(folder / RECORDING)).as_json()
    judgement.verdict = report["verdict"]["text"]
    _judge_incidents(judgement, incidents, notes_of(folder, case.ranks))
    if report["verdict"]["kind"] in set(truth.kinds) - set(KINDS):
        judgement.parts |= {"found": True, "says": bool(re.search(truth.says, judgement.verdict))}
    _judge_verdict(judgement, report)
    if (folder / OUTPUT).exists():
        _judge_live(judgement, (folder / OUTPUT).read_text(), report, incidents)
    if truth.updates is not None:
        judgement.parts["updates"] = report["steps"]["count"] == truth.updates
    return judgement


def matching(truth: Truth, incidents: Iterable[Incident], world: int) -> list[Incident]:
    """Returns the incidents that are this truth, costliest first."""
    everybody = tuple(range(world))
    found = [
        one
        for one in incidents
        if one.kind in truth.kinds and (one.ranks == truth.ranks or (not truth.ranks and one.ranks == everybody))
        if not truth.phases or one.phase in truth.phases
    ]
    return sorted(found, key=lambda one: -one.cost_ns)


def _is_noted(incident: Incident, notes: Sequence[Notes]) -> bool:
    """Returns whether the ranks' notes confirm what is said, though it was no plan, as cores are shared.

    Transfers may be exposed, and workers may not get a core.
    """
    first, last = incident.since_step or 0, incident.until_step or 0
    rows = [row for row in _rows(notes, first) if row[0].step <= last]
    spent = sum(at.ended - at.started for row in rows for at in row)
    if incident.kind == "exposed_comm":
        return _exposed_ns(notes, first, last) >= OVER_SHARE * EXPOSED_SHARE * spent > 0
    if incident.kind == "slow_input" and not incident.ranks:
        waited = sum(ns for one in notes for step, ns in one.fetched if first <= step <= last)
        return waited >= OVER_SHARE * INPUT_SHARE * spent > 0
    return False


def _judge_incidents(judgement: Judgement, incidents: Sequence[Incident], notes: Sequence[Notes]) -> None:
    cost_ns = true_cost_ns(judgement.case.truth, notes)
    truth, world, parts = judgement.case.truth, judgement.case.ranks, judgement.parts
    own = matching(truth, incidents, world) or matching(Truth(truth.kinds, truth.ranks), incidents, world)
    judgement.others = [
        one
        for one in incidents
        if one.severity in ALARMS and one not in own and one.kind not in truth.beside and not _is_noted(one, notes)
    ]
    parts["no alarm"] = not judgement.others
    if not truth.kinds:
        return
    parts["found"] = bool(own)
    if not own:
        return
    found = judgement.found = own[0]
    if truth.phases:
        parts["phase"] = found.phase in truth.phases
    if cost_ns is not None:
        judgement.cost = found.cost_ns / cost_ns - 1 if cost_ns > 0 else None
        parts["cost"] = judgement.cost is not None and abs(judgement.cost) <= COST_WITHIN
    if truth.cause:
        parts["cause"] = bool(re.search(truth.cause, f"{found.device} {found.message}"))
    if truth.says:
        parts["says"] = bool(re.search(truth.says, f"{found.message} {found.next_step}", re.IGNORECASE))
    if truth.period is not None:
        parts["period"] = found.period is not None and abs(found.period - truth.period) <= 1
    if truth.soon is not None:
        parts["soon"] = judgement.named_after is not None and judgement.named_after <= truth.soon


def _judge_verdict(judgement: Judgement, report: Mapping[str, Any]) -> None:
    """Judges whether the verdict is about the truth, or remembers it; of a healthy job, it blames nobody."""
    kind, severity, text = (report["verdict"][name] for name in ("kind", "severity", "text"))
    kinds = judgement.case.truth.kinds and (*judgement.case.truth.kinds, *judgement.case.truth.beside)
    is_true = kind in kinds or any(one.replace("_", " ") in text for one in kinds) if kinds else severity != "bad"
    judgement.parts["verdict"] = is_true


def _judge_live(judgement: Judgement, output: str, report: Mapping[str, Any], incidents: Sequence[Incident]) -> None:
    """Judges whether the terminal said at last of incidents, and as a verdict, what the report says."""
    lines = [" ".join(line.removeprefix("ddpwatch:").split()) for line in output.splitlines()]
    at = max((at for at, line in enumerate(lines) if line.startswith("incidents: ")), default=0)
    said, verdict = lines[at + 1 :], NUMBER.sub("#", report["verdict"]["text"])
    listed = [one for one in incidents if one.severity != "info" or not costs_nothing(one)]
    named = [f"{KINDS[one.kind].name} {_whose(one)} " for one in listed]
    agree = all(any(line.startswith(name) for line in said) for name in named)
    last = lines[at - 1 : at] if at else lines  # a job without steps has no incidents to list
    judgement.parts["live"] = agree and any(verdict in NUMBER.sub("#", line) for line in last)


def _whose(incident: Incident) -> str:
    return ranks_named(incident.ranks) if incident.ranks else "all ranks"
