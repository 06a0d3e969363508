"""Plays a made-up job to the engine of the diagnosis, and compares what it says with the truth."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.sampling.levels import is_watched
from tests.support.diagnosis_cases import Job, Truth
from tests.support.diagnosis_oracle import Figure, Powers, powers
from tests.support.fleet import Ints, Played

ALARMS = ("warning", "error")
SOON_STEPS = 10  # watched ones, in which a constant fault is to be named
SEEN_STRIKES = 4  # watched ones, that a fault may have had before the diagnosis has it start
LOOK_STEPS, LOOK_EVERY = 48, 8  # how often to look whether a fault is named: after every step at first, then less often


@dataclass
class Score:
    """What the diagnosis says of one truth. None: not to be judged.

    Attributes:
        detected: It found something of that kind, at that time.
        rank: It named the right rank.
        kind: It used the word that fits best.
        alarm: It is a warning or an error.
        named_after: In how many steps from the first one that it struck, itself included, and how many of these were
            watched.
        cost: What it says it costs (``stated_ns``, of incidents with one kind), against the truth.
        oracle: The chances that tests find it that know more (`diagnosis_oracle.py`), also from the first `SOON_STEPS`
            watched steps that it struck. None where there is no such test, or nobody asked.
        strength: How far the fault stands out: its rank's extra lateness in watched steps, in standard errors of the
            rank's lateness without it. Below some 5 to 8, no test finds it that is seldom wrong.
            None if nobody asked.
        pieces: How many incidents it made of it.
        latest: The last step in which an incident of it may start; 0: as many steps after it as its slack is.
    """

    truth: Truth
    detected: bool = False
    rank: bool = False
    cause: bool | None = None
    layer: bool | None = None
    period: bool | None = None
    kind: bool = False
    alarm: bool = False
    named_after: tuple[int, int] | None = None
    cost: float | None = None
    oracle: Powers | None = None
    strength: float | None = None
    stated_ns: int = 0
    pieces: int = 0
    latest: int = 0


@dataclass
class Result:
    """A case after it was played.

    Attributes:
        others: Warnings and errors that no truth explains.
        engine_ns, facts_ns: CPU time of the engine, and of the figures that it is fed.
        rank_steps: How many rank-steps it was fed.
    """

    job: Job
    scores: list[Score] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    others: list[Incident] = field(default_factory=list)
    engine_ns: int = 0
    facts_ns: int = 0
    rank_steps: int = 0


def play(job: Job, ask_oracle: bool = False) -> Result:
    """Feeds a job to the engine, step by step. To ask for `Score.oracle` and `Score.strength` takes as long again."""
    fleet = job.fleet
    diagnosis = Diagnosis(fleet.names)
    result = Result(job, [Score(truth) for truth in job.truths])
    calm = job.undisturbed.play() if job.truths else None
    struck = _struck(job.truths)
    watched: list[bool] = []
    lateness: list[tuple[Ints, Ints]] = []
    figures: list[tuple[Ints, Ints]] = []
    for played in fleet.play():
        undisturbed = next(calm) if calm is not None else played
        if ask_oracle:
            lateness.append((_lateness(played), _lateness(undisturbed)))
            figures.append((_figures(played), _figures(undisturbed)))
        for truth in struck.get(played.number, ()):
            truth.cost_ns += _spent(truth, played) - _spent(truth, undisturbed)
        across = fleet.across(played)
        watched.append(is_watched(played.status))
        started = time.thread_time_ns()
        across.all_facts()
        result.facts_ns += time.thread_time_ns() - started
        started = time.thread_time_ns()
        for mark in played.marks:
            diagnosis.apply_message(mark, mark.end_ns or mark.start_ns)
        diagnosis.add_step(across)
        result.engine_ns += time.thread_time_ns() - started
        result.rank_steps += job.shape.world
        look(diagnosis, result.scores, played.number, watched, job.shape.world)
    result.incidents = diagnosis.spells()
    for score in result.scores:
        score.latest = latest(score.truth, np.array(watched))
        if ask_oracle:
            score.strength = _strength(score.truth, np.array(lateness), np.array(watched))
            score.oracle = _oracle(score.truth, np.array(figures), np.array(watched))
    judge(result.scores, result.incidents, job.shape.world)
    result.others = unexplained(job.truths, result.incidents, job.shape.world)
    return result


def _lateness(played: Played) -> Ints:
    """By how much each rank launches its last bucket after the median rank."""
    last = played.launch[:, -1]
    return np.asarray(last - np.median(last))


_PHASES = ("data", "forward", "backward")


def _figures(played: Played) -> Ints:
    """By how much each rank exceeds the median one: its lateness, and what it spends on each of `_PHASES`."""
    spent = [played.data_end - played.start, *(phase[1] - phase[0] for phase in (played.forward, played.backward))]
    return np.stack([_lateness(played), *(values - np.median(values) for values in spent)])


def _oracle(truth: Truth, figures: Ints, watched: npt.NDArray[np.bool_]) -> Powers | None:
    """See `Score`. None where a mark says it or a single step shows it, and if it is no single rank's."""
    if len(truth.ranks) != 1 or len(truth.strikes) == 1 or not truth.phases or truth.phases[0] not in _PHASES:
        return None
    struck = np.zeros(len(watched), np.bool_)
    struck[truth.strikes] = True
    kept = watched & (np.arange(len(watched)) <= truth.strikes[-1])
    found = []
    for at in (0, 1 + _PHASES.index(truth.phases[0])):
        disturbed, calm = (figures[:, which, at].astype(np.float64) for which in (0, 1))
        shift = np.where(struck, disturbed[:, truth.ranks[0]] - calm[:, truth.ranks[0]], 0.0)[kept]
        found.append(Figure(shift, calm[watched], truth.ranks[0], np.flatnonzero(kept)))
    return powers(found, truth.since, truth.period is not None, SOON_STEPS)


