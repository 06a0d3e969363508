"""What watching costs the job, by comparing full steps with the shadow steps beside them.

A shadow step leaves the collectives alone (`ddpwatch.probe.pace`). The two kinds lie side by side in one run, so each
full step is set against the shadow next to it: what is different in the CPU time of the rank's process is what seeing
the collectives took. CPU time, because the duration of a step also holds what other ranks and the network did.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil, floor, sqrt
from statistics import median

from ddpwatch.messages import Step

PAIRS = 2048  # kept, of all ranks together
ENOUGH_PAIRS = 8
STEPS = 512
MAX_RANKS = 64  # whose steps are compared; they all run the same code


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
    """Takes steps, tells the cost.

    Attributes:
        differences: CPU time of a full step less that of the shadow beside it, ns; the newest pairs.
    """

    _last: dict[int, Step] = field(default_factory=dict)
    differences: deque[int] = field(default_factory=lambda: deque(maxlen=PAIRS))
    _full: deque[bool] = field(default_factory=lambda: deque(maxlen=STEPS))
    _durations: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))
    _own: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS))
    _pairs: int = 0

    def add(self, step: Step) -> None:
        """Takes one step of one rank, in order."""
        if step.rank >= MAX_RANKS or step.status not in ("ok", "shadow") or step.cpu_ns is None:
            self._last.pop(step.rank, None)
            return
        before = self._last.get(step.rank)
        if before is not None and before.step == step.step - 1 and before.status != step.status:
            full, shadow = (step, before) if step.status == "ok" else (before, step)
            if full.synced == shadow.synced and full.micro_steps == shadow.micro_steps:
                assert full.cpu_ns is not None
                assert shadow.cpu_ns is not None
                self.differences.append(full.cpu_ns - shadow.cpu_ns)
                self._pairs += 1
                # a step is used once: differences that share one are not independent
                self._last.pop(step.rank)
                self._count(step)
                return
        self._last[step.rank] = step
        self._count(step)

    def _count(self, step: Step) -> None:
        self._full.append(step.status == "ok")
        self._durations.append(step.duration_ns)
        if step.status == "shadow":
            self._own.append(step.own_ns)

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
