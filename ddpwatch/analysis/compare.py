"""Compares runs: is one slower than the other beyond chance, and because of which phase of the step?

The unit is a step: its time is the mean over its ranks, which synchronised training keeps together. Steps are not
independent (caches, clocks and neighbours drift), so a run is cut into consecutive blocks, longer ones where blocks
resemble their neighbours. Each block yields its median, and the blocks are resampled with replacement (a block
bootstrap, Künsch 1989). The interval is the bootstrap's, widened by Student's t for the number of blocks. It covers
what varies *within* the runs. Two starts of one job can differ by more, so a difference below `SMALLEST` is never
reported as one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter
from statistics import fmean, median, pvariance, stdev

from msgspec.structs import replace

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.incident import LOST, AccountName, Severity
from ddpwatch.analysis.diagnosis.incident_json import Figures, IncidentFigures, LostFigures
from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.analysis.diagnosis.words.account_names import timed_by
from ddpwatch.analysis.digest import share_of
from ddpwatch.analysis.figures import OverlapFigures
from ddpwatch.analysis.means import Sums
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.statistics import p50, student
from ddpwatch.common.text import clean, two_digits
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.wire.messages import Hello

SMALLEST = 0.01  # of the step time
SMALLEST_OVERLAP = 0.02
TOO_WIDE = 0.05  # with an interval wider than this to either side, runs are not reported as equal
CONFIDENCE = 0.99
MOST_BLOCKS = 40
FEWEST_BLOCKS = 6
STEPS_PER_BLOCK = 5
MOST_AUTOCORRELATION = 0.15  # of neighbouring blocks
RESAMPLES = 2000
FEWEST_STEPS = 20
MOST_NAMED = 4  # of what differs before training
_NEED_COMPLETIONS = ("exposed_comm", "other")  # without completions, one cannot be separated from the other
_PHASE_NAMES = {
    "data": "waiting for data", "between": "the gap before the forward", "forward": "the forward",
    "backward": "the backward",
    "exposed_comm": "exposed communication", "optimizer": "the optimizer", "other": "the rest of the step",
}  # fmt: skip

_Phases = Mapping[str, list[float]]


@dataclass
class RunSeries:
    """One run, step by step: means over the ranks in ms.

    Attributes:
        name: What texts call the run.
        step: Time of each step.
        phases: The phases of each step: ``data`` only where it is known, ``exposed_comm`` and ``other`` only where
            completions were timed.
        waited_for: The same of the rank that waited least in collectives, as the others waited for it.
        overlap: Overlap of each step that communicated.
        shown: Means of the phases (ms), where a page shows them; the medians of these steps otherwise.
        shown_overlap: That of all steps, where a page shows it.
        setup: What it ran on, as texts by name (`setup_of`).
    """

    name: str
    step: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    waited_for: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    overlap: list[float] = field(default_factory=list)
    shown: Mapping[str, float | None] = field(default_factory=dict)
    shown_overlap: float | None = None
    setup: Mapping[str, str] = field(default_factory=dict)

    def add_step(self, across: StepAcrossRanks) -> None:
        """Adds one step, as far as it is known."""
        if not across.ordinary or not len(across):
            return
        self.step.append((across.share or share_of(across)).mean_ns / NS_PER_MS)
        if not across.counted:
            return
        figures = sorted(across.figures.values(), key=attrgetter("waited_ns"))
        sums = Sums(figures)
        _add_phases(self.phases, sums)
        _add_phases(self.waited_for, Sums(figures[:1]) if figures[0].waited_ns < figures[-1].waited_ns else sums)
        if sums.overlap is not None:
            self.overlap.append(sums.overlap)

    def keep(self, steps: int) -> None:
        """Drops all but the newest steps."""
        for values in (self.step, self.overlap, *self.phases.values(), *self.waited_for.values()):
            del values[:-steps]


def _add_phases(phases: _Phases, sums: Sums) -> None:
    for phase, ns in sums.known_phases_ns.items():
        if sums.measured or phase not in _NEED_COMPLETIONS:
            phases[phase].append(ns / NS_PER_MS)


class Difference(Figures, frozen=True):
    """B against A.

    Attributes:
        a, b: Their names.
        ratio: Step time of B over that of A, less 1: above 0 B is slower.
        low, high: Its confidence interval.
        verdict: ``faster``, ``slower``; ``same`` if no more than a few percent can hide in the noise; ``unclear`` if
            more can; ``unknown`` with too few steps, or where those of A take no time.
        phase: The phase of the step that explains the most of a difference, of the rank that others waited for if
            they only waited; empty if none does.
        overlap: Change of the overlap (0.1 is ten points) if it is beyond chance, with its interval; None if not.
        text: A sentence that says so.
    """

    a: str
    b: str
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    phase: str
    overlap: tuple[float, float, float] | None
    text: str


class SeriesFigures(Figures, frozen=True):
    """A run's column in a comparison: medians over its steps, in ms and as a ratio."""

    name: str
    steps: int
    step_ms_p50: float | None
    phases_ms_p50: Mapping[str, float | None]
    overlap_p50: float | None


