"""Compares runs: is one slower than the other beyond chance, and because of which phase of the step?

What is compared is the mean of all steps, which is what a run takes: a median would not see what happens every
twentieth step. A step's time is the mean over its ranks, which synchronised training keeps together. The interval is
that of `ddpwatch.analysis.block_means`. It covers what varies *within* the runs. Two starts of one job can differ by
more, so a difference below `SMALLEST` is never reported as one. Where the median step says something else, a sentence
adds that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from statistics import fmean, median

from msgspec.structs import replace

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.block_means import FEWEST_STEPS, ratio_of_means, reach_of_change
from ddpwatch.analysis.diagnosis.incident import LOST, AccountName, Severity
from ddpwatch.analysis.diagnosis.incident_json import Figures, IncidentFigures, LostFigures
from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.analysis.diagnosis.words.account_names import timed_by
from ddpwatch.analysis.digest import share_of
from ddpwatch.analysis.figures import OverlapFigures
from ddpwatch.analysis.means import Sums
from ddpwatch.analysis.step import PHASES
from ddpwatch.common.statistics import p50
from ddpwatch.common.text import clean, three_digits, two_digits
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.wire.messages import Hello

SMALLEST = 0.01  # of the step time
SMALLEST_OVERLAP = 0.02
TOO_WIDE = 0.05  # with an interval wider than this to either side, runs are not reported as equal
LONG = 2.0  # of the median: the steps beyond are counted
DIFFERENT = ("slower", "faster")
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
        shown: Means of the phases over all steps (ms), as pages show them; those of these steps where it is empty.
        shown_overlap: That of all steps, as pages show it.
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

    @property
    def known_phases(self) -> _Phases:
        """The phases of each step, without those of which no page shows a mean."""
        unknown = [phase for phase, mean in self.shown.items() if mean is None]
        return {**self.phases, **{phase: [] for phase in unknown}}

    def mean_of(self, phase: str) -> float:
        """Returns the mean of a phase, one figure for the table, the cause and the change (ms)."""
        shown = self.shown.get(phase)
        return fmean(self.phases[phase]) if shown is None else shown

    @property
    def mean_overlap(self) -> float:
        """The mean overlap, one figure for the table and the change."""
        return fmean(self.overlap) if self.shown_overlap is None else self.shown_overlap

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
        ratio: Mean step of B over that of A, less 1: above 0 B is slower.
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
    """A run's medians over its steps, in ms and as a ratio."""

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
    found: dict[str, FigureChange | None] = dict.fromkeys(("step", *PHASES, "overlap"))
    step = ratio_of_means(a.step, b.step)
    if step is None:
        return found
    mean = fmean(a.step)
    by, low, high = (mean * value for value in step)
    found["step"] = FigureChange(by, low, high, _verdict(*step) in DIFFERENT)
    for phase in _in_both(a.known_phases, b.known_phases):
        found[phase] = _change_of(a.phases[phase], b.phases[phase], _phase_change(a, b, phase), SMALLEST * mean)
    if a.overlap and b.overlap:
        found["overlap"] = _change_of(a.overlap, b.overlap, b.mean_overlap - a.mean_overlap, SMALLEST_OVERLAP)
    return found


def _in_both(a: _Phases, b: _Phases) -> list[str]:
    """Returns the phases known of both. Without known data, ``between`` includes it, and is not the same in both."""
    other_gap = bool(a["data"]) != bool(b["data"])
    return [phase for phase in PHASES if a[phase] and b[phase] and not (other_gap and phase == "between")]


def _phase_change(a: RunSeries, b: RunSeries, phase: str) -> float:
    return b.mean_of(phase) - a.mean_of(phase)


def _change_of(a: Sequence[float], b: Sequence[float], by: float, least: float) -> FigureChange | None:
    """Returns a change with the interval that these steps give it; None with too few of them."""
    if min(len(a), len(b)) < FEWEST_STEPS:
        return None
    reach = reach_of_change(a, b)
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


def compare(a: RunSeries, b: RunSeries) -> Difference:
    """Compares run B with run A."""
    found = _compared(a, b)
    return replace(found, text=found.text + _other_setup(a, b))


def _compared(a: RunSeries, b: RunSeries) -> Difference:
    if min(len(a.step), len(b.step)) < FEWEST_STEPS:
        return Difference(a.name, b.name, None, None, None, "unknown", "", None, _too_short(a, b))
    ratio = ratio_of_means(a.step, b.step)
    if ratio is None:
        text = f"steps of {a.name} take no time: no ratio to them"
        return Difference(a.name, b.name, None, None, None, "unknown", "", None, text)
    found, overlap = difference(a, b, ratio), _overlap(a, b)
    return replace(found, overlap=overlap, text=found.text + _typical(a, b, ratio) + _describe_overlap(a, b, overlap))


def difference(a: RunSeries, b: RunSeries, found: tuple[float, float, float]) -> Difference:
    """Returns what a ratio of their step times and its interval mean, with the phase that explains it."""
    verdict = _verdict(*found)
    phase, because = _because(a, b) if verdict in DIFFERENT else ("", "")
    return Difference(a.name, b.name, *found, verdict, phase, None, _describe(a, b, found, verdict) + because)


def _verdict(ratio: float, low: float, high: float) -> str:
    if abs(ratio) >= SMALLEST and (low > 0 or high < 0):
        return "slower" if ratio > 0 else "faster"
    return "same" if max(-low, high) <= TOO_WIDE else "unclear"


