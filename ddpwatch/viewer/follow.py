"""Follows live runs, for those that look at their state now and then and draw nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ddpwatch.errors import DdpwatchError
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.live_source import SILENCE_S, LiveSource, Source, may_go_on
from ddpwatch.viewer.state import RunState

LOOK_S = 1.0  # between two looks at a run
FIND_S = 0.3  # between two looks for runs
AGAIN_S = 2.0  # until a run is followed again, after an error
END_S = 3.0  # for a run's last frames, once nobody wants more
ListRuns = Callable[[], Sequence[RunInfo]]
Look = Callable[[RunState], object]
Looker = Callable[[RunInfo | None], Look]  # of one run, given what is known of it


def new_runs(
    list_runs: ListRuns, over: threading.Event | None = None, idle: Callable[[], object] = lambda: None
) -> Iterator[RunInfo]:
    """Yields each run once: the first of the list that is new, whenever the caller wants the next one.

    Args:
        list_runs: The runs of now; one that has ended stays listed for some seconds.
        over: Once it is set, nothing more is waited for; None: forever.
        idle: Called after each look that has found nothing new.
    """
    seen: set[str] = set()
    over = over or threading.Event()
    while True:
        last_look = over.is_set()
        info = next((info for info in list_runs() if info.run_id not in seen), None)
        if info is not None:
            seen.add(info.run_id)
            yield info
        elif last_look:
            return
        else:
            idle()
            over.wait(FIND_S)


def follow_run(
    source: Source,
    endpoint: str,
    look: Look,
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


@contextlib.contextmanager
def following(list_runs: ListRuns, lookers: Sequence[Looker], endpoint: str | None = None) -> Iterator[None]:
    """Follows runs on a thread of its own for as long as the block lasts, each once, one after the other.

    Args:
        list_runs: The runs of now.
        lookers: Look at each run, one after the other.
        endpoint: Of the one run, instead, if it is not on this machine.
    """
    over = threading.Event()
    arguments = (list_runs, lookers, endpoint, over)
    follower = threading.Thread(target=_follow_all, args=arguments, name="ddpwatch-follow", daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join(END_S + SILENCE_S)


def _follow_all(list_runs: ListRuns, lookers: Sequence[Looker], endpoint: str | None, over: threading.Event) -> None:
    def found() -> Sequence[RunInfo]:
        with contextlib.suppress(DdpwatchError, OSError):  # the run directory is gone
            return list_runs()
        return []

    if endpoint is not None:
        _follow(endpoint, [looker(None) for looker in lookers], over)
        return
    for info in new_runs(found, over):
        _follow(info.publish, [looker(info) for looker in lookers], over)


def _follow(endpoint: str, looks: Sequence[Look], over: threading.Event) -> None:
    over_s: list[float] = []

    def goes_on() -> bool:
        if over.is_set() and not over_s:
            over_s.append(time.monotonic())
        return not over_s or time.monotonic() - over_s[0] <= END_S

    def look(state: RunState) -> None:
        for one in looks:
            one(state)

    while True:
        try:
            follow_run(LiveSource(endpoint), endpoint, look, goes_on, first_look_s=LOOK_S)
            return
        except Exception:  # the run is gone, or something else that may work the next time
            if over.wait(AGAIN_S) or not _goes_on(endpoint):
                return


def _goes_on(endpoint: str) -> bool:
    with contextlib.suppress(DdpwatchError, OSError):  # the run directory is gone
        return rundir.is_live(endpoint)
    return False
