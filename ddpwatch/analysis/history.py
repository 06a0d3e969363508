"""Compares runs of one script over time: from which one on is it slower, beyond what runs differ by anyway?

Each run is one value: the median time of its steps. Two starts of one job differ by more than chance within them, so
what counts is how runs of one level differ from each other. Runs are split in two where Student's t of the two parts is
greatest, if that is beyond chance for so many places to split at (Bonferroni), and so is each part. The newest run can
be a part by itself; a single one that others follow is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

import msgspec
from msgspec.structs import replace

from ddpwatch.analysis.block_means import CONFIDENCE, FEWEST_STEPS
from ddpwatch.analysis.compare import Difference, RunSeries, difference
from ddpwatch.analysis.diagnosis.incident_json import Figures
from ddpwatch.analysis.figures import RunTime, ThroughputFigures
from ddpwatch.common.statistics import student
from ddpwatch.common.text import percent

FEWEST_RUNS = 4
FEWEST_BEFORE = 2  # of them
TINY = 1e-9


class PastRun(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of one recording.

    Attributes:
        run: Its id.
        started: When its first frame was received (s since the Unix epoch).
        commit: What was checked out where the job ran; empty if the recording does not know.
        step_ms, phases_ms: Medians over its steps.
        lost: Share of the rank-time.
        worst: The incident that cost most; empty if there was none.
        previous: The run that the job was before; empty if there was none.
        time: Where the rank-time went; None if no step was recorded.
        throughput: What it got done; None if nothing was counted.
    """

    path: str
    run: str
    started: float
    script: str
    ranks: int
    device: str
    parameters: int
    commit: str
    steps: int
    step_ms: float | None
    phases_ms: Mapping[str, float | None]
    lost: float | None
    worst: str
    previous: str = ""
    time: RunTime | None = None
    throughput: ThroughputFigures | None = None

    def setup(self) -> tuple[str, int, str, int]:
        """Returns what runs have in common that can be compared."""
        return self.script, self.ranks, self.device, self.parameters


class RunHistory(Figures, frozen=True):
    """The runs of one script with one setup, oldest first.

    Attributes:
        changes: How each level differs from the one before; ``b`` is the path of its first run.
        verdict: Of the newest level: as `Difference.verdict`.
        text: A sentence on it.
    """

    script: str
    ranks: int
    device: str
    parameters: int
    runs: Sequence[PastRun]
    changes: Sequence[Difference]
    verdict: str
    text: str


def histories(summaries: Iterable[PastRun]) -> list[RunHistory]:
    """Returns the history of each script and setup, the one with the newest run last.

    Of several recordings of a run, the one with the most steps counts.
    """
    longest = {one.run: one for one in sorted(summaries, key=lambda one: one.steps)}
    by_setup: dict[tuple[str, int, str, int], list[PastRun]] = {}
    for one in sorted(longest.values(), key=lambda one: one.started):
        by_setup.setdefault(one.setup(), []).append(one)
    found = [_history(runs) for runs in by_setup.values()]
    return sorted(found, key=lambda history: history.runs[-1].started)


def _history(runs: Sequence[PastRun]) -> RunHistory:
    timed = [run for run in runs if run.step_ms is not None]
    levels = _levels(timed)
    changes = [_change(before, after, len(timed)) for before, after in pairwise(levels)]
    if changes:
        verdict, text = changes[-1].verdict, changes[-1].text
    elif len(timed) < FEWEST_RUNS:
        few = f"{len(timed)} runs to compare; {FEWEST_RUNS} are needed, of {FEWEST_STEPS} steps each"
        verdict, text = "unknown", few
    else:
        spread, _ = _spread(timed)
        verdict, text = "same", f"no run is faster or slower beyond what runs differ by ({percent(spread, 1)})"
    return RunHistory(*runs[0].setup(), runs, changes, verdict, text)


def _levels(runs: Sequence[PastRun]) -> list[Sequence[PastRun]]:
    """Splits runs into levels."""
    places = range(FEWEST_BEFORE, len(runs))
    if len(runs) < FEWEST_RUNS:
        return [runs]
    place = max(places, key=lambda place: _student_t(runs[:place], runs[place:]))
    before, after = runs[:place], runs[place:]
    if _change(before, after, len(runs)).verdict not in ("slower", "faster"):
        return [runs]
    return [*_levels(before), *_levels(after)]


def _student_t(before: Sequence[PastRun], after: Sequence[PastRun]) -> float:
    spread, _ = _spread(before, after)
    change = _mean_ms(after) / _mean_ms(before) - 1
    return abs(change) / max(spread * math.sqrt(1 / len(before) + 1 / len(after)), TINY)


def _spread(*levels: Sequence[PastRun]) -> tuple[float, int]:
    """Returns what runs of one level differ by, as a share of its mean, and the degrees of freedom."""
    squares = sum(((run.step_ms or 0.0) / _mean_ms(runs) - 1) ** 2 for runs in levels for run in runs)
    freedom = sum(len(runs) - 1 for runs in levels)
    return math.sqrt(squares / freedom), freedom


def _mean_ms(runs: Sequence[PastRun]) -> float:
    return fmean(run.step_ms or 0.0 for run in runs)


def _change(before: Sequence[PastRun], after: Sequence[PastRun], runs: int) -> Difference:
    """Compares a level with the one before, given how many runs they were found among."""
    a, b = _series(f"the {len(before)} runs before", before), _series(_named(after), after)
    (spread, freedom), ratio = _spread(before, after), _mean_ms(after) / _mean_ms(before) - 1
    confidence = 1 - (1 - CONFIDENCE) / max(1, runs - FEWEST_BEFORE)
    reach = student(confidence, freedom) * spread * math.sqrt(1 / len(before) + 1 / len(after))
    return replace(difference(a, b, (ratio, ratio - reach, ratio + reach)), b=after[0].path)


def _series(name: str, runs: Sequence[PastRun]) -> RunSeries:
    """Returns runs as if each were a step of one."""
    series = RunSeries(name, [run.step_ms for run in runs if run.step_ms is not None])
    for phase, values in series.phases.items():
        values += [ms for run in runs if (ms := run.phases_ms.get(phase)) is not None]
    return series


def _named(runs: Sequence[PastRun]) -> str:
    name = runs[0].path.rpartition("/")[2].removesuffix(".mcap")
    named = f"{name} (commit {runs[0].commit})" if runs[0].commit else name
    return f"each run from {named} on" if len(runs) > 1 else named
