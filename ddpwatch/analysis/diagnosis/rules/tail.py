"""How much longer than usual a job's steps take now and then, and what goes beyond that: the tail of its own steps."""

from __future__ import annotations

from math import log

from ddpwatch.common.statistics import RollingMedian

TAIL_ALARMS = 1e-5  # steps that chance takes beyond the tail, at most
TAIL_OF = 512  # newest steps
TAIL_SHARE = 1 / 32  # of the steps, the longest ones: the tail
FEWEST_IN_TAIL = 2
TAIL_FROM = 0.05  # of a usual step: the tail does not start below
USUAL_INDEX, USUAL_STEPS = 2.0, 4  # of a tail of which nothing is known, and how many of its steps that counts for
HEAVIEST_INDEX, LIGHTEST_INDEX = 2.0, 4.0  # a heavier one has no finite variance


class Tail:
    """The excess of the newest steps over what is usual (ns).

    Beyond its start u, which a share q of the steps exceeds, an excess x is taken to be Pareto: P(X > x) = q (u/x)^a.
    The index a is the tail's posterior mean (Hill's estimate, with a weak prior). What is beyond the tail counts as the
    longest excess before it, so that a stall does not hide the next one.
    """

    def __init__(self) -> None:
        self._excess = RollingMedian(TAIL_OF)

    def add_excess(self, excess_ns: float, usual_ns: float) -> None:
        """Takes the next step."""
        longest = next(iter(self._excess.largest(1)), 0.0)
        beyond = excess_ns > longest and excess_ns > self.end(usual_ns)
        self._excess.add_value(longest if beyond else max(0.0, excess_ns))

    def end(self, usual_ns: float) -> float:
        """Returns the excess that chance goes beyond once in 1 / `TAIL_ALARMS` steps."""
        count = len(self._excess)
        most = max(FEWEST_IN_TAIL, int(TAIL_SHARE * count))
        longest = self._excess.largest(most + 1)
        start = max(TAIL_FROM * usual_ns, longest[0] if len(longest) > most else 0.0)
        logs = sum(log(max(excess, start) / start) for excess in longest[-most:]) if start else 0.0
        index = (most + USUAL_STEPS) / (logs + USUAL_STEPS / USUAL_INDEX)
        index = min(max(index, HEAVIEST_INDEX), LIGHTEST_INDEX)
        return float(start * (most / max(count, most) / TAIL_ALARMS) ** (1 / index))
