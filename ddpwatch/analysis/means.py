"""Means over the rank-steps that show a figure: per step, and of a rank beside those of all ranks.

``ddpwatch.analysis.estimate`` makes of them what holds for all steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from math import inf
from typing import NamedTuple, TypeVar

from ddpwatch.analysis.step import PHASES, StepFigures

STARTING_STEPS = 12  # of a process: it still settles its buckets, its caches and its memory
ENOUGH_FULL = 3  # full steps, for a figure that only they have
MOST_PENDING = 16
_Name = TypeVar("_Name")


class Sums:
    """Sums over rank-steps, and the means that follow. Times in ns; None without a rank-step, or if not measured."""

    __slots__ = (
        "_comm", "_count", "_data_unseen", "_exposed", "_pending", "_phases", "_step", "_unmeasured", "_waited",
    )  # fmt: skip

    def __init__(self, figures: Iterable[StepFigures] = ()) -> None:
        self._count = self._step = self._comm = self._exposed = self._data_unseen = self._unmeasured = self._waited = 0
        self._phases = dict.fromkeys(PHASES, 0)
        self._pending = list(figures)  # not in the sums yet: columns are summed faster

    def add_figures(self, figure: StepFigures) -> None:
        """Adds one watched rank-step."""
        self._pending.append(figure)
        if len(self._pending) >= MOST_PENDING:
            self._add_pending()

    def merge(self, other: Sums) -> None:
        """Adds the rank-steps of other sums."""
        self._count += other.count
        self._step += other._step
        self._comm += other._comm
        self._exposed += other._exposed
        self._data_unseen += other._data_unseen
        self._unmeasured += other._unmeasured
        self._waited += other._waited
        for phase, ns in other._phases.items():
            self._phases[phase] += ns

    def _add_pending(self) -> None:
        if not self._pending:
            return
        steps, phases, comm, exposed, *_, waited = zip(*self._pending, strict=True)
        self._count += len(steps)
        self._waited += sum(waited)
        self._step += sum(steps)
        for phase, ns in summed(phases).items():
            self._phases[phase] += ns
        self._data_unseen += ["data" in row for row in phases].count(False)
        measured = [None not in both for both in zip(comm, exposed, strict=True)]
        self._unmeasured += measured.count(False)
        self._comm += sum(compress(comm, measured))
        self._exposed += sum(compress(exposed, measured))
        self._pending.clear()

    @property
    def count(self) -> int:
        """How many rank-steps."""
        self._add_pending()
        return self._count

    @property
    def measured(self) -> bool:
        """Whether every completion was measured."""
        self._add_pending()
        return not self._unmeasured

    @property
    def step_ns(self) -> float | None:
        """The mean step."""
        return self._step / self.count if self.count else None

    @property
    def phases_ns(self) -> dict[str, float | None]:
        """The mean of each phase. ``data`` is only known if it is in every rank-step; otherwise ``between`` has it."""
        if not self.count:
            return dict.fromkeys(PHASES)
        found: dict[str, float | None] = {phase: ns / self.count for phase, ns in self._phases.items()}
        if self._data_unseen:
            found |= {"data": None, "between": (self._phases["data"] + self._phases["between"]) / self.count}
        return found

    @property
    def known_phases_ns(self) -> dict[str, float]:
        """Those of them that are known; they add up to the mean step."""
        return {phase: ns for phase, ns in self.phases_ns.items() if ns is not None}

    @property
    def comm_ns(self) -> float | None:
        """The mean communication."""
        return self._comm / self.count if self.count and self.measured else None

    @property
    def exposed_ns(self) -> float | None:
        """The mean of what communication adds to a step."""
        return self._exposed / self.count if self.count and self.measured else None

    @property
    def waited_ns(self) -> float:
        """The mean of what ranks waited for collectives, of at least one rank-step."""
        return self._waited / self.count

    @property
    def overlap(self) -> float | None:
        """The share of all communication that was hidden; None without any."""
        return (self._comm - self._exposed) / self._comm if self.measured and self._comm else None


class Kind(NamedTuple):
    """What decides whether a step is among those that means are over.

    Attributes:
        ranks: How many ranks have sent it.
        measured: Whether every completion was measured, on each of them.
        starting: Whether it is one of the first steps.
    """

    ranks: int
    measured: bool
    starting: bool


def kind_of(step: int, figures: Collection[StepFigures]) -> Kind:
    """Returns the kind of the step with that number, of which the ranks have these figures."""
    return Kind(len(figures), None not in [figure.comm_ns for figure in figures], step < STARTING_STEPS)


def chosen(steps: Mapping[Kind, int]) -> set[Kind]:
    """Returns the kinds whose rank-steps show how ranks differ.

    These are the steps of all ranks, without the first ones if there are enough others.

    Args:
        steps: How many there are of each kind.
    """
    most = max((kind.ranks for kind in steps), default=0)
    candidates = {kind for kind in steps if kind.ranks == most}
    settled = {kind for kind in candidates if not kind.starting}
    timed = {kind for kind in candidates if kind.measured}
    return settled if sum(steps[kind] for kind in settled & (timed or settled)) >= ENOUGH_FULL else candidates


@dataclass(frozen=True, slots=True)
class Means:
    """Mean figures of a rank, or of all ranks (ns); None if not known. ``phases_ns`` has the known ones."""

    step_ns: float | None = None
    phases_ns: Mapping[str, float] = field(default_factory=dict)
    comm_ns: float | None = None
    exposed_ns: float | None = None

    @property
    def overlap(self) -> float | None:
        """The share of the communication that is hidden; None without any."""
        return 1 - self.exposed_ns / self.comm_ns if self.comm_ns and self.exposed_ns is not None else None


@dataclass(slots=True)
class Known:
    """The rank-steps that show phases, and those that show communication as well."""

    watched: Sums = field(default_factory=Sums)
    full: Sums = field(default_factory=Sums)

    def merge(self, other: Known) -> None:
        """Adds the rank-steps of another."""
        self.watched.merge(other.watched)
        self.full.merge(other.full)

    def means(self) -> Means:
        """Returns their means.

        Exposed communication is what ranks waited in all steps, corrected by the difference that full ones show.
        """
        watched, full = self.watched, self.full
        if not watched.count:
            return Means()
        phases = watched.known_phases_ns
        if full.exposed_ns is None or full.comm_ns is None:
            return Means(watched.step_ns, with_exposed(phases, watched.waited_ns))
        exposed = max(0.0, watched.waited_ns + full.exposed_ns - full.waited_ns)
        return Means(watched.step_ns, with_exposed(phases, exposed), exposed + full.comm_ns - full.exposed_ns, exposed)


def with_exposed(phases: Mapping[str, float], exposed: float) -> dict[str, float]:
    """Returns the phases with that much exposed communication: their sum stays.

    What it differs by is in "other", as far as that has it, and else a part of each phase.
    """
    other = phases["other"] + phases["exposed_comm"] - exposed
    moved = {**phases, "other": max(other, 0.0)}
    del moved["exposed_comm"]
    if other < 0:
        scale = 1 + other / (sum(moved.values()) or inf)
        moved = {phase: ns * scale for phase, ns in moved.items()}
    return moved | {"exposed_comm": exposed}


def share_of_run(step: float, own: Means, every: Means, run: Means, alone: float = 0.0) -> Means:
    """Returns a rank's means for all steps: communication averages to the run's, the phases add up to the rank's step.

    Args:
        step: The rank's mean step.
        own: What the known steps show of the rank.
        every: What they show of all ranks together.
        run: Of all ranks and steps.
        alone: What the rank paused alone before a mean step.
    """
    means = _in_step(step, own, every, run)
    if not alone:
        return means
    phases = means.phases_ns and {**means.phases_ns, "between": means.phases_ns.get("between", 0.0) + alone}
    return replace(means, step_ns=step + alone, phases_ns=phases)


def _in_step(step: float, own: Means, every: Means, run: Means) -> Means:
    exposed = _part(own.exposed_ns, every.exposed_ns, run.exposed_ns)
    hidden = _part(_hidden(own), _hidden(every), _hidden(run))
    if exposed is None or hidden is None:
        scale = _ratio(step, own.step_ns or 0.0)
        return Means(step, {phase: ns * scale for phase, ns in own.phases_ns.items()})
    exposed = min(exposed, step)
    scale = _ratio(step - exposed, (own.step_ns or 0.0) - (own.exposed_ns or 0.0))
    phases = {phase: ns * scale for phase, ns in own.phases_ns.items()} | {"exposed_comm": exposed}
    return Means(step, phases, exposed + hidden, exposed)


def _hidden(means: Means) -> float | None:
    return None if means.comm_ns is None or means.exposed_ns is None else means.comm_ns - means.exposed_ns


def _part(own: float | None, every: float | None, run: float | None) -> float | None:
    return None if own is None or every is None or run is None else own * _ratio(run, every)


def _ratio(run: float, every: float) -> float:
    return run / every if every else 0.0


class MeanBuilder:
    """Collects what the known steps show of each rank; its memory grows with the ranks only."""

    def __init__(self) -> None:
        self._steps: Counter[Kind] = Counter()
        self._ranks: dict[Kind, dict[int, Sums]] = {}

    def add_step(self, step: int, figures: Mapping[int, StepFigures]) -> None:
        """Adds one step that counts, as the ranks saw it."""
        kind = kind_of(step, figures.values())
        self._steps[kind] += 1
        ranks = self._ranks.setdefault(kind, {})
        for rank, figure in figures.items():
            sums = ranks.get(rank)
            if sums is None:
                sums = ranks[rank] = Sums()
            sums.add_figures(figure)

    def ranks(self) -> dict[int, Known]:
        """Returns those of each rank, over the chosen steps."""
        found: dict[int, Known] = {}
        for kind in chosen(self._steps):
            for rank, sums in self._ranks[kind].items():
                known = found.setdefault(rank, Known())
                known.watched.merge(sums)
                if kind.measured:
                    known.full.merge(sums)
        return found


def summed(rows: Sequence[Mapping[_Name, int]]) -> dict[_Name, int]:
    """Returns the sum of each column. Mostly all rows have the same columns."""
    names = list(rows[0]) if rows else []
    if False not in [list(row) == names for row in rows]:
        return dict(zip(names, map(sum, zip(*[row.values() for row in rows], strict=True)), strict=True))
    every = dict.fromkeys(chain.from_iterable(rows))
    return {name: sum([row.get(name, 0) for row in rows]) for name in every}


def merged(several: Iterable[Known]) -> Known:
    """Returns all of them together."""
    total = Known()
    for known in several:
        total.merge(known)
    return total
