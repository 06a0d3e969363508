"""``--kill-after-hang``: ends a job that has hung for so long."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from ddpwatch.common.text import clean
from ddpwatch.errors import UsageError
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.follow import LOOK_S, Look
from ddpwatch.viewer.state import RunState

LEAST_S = 2.0  # ranks take their stacks when a hang starts; by then, these are in the recording
_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Reads ``90s``, ``10m`` or ``1.5h`` as seconds.

    Raises:
        UsageError: The text is something else.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"{text!r} is not a duration", "give e.g. 10m, 90s or 1h")
    return seconds


def hang_limit(limit_s: float, end_job: Callable[[str], object]) -> Callable[[RunInfo | None], Look]:
    """Returns what looks at runs, and ends the job once, with a sentence on the hang that has lasted for so long."""
    return lambda _: HangLimit(limit_s, end_job).look


class HangLimit:
    """Adds up how long a run has hung, look by look.

    Only what was seen counts: a hang that is open in two looks, frames that came in between, and no step that ended. So
    nobody ends a job because a viewer was stopped, a collector is gone or a clock was set.

    Args:
        limit_s: How long it may hang.
        end_job: Gets a sentence on the hang.
        clock: In seconds.
    """

    def __init__(
        self, limit_s: float, end_job: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = max(limit_s, LEAST_S)
        self._end_job = end_job
        self._clock = clock
        self._hung_s: float | None = None  # None: it does not hang
        self._looked_s = 0.0
        self._frames = self._steps = 0
        self._is_ended = False

    def look(self, state: RunState) -> None:
        """Looks at the run."""
        now = self._clock()
        since_s, self._looked_s = min(now - self._looked_s, 2 * LOOK_S), now
        is_new, self._frames = state.frames > self._frames, state.frames
        moved, self._steps = state.finished_steps > self._steps, state.finished_steps
        hang = next((one for one in state.diagnosis.incidents() if one.kind == "hang" and one.open), None)
        if hang is None or moved:
            self._hung_s = None
        elif self._hung_s is None:
            self._hung_s = 0.0
        elif is_new:
            self._hung_s += since_s
        if hang is not None and (self._hung_s or 0.0) >= self._limit_s and not self._is_ended:
            self._is_ended = True
            self._end_job(clean(hang.message))
