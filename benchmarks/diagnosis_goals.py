"""Shows what the benchmark of diagnosis found, as tables: per kind of fault, and against the goals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import quantiles

from ddpwatch.common.text import table
from tests.support.diagnosis_oracle import Powers
from tests.support.diagnosis_score import SOON_STEPS, Score

COUNTED_SIZE = 0.05  # of a step: what is smaller is shown, and does not count
NAMED_SIZE = 0.10
FINDABLE = 0.99  # chance of a test
STALLS = ("stall", "stop")
SEARCH, ORACLE = attrgetter("searching"), attrgetter("knowing")
COST_SHARE = 0.9  # of the faults whose stated cost must be within the goal


@dataclass(frozen=True)
class Goals:
    """What to reach: shares from 0 to 1; steps; false alarms per clean step."""

    detected: float
    cause: float
    layer: float
    named_steps: int
    period: float
    alarms: float
    cost: float


SIMULATED = Goals(0.995, 0.99, 0.98, SOON_STEPS, 0.97, 1 / 100_000, 0.10)
REAL = Goals(0.99, 0.98, 0.95, SOON_STEPS, 0.95, 0.0, 0.15)


@dataclass(frozen=True)
class Judged:
    """One fault: its kind and size, the noise that it was in, and what the diagnosis said."""

    kind: str
    size: float
    noise: str
    score: Score


# -- statistics ----------------------------------------------------------------------------------------------


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not count:
        return 0.0, 1.0
    z, share = 1.96, hits / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (middle - spread) / (1 + z * z / count)), min(1.0, (middle + spread) / (1 + z * z / count))


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile of at least one value."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def _share(hits: Iterable[bool | None]) -> str:
    known = [hit for hit in hits if hit is not None]
    return f"{100 * sum(known) / len(known):.1f}" if known else "–"


# -- tables --------------------------------------------------------------------------------------------------

COLUMNS = [
    "faults", "detected %", "search %", "oracle %", "rank %", "cause %", "layer %", "period %", "word %", "pieces",
    "named after", "p99", "cost p50", "|cost| p90",
]  # fmt: skip


def by_kind(judged: Sequence[Judged]) -> list[str]:
    """A table with a row per kind and size."""
    groups: dict[tuple[str, float], list[Score]] = {}
    for one in judged:
        groups.setdefault((one.kind, one.size), []).append(one.score)
    rows = [
        [kind, f"{100 * size:.0f} %" if size else "–", *_cells(scores)]
        for (kind, size), scores in sorted(groups.items())
    ]
    return table(["kind", "size", *COLUMNS], rows)


def counts(judged: Judged) -> bool:
    """Whether a fault is large enough for the goals."""
    return judged.size == 0 or judged.size >= COUNTED_SIZE


def _cells(scores: Sequence[Score]) -> list[str]:
    found = [score for score in scores if score.detected]
    named = [score.named_after[1] for score in scores if score.named_after is not None]
    costs = [score.cost for score in found if score.cost is not None]
    pieces = [score.pieces for score in found if score.pieces]
    return [
        str(len(scores)), _share(score.detected for score in scores),
        _chance(scores, SEARCH), _chance(scores, ORACLE),
        _share(score.rank for score in found), _share(score.cause for score in found),
        _share(score.layer for score in found), _share(score.period for score in found),
        _share(score.kind for score in found if score.rank), f"{sum(pieces) / len(pieces):.1f}" if pieces else "–",
        f"{percentile(named, 50):.0f}" if named else "–", f"{percentile(named, 99):.0f}" if named else "–",
        f"{100 * percentile(costs, 50):+.1f} %" if costs else "–",
        f"{100 * percentile([abs(cost) for cost in costs], 90):.1f} %" if costs else "–",
    ]  # fmt: skip


def _chance(scores: Sequence[Score], test: Callable[[Powers], float]) -> str:
    """What share of faults a test would find; those that it is not asked about count as found."""
    if all(score.oracle is None for score in scores):
        return "–"
    return f"{100 * sum(1.0 if score.oracle is None else test(score.oracle) for score in scores) / len(scores):.1f}"


@dataclass(frozen=True)
class Row:
    """A goal, and what was measured. ``interval`` and ``met`` are empty and None without a measurement."""

    name: str
    goal: str
    measured: str
    count: int
    interval: str
    met: bool | None

    def cells(self) -> list[str]:
        """The row of a table."""
        met = "–" if self.met is None else "ok" if self.met else "MISS"
        return [self.name, self.goal, self.measured, str(self.count), self.interval, met]


def goals_table(rows: Iterable[Row]) -> list[str]:
    """The goals as a table."""
    return table(["goal", "to reach", "measured", "n", "95 % interval", ""], [row.cells() for row in rows])


def goal_rows(judged: Iterable[Judged], goals: Goals) -> list[Row]:
    """What faults show, against the goals. Faults that are not detected count as not named right in no row but one."""
    counted = [one for one in judged if counts(one)]
    scores = [one.score for one in counted]
    found = [score for score in scores if score.detected]
    right = [score.rank and score.cause is not False for score in found]
    layers = [score.layer for score in found if score.layer is not None]
    periods = [bool(one.score.period) for one in counted if one.score.truth.period is not None]
    return [
        _share_row("detection, faults ≥ 5 % of a step", [score.detected for score in scores], goals.detected),
        _chance_row("the same, of a search that knows phase, size and noise", scores, SEARCH),
        _chance_row("the same, of an oracle that also knows rank and steps", scores, ORACLE),
        _share_row("detection of what the search finds with 99 %", _findable(scores, SEARCH), goals.detected),
        _share_row("detection of what the oracle finds with 99 %", _findable(scores, ORACLE), goals.detected),
        _share_row("rank and cause right, of those", right, goals.cause),
        _share_row("layer right (backward faults)", layers, goals.layer),
        _named_row([one.score for one in counted if one.kind == "constant" and one.size >= NAMED_SIZE], goals),
        _share_row("period named, ±1", periods, goals.period),
        _cost_row([score.cost for score in found if score.cost is not None], goals),
        _share_row("stalls and SIGSTOP: a warning", [one.score.alarm for one in counted if one.kind in STALLS], None),
    ]


def _share_row(name: str, hits: Sequence[bool], goal: float | None) -> Row:
    to_reach = "–" if goal is None else f"≥ {100 * goal:g} %"
    if not hits:
        return Row(name, to_reach, "–", 0, "–", None)
    low, high = wilson(sum(hits), len(hits))
    share = sum(hits) / len(hits)
    interval = f"{100 * low:.1f} … {100 * high:.1f} %"
    met = None if goal is None else share >= goal
    return Row(name, to_reach, f"{100 * share:.2f} %", len(hits), interval, met)


def _chance_row(name: str, scores: Sequence[Score], test: Callable[[Powers], float]) -> Row:
    share = _chance(scores, test)
    return Row(name, "–", "–" if share == "–" else f"{share} %", len(scores), "–", None)


def _findable(scores: Sequence[Score], test: Callable[[Powers], float]) -> list[bool]:
    return [score.detected for score in scores if score.oracle is None or test(score.oracle) >= FINDABLE]


def _named_row(scores: Sequence[Score], goals: Goals) -> Row:
    """In watched steps; one that is never named counts as missed."""
    name, goal = "time to a name, constant faults ≥ 10 %", f"≤ {goals.named_steps} watched steps (p99)"
    if not scores:
        return Row(name, goal, "–", 0, "–", None)
    steps = [math.inf if score.named_after is None else score.named_after[1] for score in scores]
    in_time = sum(after <= goals.named_steps for after in steps)
    low, high = wilson(in_time, len(steps))
    late = sorted(steps)[math.ceil(0.99 * len(steps)) - 1]
    measured = f"p50 {sorted(steps)[len(steps) // 2]:.0f}, p99 {late:.0f}, in time {100 * in_time / len(steps):.1f} %"
    if any(score.oracle is not None for score in scores):
        search, oracle = (_chance(scores, attrgetter(test)) for test in ("searching_soon", "knowing_soon"))
        measured += f" (the search {search} %, the oracle {oracle} %)"
    return Row(name, goal, measured, len(steps), f"{100 * low:.1f} … {100 * high:.1f} %", late <= goals.named_steps)


def _cost_row(costs: Sequence[float], goals: Goals) -> Row:
    name = f"cost stated, {100 * COST_SHARE:.0f} % of faults"
    goal = f"within {100 * goals.cost:.0f} %"
    if not costs:
        return Row(name, goal, "–", 0, "–", None)
    errors = [abs(cost) for cost in costs]
    within = sum(error <= goals.cost for error in errors)
    low, high = wilson(within, len(errors))
    measured = f"|error| p50 {100 * percentile(errors, 50):.1f} %, p90 {100 * percentile(errors, 90):.1f} %"
    return Row(
        name, goal, f"{measured}; within: {100 * within / len(errors):.1f} %", len(errors),
        f"{100 * low:.1f} … {100 * high:.1f} %", within >= COST_SHARE * len(errors),
    )  # fmt: skip


def alarm_row(kinds: Mapping[str, int], steps: int, goals: Goals) -> Row:
    """False alarms of clean runs, by kind. The interval is that of their rate per 100,000 steps."""
    alarms = sum(kinds.values())
    goal = "0" if not goals.alarms else "≤ 1 in 100,000 clean steps"
    if not steps:
        return Row("false alarms", goal, "–", 0, "–", None)
    low, high = (100_000 * share for share in wilson(alarms, steps))
    met = alarms <= goals.alarms * steps
    which = f" ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})" if kinds else ""
    return Row("false alarms", goal, f"{alarms}{which}", steps, f"{low:.2f} … {high:.2f} in 100,000", met)