class ComparedRun(SeriesFigures, frozen=True):
    """The same of a recording, with what its report says of its mean step, of lost time and incidents."""

    step_ms: float | None
    phases_ms: Mapping[str, float | None]
    overlap: OverlapFigures
    lost: LostFigures
    incidents: Sequence[IncidentFigures]


class AccountChange(Figures, frozen=True):
    """An account of lost time: its share of the rank-time in A and in B, and by how much that differs."""

    account: AccountName
    rank: int | None
    phase: str | None
    a: float
    b: float
    change: float


class IncidentOfOne(Figures, frozen=True):
    """An incident that only one of two runs has."""

    run: str
    kind: Kind
    severity: Severity
    ranks: Sequence[int]
    phase: str | None
    message: str
    share: float | None


class RunDifference(Difference, frozen=True):
    """How a recording differs from the first one, also in lost time and incidents."""

    lost: Sequence[AccountChange]
    incidents: Sequence[IncidentOfOne]


class RunComparison(Figures, frozen=True):
    """Recordings, and how each but the first differs from that."""

    runs: Sequence[ComparedRun]
    differences: Sequence[RunDifference]


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure of B less that of A, with its confidence interval. ``certain``: beyond chance and not negligible."""

    by: float
    low: float
    high: float
    certain: bool


def changes(a: RunSeries, b: RunSeries) -> dict[str, FigureChange | None]:
    """Returns how ``step``, the `PHASES` (ms) and ``overlap`` (a ratio) changed from A to B.

    None with too few steps.
    """
    least = SMALLEST * (p50(a.step) or 0.0)
    found = {"step": _change_of(a.step, b.step, least)}
    found |= {phase: _change_of(*_comparable(a.phases, b.phases, phase), least) for phase in PHASES}
    return {**found, "overlap": _change_of(a.overlap, b.overlap, SMALLEST_OVERLAP)}


def _comparable(a: _Phases, b: _Phases, phase: str) -> tuple[Sequence[float], Sequence[float]]:
    """Returns a phase of both; nothing if it is not the same in both: without known data, ``between`` includes it."""
    if phase == "between" and bool(a["data"]) != bool(b["data"]):
        return (), ()
    return a[phase], b[phase]


def _change_of(a: Sequence[float], b: Sequence[float], least: float) -> FigureChange | None:
    """Returns the change of a mean; None with too few steps. Its bootstrap spread has a closed form."""
    if min(len(a), len(b)) < FEWEST_STEPS:
        return None
    blocks_a, blocks_b = _block_medians(a), _block_medians(b)
    spread = math.sqrt(pvariance(blocks_a) / len(blocks_a) + pvariance(blocks_b) / len(blocks_b))
    by, reach = fmean(blocks_b) - fmean(blocks_a), _reach(spread, min(len(blocks_a), len(blocks_b)))
    return FigureChange(by, by - reach, by + reach, abs(by) >= least and abs(by) > reach)


def setup_of(hello: Hello | None) -> dict[str, str]:
    """Returns what a run ran on, by a rank's introduction; empty without one."""
    if hello is None:
        return {}
    return {
        "script": hello.script,
        "ranks": str(hello.world_size),
        "model": hello.module,
        "parameters": f"{hello.parameters:,}",
        "device": hello.device_name or hello.device_kind,
        "backend": hello.backend,
        "torch": hello.torch,
        "timed by": timed_by(hello.timing_source),
        **{f"ddp {name}": str(value) for name, value in sorted(hello.ddp.items())},
    }


def _other_setup(a: RunSeries, b: RunSeries) -> str:
    """Returns in what two runs differ before they train, as far as both have said it; empty if in nothing."""
    differing = [name for name, value in a.setup.items() if b.setup.get(name, value) != value]
    named = [f"{name} {clean(a.setup[name])} and {clean(b.setup[name])}" for name in differing[:MOST_NAMED]]
    more = f", {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
    return f"; not the same set-up: {', '.join(named)}{more}" if named else ""


def compare(a: RunSeries, b: RunSeries, seed: int = 0) -> Difference:
    """Compares run B with run A."""
    found = _compared(a, b, seed)
    return replace(found, text=found.text + _other_setup(a, b))


