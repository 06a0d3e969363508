"""Whether a rank goes on, by its heartbeats: one rule, by which a rank takes its own stack and others call it a hang.

A rank stands still as long as its heartbeats say the same: step, phase, activity, collectives. How long that may last
depends on how long its steps take, and on what it does.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ddpwatch.common.statistics import median_low
from ddpwatch.common.units import FOREVER_NS
from ddpwatch.sampling.levels import ORDINARY
from ddpwatch.wire.messages import NO_LONGER_WATCHED, Beat, Stack, Step

STILL_NS: Final = 3_000_000_000
PAUSE_NS: Final = 150_000_000
PAUSE_STEPS: Final = 1.5  # how many steps' time a pause lasts at least
SILENT_NS: Final = 1_500_000_000  # without a sign that comes twice a second: two are missing
STILL_STEPS: Final = 2.0  # how many steps' time a rank may stand still where steps are long
START_NS: Final = 60_000_000_000  # before the first step ends: libraries load, connections are made
AWAITED_NS: Final = 7_000_000_000  # in which a rank may wait for data, or be between steps, while others wait for it
DATA_NS: Final = 30_000_000_000  # in which all ranks may wait for data, or be between steps
LASTING_NS: Final = 600_000_000_000  # NCCL's own patience
_PATIENCE_NS: Final = {
    "data": AWAITED_NS,
    "save": LASTING_NS,
    "compile": LASTING_NS,
    "validation": LASTING_NS,
    "graph": FOREVER_NS,
    NO_LONGER_WATCHED: FOREVER_NS,
}


class Stillness:
    """How long one rank has been standing still, on its own clock.

    Attributes:
        beat: Its newest heartbeat.
        since_ns: From when on it has been standing still.
    """

    def __init__(self) -> None:
        self.beat: Beat | None = None
        self.since_ns = 0
        self._steps: deque[int] = deque(maxlen=8)  # steps whose median says how long one takes

    def add_step(self, step: Step) -> None:
        """Takes the rank's next step."""
        if step.status in ORDINARY:
            self._steps.append(step.duration_ns)

    def add_beat(self, beat: Beat) -> None:
        """Takes the next heartbeat."""
        before, self.beat = self.beat, beat
        entered_ns = max(beat.since_ns, beat.activity_since_ns)
        if before is None:
            self.since_ns = entered_ns
        elif _position(before) != _position(beat) or (before.issued is not None and _counts(before) != _counts(beat)):
            self.since_ns = entered_ns if entered_ns >= before.at_ns else beat.at_ns

    @property
    def still_ns(self) -> int:
        """For how long it has been standing still at its newest heartbeat."""
        return 0 if self.beat is None else self.beat.at_ns - self.since_ns

    @property
    def stands_still(self) -> bool:
        """Whether that is longer than its steps explain."""
        return self.still_ns > STILL_NS and self.still_ns > self._patience_ns()

    @property
    def lasts_too_long(self) -> bool:
        """Whether that is longer than its steps and what it does explain."""
        activity = "" if self.beat is None else self.beat.activity
        return self.stands_still and self.still_ns > _PATIENCE_NS.get(activity, 0)

    @property
    def pauses(self) -> bool:
        """Whether it is longer than its steps mostly explain, nobody knows what it does, and it may be over soon."""
        if self.beat is None or self.beat.activity or not self._steps:
            return False
        return max(PAUSE_NS, PAUSE_STEPS * median_low(self._steps)) < self.still_ns <= STILL_NS

    def _patience_ns(self) -> int:
        if self._steps:
            return max(STILL_NS, int(STILL_STEPS * median_low(self._steps)))
        return STILL_NS if self.beat is not None and self.beat.step else START_NS


def is_of_hang(stack: Stack) -> bool:
    """Returns whether the rank had been standing still for so long that it is no pause's stack."""
    return stack.at_ns - stack.since_ns > STILL_NS


def _position(beat: Beat) -> tuple[object, ...]:
    return (
        beat.step, beat.phase, beat.since_ns, beat.activity, beat.activity_since_ns, beat.last_hook, beat.in_flight,
    )  # fmt: skip


def _counts(beat: Beat) -> tuple[object, ...]:
    return beat.issued, beat.issued_in