def latest(truth: Truth, watched: npt.NDArray[np.bool_]) -> int:
    """See `Score`: some strikes have to be seen first."""
    seen = truth.strikes[watched[truth.strikes]][:SEEN_STRIKES].tolist()
    return max([truth.since + truth.slack, *seen])


def _strength(truth: Truth, lateness: Ints, watched: npt.NDArray[np.bool_]) -> float | None:
    """See `Score`; None if it is no single rank's doing, or without noise."""
    if len(truth.ranks) != 1:
        return None
    struck, calm = lateness[:, 0, truth.ranks[0]], lateness[:, 1, truth.ranks[0]]
    strikes = truth.strikes[watched[truth.strikes]]
    noise = float(calm.std())
    return float((struck - calm)[strikes].sum() / (noise * len(strikes) ** 0.5)) if noise and len(strikes) else None


def _struck(truths: Iterable[Truth]) -> dict[int, list[Truth]]:
    """The truths by the steps that they strike."""
    found: dict[int, list[Truth]] = {}
    for truth in truths:
        for step in truth.strikes.tolist():
            found.setdefault(step, []).append(truth)
    return found


def _spent(truth: Truth, played: Played) -> int:
    """The rank-time of a step that counts as the cost of a truth."""
    if truth.cost_of == "input":
        return int((played.data_end - played.start).sum())
    if truth.cost_of == "transfer":
        return int(played.exposed().sum())
    if truth.cost_of == "gap":
        return int((played.start - played.before).sum())
    waits = played.waits()
    return int(waits.sum() - waits[list(truth.ranks)].sum())


def look(diagnosis: Diagnosis, scores: Iterable[Score], step: int, watched: Sequence[bool], world: int) -> None:
    """Notes which faults are named by now."""
    for score in scores:
        passed = step - score.truth.since
        due = passed >= 0 and (passed < LOOK_STEPS or passed % LOOK_EVERY == 0)
        if due and score.named_after is None and matching(score.truth, diagnosis.spells(), world):
            score.named_after = passed + 1, sum(watched[score.truth.since :])


# -- judging -------------------------------------------------------------------------------------------------


def matching(truth: Truth, incidents: Iterable[Incident], world: int) -> list[Incident]:
    """The incidents that are this truth, with the right rank."""
    return [one for one in incidents if _alike(truth, one) and _same_ranks(truth, one, world)]


def _alike(truth: Truth, incident: Incident) -> bool:
    """Whether it is of that kind and at that time."""
    since = incident.since_step
    last = int(truth.strikes[-1])
    if truth.phases == ("gc",):  # all collections of a rank are one incident, also those before the fault
        overlaps = (since or 0) <= last and truth.since <= (incident.until_step or 0)
        return incident.kind in truth.kinds and incident.phase == "gc" and overlaps
    if incident.phase == "gc" and truth.phases:  # what marks explain is no other fault
        return False
    in_time = since is None or truth.since - truth.slack <= since <= last + truth.slack
    return incident.kind in truth.kinds and in_time


def _same_ranks(truth: Truth, incident: Incident, world: int) -> bool:
    return truth.hidden or incident.ranks == truth.ranks or (not truth.ranks and incident.ranks == tuple(range(world)))


def judge(scores: Iterable[Score], incidents: Sequence[Incident], world: int) -> None:
    """Compares every truth with the incidents."""
    taken = {id(one) for score in scores for one in matching(score.truth, incidents, world)}
    for score in scores:
        truth = score.truth
        own = matching(truth, incidents, world)
        latest = score.latest or truth.since + truth.slack
        early = [one for one in own if one.since_step is None or one.since_step <= latest]
        wrong = [one for one in incidents if _alike(truth, one) and id(one) not in taken]
        score.detected, score.rank, score.pieces = bool(early or wrong), bool(early), len(own)
        if early:
            best = max(early, key=lambda one: (_word(truth, one), one.cost_ns))
            _judge_one(score, best)
            score.stated_ns = sum(one.cost_ns for one in own if one.kind == best.kind)
            if truth.cost_ns > 0 and not truth.hidden:
                score.cost = score.stated_ns / truth.cost_ns - 1


def _word(truth: Truth, incident: Incident) -> bool:
    """Whether the incident has the kind that fits best."""
    return incident.kind == truth.kinds[0]


def _judge_one(score: Score, incident: Incident) -> None:
    truth = score.truth
    score.kind, score.alarm = _word(truth, incident), incident.severity in ALARMS
    unknown = not incident.phase and incident.evidence.unwatched  # of such a step, no phase is known
    score.cause = incident.phase in truth.phases if truth.phases and not unknown else None
    score.layer = incident.param in truth.params if truth.params is not None else None
    if truth.period is not None:
        score.period = incident.period is not None and abs(incident.period - truth.period) <= 1


def unexplained(truths: Iterable[Truth], incidents: Iterable[Incident], world: int) -> list[Incident]:
    """The warnings and errors that are no truth."""
    explained = [one for truth in truths for one in matching(truth, incidents, world)]
    return [one for one in incidents if one.severity in ALARMS and not any(one is known for known in explained)]