def _compared(a: RunSeries, b: RunSeries, seed: int) -> Difference:
    if min(len(a.step), len(b.step)) < FEWEST_STEPS:
        return Difference(a.name, b.name, None, None, None, "unknown", "", None, _too_short(a, b))
    blocks_a, blocks_b = _block_medians(a.step), _block_medians(b.step)
    if not all(blocks_a):
        text = f"steps of {a.name} take no time: no ratio to them"
        return Difference(a.name, b.name, None, None, None, "unknown", "", None, text)
    rng = random.Random(seed)
    found = difference(a, b, _interval(blocks_a, blocks_b, lambda x, y: y / x - 1, rng))
    overlap = _overlap(a, b, rng)
    return replace(found, overlap=overlap, text=found.text + _describe_overlap(a, b, overlap))


def difference(a: RunSeries, b: RunSeries, found: tuple[float, float, float]) -> Difference:
    """Returns what a ratio of their step times and its interval mean, with the phase that explains it."""
    verdict = _verdict(*found)
    phase, because = _because(a, b) if verdict in ("slower", "faster") else ("", "")
    return Difference(a.name, b.name, *found, verdict, phase, None, _describe(a, b, found, verdict) + because)


def _verdict(ratio: float, low: float, high: float) -> str:
    if abs(ratio) >= SMALLEST and (low > 0 or high < 0):
        return "slower" if ratio > 0 else "faster"
    return "same" if max(-low, high) <= TOO_WIDE else "unclear"


def _overlap(a: RunSeries, b: RunSeries, rng: random.Random) -> tuple[float, float, float] | None:
    if min(len(a.overlap), len(b.overlap)) < FEWEST_STEPS:
        return None
    blocks_a, blocks_b = _block_medians(a.overlap), _block_medians(b.overlap)
    change, low, high = _interval(blocks_a, blocks_b, lambda x, y: y - x, rng)
    return (change, low, high) if abs(change) >= SMALLEST_OVERLAP and (low > 0 or high < 0) else None


def figures_of(series: RunSeries) -> SeriesFigures:
    """Returns a run's column in a comparison: medians over the steps, in ms and as a ratio."""
    return SeriesFigures(
        name=series.name,
        steps=len(series.step),
        step_ms_p50=p50(series.step),
        phases_ms_p50={phase: p50(values) for phase, values in series.phases.items()},
        overlap_p50=p50(series.overlap),
    )


def changed_accounts(a: LostFigures, b: LostFigures) -> list[AccountChange]:
    """Returns the accounts of lost time in A or B, by how much their share of the rank-time differs, largest first."""
    shares = [
        {(row.account, row.rank, row.phase): row.share or 0.0 for row in lost.accounts if row.account in LOST}
        for lost in (a, b)
    ]
    found = [(key, shares[0].get(key, 0.0), shares[1].get(key, 0.0)) for key in dict.fromkeys(chain(*shares))]
    rows = [AccountChange(*key, before, after, after - before) for key, before, after in found]
    return sorted(rows, key=lambda row: -abs(row.change))


def changed_incidents(a: ComparedRun, b: ComparedRun) -> list[IncidentOfOne]:
    """Returns the incidents that only one of two runs has: no other has its kind, ranks and phase. Worst first.

    That somebody stopped a run says nothing of how it ran.
    """
    known = [{_identity(row) for row in run.incidents} for run in (a, b)]
    only = [(a, row) for row in a.incidents if _identity(row) not in known[1]]
    only += [(b, row) for row in b.incidents if _identity(row) not in known[0]]
    found = [
        IncidentOfOne(run.name, row.kind, row.severity, row.ranks, row.phase, row.message, row.share)
        for run, row in only
        if row.kind != "stopped"
    ]
    return sorted(found, key=lambda row: (not _ends(row), -(row.share or 0.0)))


def _ends(incident: IncidentOfOne) -> bool:
    return incident.kind in ("hang", "death") and incident.severity == "error"


def only_one_ended(incidents: Sequence[IncidentOfOne]) -> str:
    """Returns which run hung or lost a rank that the other did not, to stand before a verdict; empty if neither."""
    ends = {row.message: row.run for row in incidents if _ends(row)}
    told = [
        f"only {run}: {text}" for text, run in ends.items() if not any(text in more for more in ends if more != text)
    ]
    return f"{'; '.join(told)}; by their steps, " if told else ""


def _identity(incident: IncidentFigures) -> tuple[str, tuple[int, ...], str | None]:
    return incident.kind, tuple(incident.ranks), incident.phase


