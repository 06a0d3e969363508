"""A run as its frames arrive: state, log, and the verdicts that come and go."""

from __future__ import annotations

from ddpwatch.messages import Message, Step
from ddpwatch.state import RunState, StepAcrossRanks
from ddpwatch.tui.models.log import RunLog
from ddpwatch.tui.models.overview import SUMMARY_NS, OverviewBuilder

SLOW_STEP = 1.5  # times the median: a step worth jumping to


class FollowedRun:
    """Takes frames and keeps the run's state and log.

    Args:
        by_recorded_time: Log the verdict twice a second of recorded time, so that a replay's log does not depend on
            its speed. Otherwise the caller logs verdicts.
    """

    def __init__(self, by_recorded_time: bool = False) -> None:
        self.state = RunState()
        self.log = RunLog()
        self._by_recorded_time = by_recorded_time
        self._builder = OverviewBuilder()
        self._verdict_ns = 0
        self._median_ns: float | None = None

    def apply(self, message: Message, received_ns: int, facts_now: bool = True) -> None:
        """Takes a message. ``facts_now`` works a step out at once instead of when it is first drawn."""
        self.state.apply(message, received_ns)
        self.log.take(message, received_ns)
        if facts_now and isinstance(message, Step) and (step := self.state.steps.get(message.step)) is not None:
            step.facts_of(message.rank)
        if self._by_recorded_time and self.state.now_ns - self._verdict_ns >= SUMMARY_NS:
            self._log_verdict()

    def _log_verdict(self) -> None:
        self._verdict_ns = self.state.now_ns
        summary, newest = self._builder.summary(self.state), self.state.newest_step()
        self._median_ns = summary.step_p50_ns
        self.log.log_verdict(self.state.verdict(summary), self.state.now_ns, newest.step if newest else None)

    def is_slow(self, number: int) -> bool:
        """Whether that step took much longer than the median of recorded time so far."""
        step = self.state.steps.get(number)
        return step is not None and is_slow(step, self._median_ns)


def is_slow(step: StepAcrossRanks, median_ns: float | None) -> bool:
    """Whether a step that belongs in statistics took more than `SLOW_STEP` times the median."""
    return bool(median_ns) and step.counted and step.longest_ns > SLOW_STEP * (median_ns or 0)
