"""Compares runs of one script over time: which one is slower than those before it, beyond what they differ by anyway?

Each run is one value: the median time of its steps. Two starts of one job differ by more than chance within them, so
what counts is how runs of one level differ from each other. A run that leaves its level alone is a stray; a second one
in a row makes a new level, with which later runs are compared. The last run is judged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import msgspec
from msgspec.structs import replace

from ddpwatch.analysis.compare import CONFIDENCE, FEWEST_STEPS, Difference, RunSeries, difference
from ddpwatch.analysis.diagnosis.incident_json import Figures
from ddpwatch.common.statistics import student
from ddpwatch.common.text import percent

FEWEST_RUNS = 3  # before a run, for what they differ by


class PastRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a recording.

    Attributes:
        run: Its id.
        started: When its first frame was received (s since the Unix epoch).
        commit: What was checked out where the job ran; empty if the recording does not know.
        step_ms, phases_ms: Medians over its steps.
        step_error_ms: Standard error of ``step_ms``, from blocks of steps.
        lost: Share of the rank-time.
        worst: The incident that cost most; empty if there was none.
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
    step_error_ms: float | None
    phases_ms: Mapping[str, float | None]
    lost: float | None
    worst: str

    def setup(self) -> tuple[str, int, str, int]:
        """Returns what runs have in common that can be compared."""
        return self.script, self.ranks, self.device, self.parameters


class RunHistory(Figures, frozen=True):
    """The runs of one script with one setup, oldest first.

    Attributes:
        changes: Runs that are faster or slower than those before them; ``b`` is the path.
        verdict: Of the newest run: as `Difference.verdict`.
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
    levels = _Levels()
    verdicts = [levels.add_run(run) for run in runs]
    changes = levels.changes()
    latest = changes[-1] if changes else None
    text = latest.text if latest is not None else _without_change(runs, levels)
    return RunHistory(*runs[0].setup(), runs, changes, verdicts[-1], text)


def _without_change(runs: Sequence[PastRun], levels: _Levels) -> str:
    if runs[-1].step_ms is None:
        return f"the newest run has {runs[-1].steps} steps; {FEWEST_STEPS} are needed"
    timed = sum(run.step_ms is not None for run in runs)
    if (spread := levels.spread()) is None or timed <= FEWEST_RUNS:
        return f"{timed} runs to compare; {FEWEST_RUNS + 1} are needed"
    return f"no run is faster or slower beyond what runs differ by ({percent(spread[0], 1)})"


@dataclass
class _Levels:
    """Levels of the step time, the newest of which the next run is compared with.

    Attributes:
        ended: Levels that were left, oldest first.
        level: Runs that do not differ beyond chance.
        stray: The newest run, if it leaves the level.
    """

    ended: list[list[PastRun]] = field(default_factory=list)
    level: list[PastRun] = field(default_factory=list)
    stray: PastRun | None = None
    _verdict: str = "unknown"

    def add_run(self, run: PastRun) -> str:
        """Takes the next run; returns how it differs from the level."""
        if run.step_ms is None:
            return "unknown"
        before, self._verdict = self._verdict, self._change(self.level, [run]).verdict
        if self._verdict not in ("slower", "faster"):
            self.level.append(run)
            self.stray = None
        elif self.stray is not None and before == self._verdict:
            self.ended.append(self.level)
            self.level, self.stray = [self.stray, run], None
        else:
            self.stray = run
        return self._verdict

    def changes(self) -> list[Difference]:
        """Returns how each level differs from the one before, and the newest run from its level."""
        after = [*self.ended, self.level, *([[self.stray]] if self.stray is not None else [])]
        return [self._change(*pair) for pair in pairwise(after)]

    def spread(self) -> tuple[float, int] | None:
        """Returns what runs of one level differ by, as a share, and its degrees of freedom; None if not known."""
        levels = [_series("", runs).step for runs in (*self.ended, self.level) if runs]
        freedom = sum(len(steps) - 1 for steps in levels)
        squares = sum((ms / fmean(steps) - 1) ** 2 for steps in levels for ms in steps)
        return (math.sqrt(squares / freedom), freedom) if freedom >= FEWEST_RUNS - 1 else None

    def _change(self, before: Sequence[PastRun], after: Sequence[PastRun]) -> Difference:
        """Compares runs with the ones before them. The interval is Student's."""
        a, b = _series(f"the {len(before)} runs before", before), _series(_named(after), after)
        if (known := self.spread()) is None:
            return Difference(
                a.name, after[0].path, None, None, None, "unknown", "", None, "too few runs to compare with"
            )
        (spread, freedom), level = known, fmean(a.step)
        own = max(spread, *(error / level for run in after if (error := run.step_error_ms) is not None))
        chance = math.hypot(spread / math.sqrt(len(before)), own / math.sqrt(len(after)))
        ratio, reach = fmean(b.step) / level - 1, student(CONFIDENCE, freedom) * chance
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
