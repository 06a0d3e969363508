"""Follows one live run to its end, for those that look at its state now and then and draw nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddpwatch.viewer.live_source import SILENCE_S, Source, may_go_on
from ddpwatch.viewer.state import RunState

LOOK_S = 1.0  # between two looks


def follow_run(
    source: Source,
    endpoint: str,
    look: Callable[[RunState], object],
    goes_on: Callable[[], bool] = lambda: True,
    first_look_s: float = 0.0,
) -> None:
    """Applies a run's frames to a state until the run ends, its collector is gone, or nobody wants more.

    Args:
        source: Where the frames come from; it is closed at the end.
        endpoint: The run's; see `may_go_on`.
        look: Gets the state every `LOOK_S` once there are frames, and once at the end.
        goes_on: Returns whether more is wanted.
        first_look_s: When the first look is due, from now.
    """
    state, heard = RunState(), time.monotonic()
    due = heard + first_look_s
    try:
        while state.end is None and goes_on() and (time.monotonic() - heard < SILENCE_S or may_go_on(source, endpoint)):
            for message, envelope in source.read(0.2):
                state.apply_message(message, envelope.received_ns, envelope.frame)
                heard = time.monotonic()
            if source.over:
                break
            if state.frames and state.end is None and time.monotonic() >= due:
                look(state)
                due = time.monotonic() + LOOK_S
    finally:
        source.close()
    look(state)
