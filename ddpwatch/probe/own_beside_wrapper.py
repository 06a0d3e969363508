"""The collectives that a job issues itself beside those of DDP or FSDP2: which of them belong to a step.

Its threads leave them in a log, and a step that ends takes those that were issued within it: all of them, or none.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpwatch.probe.event_log import Event, EventLog
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.own_collectives import OwnCollectiveProbe
from ddpwatch.probe.record import BucketRecord


class CollectivesBeside:
    """The job's own collectives, in the steps that are recorded in full.

    Args:
        context: Gets each process group and the places that issue; takes errors.
        charge: Takes what seeing one has cost (ns).
    """

    def __init__(self, context: ProbeContext, charge: Callable[[int], None]) -> None:
        self._guard = context.guard
        self._log = EventLog()
        self._rest: list[Event] = []  # of the step under way
        self._since: int | None = None  # when on all are seen
        self._collectives = OwnCollectiveProbe(context, self._log, charge, beside=True)
        self._guard.run("own collectives", self._collectives.see)

    def close(self) -> None:
        """Sees nothing more."""
        self._collectives.close()

    def turn(self, on: bool, at: int) -> None:
        """Sees collectives from here on, or none. None was issued since ``at`` (ns)."""
        if on or self._since is not None:
            self._guard.run("own collectives", self._turn, on, at)

    def _turn(self, on: bool, at: int) -> None:
        known = self._collectives
        before = known.on
        if on:
            known.meet_groups()
        known.turn(on)
        if not (on and before):
            self._since = at if on else None

    def take_issued(self, start: int, end: int) -> list[BucketRecord]:
        """Returns what was issued in a step that has ended (ns); nothing if not all of that was seen."""
        return self._guard.run("own collectives", self._take_issued, start, end) or []

    def _take_issued(self, start: int, end: int) -> list[BucketRecord]:
        events = [*self._rest, *self._log.take_events()]
        self._rest = [event for event in events if event.at >= end]
        if not self._collectives.complete or self._since is None or self._since > start:
            return []
        found = [event for event in events if start <= event.at < end]
        return [event.about for event in found] if all(event.kind == "collective" for event in found) else []
