"""The one statistic for time: means over the same rank-steps, which therefore add up.

Every view, line and report takes its step time, phases, communication, exposed time and overlap from here, so that what
bears the same name has the same value. ``docs/metrics.md`` says which rank-steps these are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import NamedTuple, TypeVar

from ddpwatch.analysis.step import PHASES, StepFigures

STARTING_STEPS = 12  # of a process: it still settles its buckets, its caches and its memory
ENOUGH_FULL = 3  # full steps after these, to do without them
MOST_PENDING = 16
_Name = TypeVar("_Name")


class Sums:
    """Sums over rank-steps, and the means that follow. Times in ns; None without a rank-step, or if not measured."""

    __slots__ = ("_comm", "_count", "_data_unseen", "_exposed", "_pending", "_phases", "_step", "_unmeasured")

    def __init__(self, figures: Iterable[StepFigures] = ()) -> None:
        self._count = self._step = self._comm = self._exposed = self._data_unseen = self._unmeasured = 0
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
        for phase, ns in other._phases.items():
            self._phases[phase] += ns

    def _add_pending(self) -> None:
        if not self._pending:
            return
        steps, phases, comm, exposed, *_ = zip(*self._pending, strict=True)
        self._count += len(steps)
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
    """Returns the kinds whose rank-steps the means are over.

    These are the full steps of all ranks, without the first ones if there are enough others; every watched step where
    no full step is measured.

    Args:
        steps: How many there are of each kind.
    """
    candidates = {kind for kind in steps if kind.measured} or set(steps)
    most = max((kind.ranks for kind in candidates), default=0)
    candidates = {kind for kind in candidates if kind.ranks == most}
    settled = {kind for kind in candidates if not kind.starting}
    return settled if sum(steps[kind] for kind in settled) >= ENOUGH_FULL else candidates


class MeanBuilder:
    """Collects the means of a run and of each rank; its memory grows with the ranks only."""

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

    def ranks(self) -> dict[int, Sums]:
        """Returns those of each rank, over the chosen steps."""
        found: dict[int, Sums] = {}
        for kind in chosen(self._steps):
            for rank, sums in self._ranks[kind].items():
                found.setdefault(rank, Sums()).merge(sums)
        return found

    @property
    def steps(self) -> int:
        """How many steps the means are over."""
        return sum(self._steps[kind] for kind in chosen(self._steps))


def summed(rows: Sequence[Mapping[_Name, int]]) -> dict[_Name, int]:
    """Returns the sum of each column. Mostly all rows have the same columns."""
    names = list(rows[0]) if rows else []
    if False not in [list(row) == names for row in rows]:
        return dict(zip(names, map(sum, zip(*[row.values() for row in rows], strict=True)), strict=True))
    every = dict.fromkeys(chain.from_iterable(rows))
    return {name: sum([row.get(name, 0) for row in rows]) for name in every}


def merged(several: Iterable[Sums]) -> Sums:
    """Returns all of them together."""
    total = Sums()
    for sums in several:
        total.merge(sums)
    return total