def _overlap(a: RunSeries, b: RunSeries) -> tuple[float, float, float] | None:
    found = changes(a, b)["overlap"]
    return (found.by, found.low, found.high) if found is not None and found.certain else None


def figures_of(series: RunSeries) -> SeriesFigures:
    """Returns a run's medians over its steps, in ms and as a ratio."""
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


def _because(a: RunSeries, b: RunSeries) -> tuple[str, str]:
    """Returns the phase that explains most of a difference, and words for it; both empty if none does.

    Where it changed more on the rank that others waited for than on all, the rest is their waiting: then that rank's
    figures count.
    """
    of_all = {phase: _phase_change(a, b, phase) for phase in _in_both(a.known_phases, b.known_phases)}
    of_one = {phase: _mean_change(a, b, phase) for phase in _in_both(a.waited_for, b.waited_for)}
    phase, own = _explaining(a, b, of_all), _explaining(a, b, of_one)
    if own not in ("", "exposed_comm") and 4 * abs(of_all.get(own, 0.0)) < 3 * abs(of_one[own]):
        phase, name = own, f"{_PHASE_NAMES[own]} of the rank that others waited for"
        before, after = (fmean(run.waited_for[own]) for run in (a, b))
    elif phase:
        name, before, after = _PHASE_NAMES[phase], a.mean_of(phase), b.mean_of(phase)
    else:
        return "", ""
    verb = "fell" if after < before else "rose"
    return phase, f", because {name} {verb} from {two_digits(before)} to {two_digits(after)} ms"


def _mean_change(a: RunSeries, b: RunSeries, phase: str) -> float:
    return fmean(b.waited_for[phase]) - fmean(a.waited_for[phase])


def _explaining(a: RunSeries, b: RunSeries, changed: Mapping[str, float]) -> str:
    """Returns the phase that changed most with the step, by a third of its change or more; empty if none did."""
    change = fmean(b.step) - fmean(a.step)
    found = {phase: abs(by) for phase, by in changed.items() if by * change > 0 and 3 * abs(by) >= abs(change)}
    return max(found, key=lambda phase: found[phase], default="")


def _describe(a: RunSeries, b: RunSeries, found: tuple[float, float, float], verdict: str) -> str:
    ratio, low, high = (round(100 * value, 1) + 0.0 for value in found)  # + 0.0: no difference has no sign
    between = f"between {a.name} and {b.name}"
    interval = f"{ratio:+.1f} %, {low:+.1f} to {high:+.1f}"
    if verdict == "same":
        return f"no difference {between} ({interval})"
    if verdict == "unclear":
        hidden = f"up to {max(-low, high):.0f} % could hide in the noise"
        return f"unclear whether {b.name} is slower or faster than {a.name} ({interval}): {hidden}"
    ends = sorted((abs(low), abs(high)))
    return f"{b.name} is {abs(ratio):.1f} % {verdict} than {a.name} ({ends[0]:.1f} to {ends[1]:.1f})"


def _typical(a: RunSeries, b: RunSeries, of_means: tuple[float, float, float]) -> str:
    """Returns what the median step says, where that is something else, and which long steps make the difference."""
    of_medians = ratio_of_means(a.step, b.step, median)
    if of_medians is None or of_means[0] <= -1:  # steps of no length
        return ""
    verdict, apart = _verdict(*of_medians), abs((1 + of_medians[0]) / (1 + of_means[0]) - 1)
    if apart < TOO_WIDE and (verdict not in DIFFERENT or verdict == _verdict(*of_means)):
        return ""
    by = f"{abs(of_medians[0]):.1%} {'longer' if of_medians[0] > 0 else 'less'}".replace("%", " %")
    takes = "as long" if verdict == "same" else by
    medians = f"{three_digits(median(a.step))} and {three_digits(median(b.step))} ms"
    return f"; the median step takes {takes} ({medians}){_long_steps(a, b)}"


def _long_steps(a: RunSeries, b: RunSeries) -> str:
    """Returns how many steps of the slower run are so long that they make most of the difference; empty if none."""
    quick, slow = sorted((a, b), key=lambda run: fmean(run.step))
    limit = LONG * median(slow.step)
    long = [ms for ms in slow.step if ms > limit]
    beyond = [sum(ms - median(run.step) for ms in run.step if ms > limit) / len(run.step) for run in (quick, slow)]
    if not long or 2 * (beyond[1] - beyond[0]) < fmean(slow.step) - fmean(quick.step):
        return ""
    return f", but {len(long)} of {len(slow.step)} steps of {slow.name} take {three_digits(fmean(long))} ms"


def _describe_overlap(a: RunSeries, b: RunSeries, overlap: tuple[float, float, float] | None) -> str:
    if overlap is None:
        return ""
    change, low, high = overlap
    verb = "rose" if change > 0 else "fell"
    ends = f"{100 * low:+.0f} to {100 * high:+.0f} points"
    return f"; overlap {verb} from {a.mean_overlap:.0%} to {b.mean_overlap:.0%} ({ends})"


def _too_short(a: RunSeries, b: RunSeries) -> str:
    short = min((a, b), key=lambda series: len(series.step))
    return f"{short.name} has {len(short.step)} steps to compare; {FEWEST_STEPS} are needed"
