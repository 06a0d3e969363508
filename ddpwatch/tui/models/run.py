"""A run as its frames arrive: state, log, and the incidents that start and end."""

from __future__ import annotations

from ddpwatch.messages import Message, Step
from ddpwatch.state import RunState
from ddpwatch.tui.models.log import RunLog
from ddpwatch.tui.models.overview import OverviewBuilder


class FollowedRun:
    """Takes frames and keeps the run's state and log.

    Args:
        by_recorded_time: Log incidents twice a second of recorded time, so that a replay's log does not depend on its
            speed. Otherwise the caller logs them.
    """

    def __init__(self, by_recorded_time: bool = False) -> None:
        self.state = RunState()
        self.log = RunLog()
        self.builder = OverviewBuilder()
        self._by_recorded_time = by_recorded_time

    def apply(self, message: Message, received_ns: int, facts_now: bool = True) -> None:
        """Takes a message. ``facts_now`` works a step out at once instead of when it is first drawn."""
        self.state.apply(message, received_ns)
        self.log.take(message, received_ns)
        if facts_now and isinstance(message, Step):
            step = self.state.steps.get(message.step)
            if step is not None and message.rank in step.ranks:  # the rank's own step may still be held back
                step.facts_of(message.rank)
        if self._by_recorded_time and self.builder.due(self.state):
            self.log_incidents()

    def log_incidents(self) -> None:
        """Logs what has started and ended since the last look."""
        self.log.log_incidents(self.builder.diagnosis(self.state).incidents, self.state.now_ns)