def _block_medians(values: Sequence[float]) -> list[float]:
    """Returns medians of consecutive blocks, long enough that neighbours are nearly independent."""
    count = max(FEWEST_BLOCKS, min(MOST_BLOCKS, len(values) // STEPS_PER_BLOCK))
    while True:
        edges = [round(block * len(values) / count) for block in range(count + 1)]
        medians = [median(values[start:end]) for start, end in pairwise(edges)]
        if count <= FEWEST_BLOCKS or _autocorrelation(medians) < MOST_AUTOCORRELATION:
            return medians
        count = max(FEWEST_BLOCKS, count * 2 // 3)


def _autocorrelation(values: Sequence[float]) -> float:
    """Correlates each value with the next."""
    centre = fmean(values)
    spread = sum((value - centre) ** 2 for value in values)
    return sum((a - centre) * (b - centre) for a, b in pairwise(values)) / spread if spread else 0.0


def _interval(
    a: Sequence[float], b: Sequence[float], change: Callable[[float, float], float], rng: random.Random
) -> tuple[float, float, float]:
    """Returns the change from A to B, and its interval."""
    resampled = [
        change(fmean(rng.choices(a, k=len(a))), fmean(rng.choices(b, k=len(b)))) for _ in range(RESAMPLES)
    ]  # fmt: skip
    reach = _reach(stdev(resampled), min(len(a), len(b)))
    found = change(fmean(a), fmean(b))
    return found, found - reach, found + reach


def _reach(spread: float, blocks: int) -> float:
    """Returns half the width of the interval: Student's t, and a correction for the few blocks of the bootstrap."""
    return spread * math.sqrt(blocks / (blocks - 1)) * student(CONFIDENCE, blocks - 1)


def _because(a: RunSeries, b: RunSeries) -> tuple[str, str]:
    """Returns the phase that explains a difference, and words for it; both empty if none does.

    Where exposed communication changed about as much, it may be waiting: then whoever the others waited for knows more.
    """
    found = _explaining(a, b, a.phases, b.phases)
    if not found:
        return "", ""
    phase = next(iter(found))
    waits = 4 * abs(found.get("exposed_comm", 0.0)) >= 3 * abs(found[phase])
    name, (before, after) = _PHASE_NAMES[phase], (run.shown.get(phase) or median(run.phases[phase]) for run in (a, b))
    own = next(iter(_explaining(a, b, a.waited_for, b.waited_for)), "exposed_comm")
    if waits and own != "exposed_comm":
        phase, name = own, f"{_PHASE_NAMES[own]} of the rank that others waited for"
        before, after = (median(run.waited_for[own]) for run in (a, b))
    verb = "fell" if after < before else "rose"
    return phase, f", because {name} {verb} from {two_digits(before)} to {two_digits(after)} ms"


def _explaining(a: RunSeries, b: RunSeries, of_a: _Phases, of_b: _Phases) -> dict[str, float]:
    """Returns by how much phases changed with the step: those by a third of its change or more, the largest first."""
    change = _change(a.step, b.step)
    changes = {phase: _change(*series) for phase in PHASES if all(series := _comparable(of_a, of_b, phase))}
    found = [(phase, by) for phase, by in changes.items() if by * change > 0 and 3 * abs(by) >= abs(change)]
    return dict(sorted(found, key=lambda item: -abs(item[1])))


def _change(a: Sequence[float], b: Sequence[float]) -> float:
    return median(b) - median(a)


def _describe(a: RunSeries, b: RunSeries, found: tuple[float, float, float], verdict: str) -> str:
    ratio, low, high = (round(100 * value, 1) + 0.0 for value in found)  # + 0.0: no difference has no sign
    between = f"between {a.name} and {b.name}"
    interval = f"{ratio:+.1f} %, {low:+.1f} to {high:+.1f}"
    if verdict == "same":
        return f"no difference {between} ({interval})"
    if verdict == "unclear":
        hidden = f"up to {max(-low, high):.0f} %"
        return f"no difference {between} beyond chance ({interval}), but {hidden} could hide in the noise"
    ends = sorted((abs(low), abs(high)))
    return f"{b.name} is {abs(ratio):.1f} % {verdict} than {a.name} ({ends[0]:.1f} to {ends[1]:.1f})"


def _describe_overlap(a: RunSeries, b: RunSeries, overlap: tuple[float, float, float] | None) -> str:
    if overlap is None:
        return ""
    change, low, high = overlap
    verb = "rose" if change > 0 else "fell"
    name, before, after = "overlap", a.shown_overlap, b.shown_overlap
    if before is None or after is None or not low <= after - before <= high:
        name, before, after = "median overlap", median(a.overlap), median(b.overlap)
    return f"; {name} {verb} from {before:.0%} to {after:.0%} ({100 * low:+.0f} to {100 * high:+.0f} points)"


def _too_short(a: RunSeries, b: RunSeries) -> str:
    short = min((a, b), key=lambda series: len(series.step))
    return f"{short.name} has {len(short.step)} steps to compare; {FEWEST_STEPS} are needed"
