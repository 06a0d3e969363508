"""What watching costs the job, by comparing full steps with the shadow steps beside them.

A shadow step leaves the collectives alone (`ddpwatch.probe.pace`). The two kinds lie side by side in one run, so a step
of one kind is set against its two neighbours of the other: what is different in the CPU time of the rank's process is
what seeing the collectives took. CPU time, because a step's duration also holds what other ranks and the network did.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil, floor, sqrt
from statistics import median

from ddpwatch.messages import Step

PAIRS = 2048
ENOUGH_PAIRS = 8
STEPS = 512  # that share and median are taken over


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching costs, as a share of the step.

    Attributes:
        ratio: (Median difference × share of full steps + what the hooks see of themselves in a shadow) / median step.
        low, high: 95 % interval of that, from the order statistics of the differences (no assumption on their shape).
        pairs: How many differences there are.
        full_share: Share of the steps that are recorded in full.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    full_share: float


@dataclass(slots=True)
class CostMeter:
    """Takes steps, tells the cost. It follows one rank: all run the same code, and share what disturbs a step.

    Attributes:
        differences: CPU time of a full step less that of the shadow beside it, ns; the newest.
    """

    differences: deque[float] = field(default_factory=lambda: deque(maxlen=PAIRS))
    _rank: int | None = None
    _last: list[Step] = field(default_factory=list)
    _full: deque[bool] = field(default_factory=lambda: deque(maxlen=STEPS))
    _durations: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))
    _own: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))
    _pairs: int = 0

    def add(self, step: Step) -> None:
        """Takes one step of one rank, in order. Of several ranks, the first that comes is followed."""
        if self._rank is None:
            self._rank = step.rank
        if step.rank != self._rank:
            return
        if step.status not in ("ok", "shadow") or step.cpu_ns is None:
            self._last.clear()
            return
        self._full.append(step.status == "ok")
        self._durations.append(step.duration_ns)
        if step.status == "shadow":
            self._own.append(step.own_ns)
        if self._last and not _alike(self._last[-1], step):
            self._last.clear()
        self._last.append(step)
        if len(self._last) == 3:
            before, middle, after = self._last
            if before.status == after.status != middle.status:
                # Between its two neighbours: what grows from step to step cancels out.
                difference = _cpu_ns(middle) - (_cpu_ns(before) + _cpu_ns(after)) / 2
                self.differences.append(difference if middle.status == "ok" else -difference)
                self._pairs += 1
                self._last.clear()  # differences that share a step are not independent
            else:
                del self._last[0]

    def cost(self) -> Cost | None:
        """The cost, None while there are too few pairs."""
        if len(self.differences) < ENOUGH_PAIRS or not (step_ns := median(self._durations)):
            return None
        ordered, count = sorted(self.differences), len(self.differences)
        # ranks of the order statistics between which the median lies with 95 %: binomial(n, 1/2), normal approximation
        half = 1.96 * sqrt(count) / 2
        low, high = max(0, floor(count / 2 - half)), min(count - 1, ceil(count / 2 + half))
        share, own = sum(self._full) / len(self._full), median(self._own)

        def ratio(difference: float) -> float:
            return (difference * share + own) / step_ns

        return Cost(ratio(median(ordered)), ratio(ordered[low]), ratio(ordered[high]), self._pairs, share)


def _alike(before: Step, step: Step) -> bool:
    """Whether two steps follow each other and did the same work."""
    return (before.step, before.synced, before.micro_steps) == (step.step - 1, step.synced, step.micro_steps)


def _cpu_ns(step: Step) -> int:
    return step.cpu_ns or 0
