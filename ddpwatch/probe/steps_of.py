"""Steps of any loop: a pure function from the events of the threads that train to steps. Knows no torch, no clock.

A step is what lies between two ends of an update. An update ends with the last optimizer step before the next forward
or backward, or with the backward in which that happened. So it is known that an update has ended only when the next
forward or backward begins: until then, its events are left for the next call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddpwatch.probe.event_log import Event, UpdateEnd
from ddpwatch.probe.record import PhaseSpan, StepRecord
from ddpwatch.sampling.levels import BARE, FULL, LIGHT
from ddpwatch.wire.messages import PhaseName


class Start(NamedTuple):
    """Where the step starts whose events come next.

    Attributes:
        step: Its number.
        at: When (absolute ns).
        ending: Of the step before; None before the first update, whose beginning nobody has seen.
    """

    step: int
    at: int
    ending: UpdateEnd | None = None


class Steps(NamedTuple):
    """Steps that have ended, the events after them, and where these start."""

    records: list[StepRecord]
    rest: list[Event]
    start: Start


def steps_of(events: Sequence[Event], start: Start, over: bool = False) -> Steps:
    """Returns the steps of which the end is known.

    Args:
        events: By their time. All since ``start``.
        start: Where the first step starts.
        over: Whether no event follows: then the last update has ended, too.
    """
    records, taken = [], 0
    for after, at, ending in _ends(events, over):
        records.append(_step(events[taken:after], start, at, ending))
        start, taken = Start(start.step + 1, records[-1].end, ending), after
    return Steps(records, list(events[taken:]), start)


# -- where steps end ---------------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """A possible end of a step: the position after its last event, when it is, and what is known there."""

    after: int
    at: int
    ending: UpdateEnd


class _Open:
    """What is under way: calls of optimizers, each with its id, and backwards.

    Optimizers call each other, and closures. One that starts again has raised before: torch says nothing of that.
    """

    def __init__(self) -> None:
        self.optimizers: list[int] = []
        self.backwards = 0

    def begin_optimizer(self, optimizer: int) -> bool:
        """Returns whether it is an outermost one."""
        if optimizer in self.optimizers:
            del self.optimizers[self.optimizers.index(optimizer) :]
        self.optimizers.append(optimizer)
        return len(self.optimizers) == 1

    def end_optimizer(self, optimizer: int) -> bool:
        """Returns whether no optimizer is under way any more."""
        if optimizer in self.optimizers:
            del self.optimizers[self.optimizers.index(optimizer) :]
        return not self.optimizers

    def end_backward(self) -> bool:
        """Returns whether that was the outermost one."""
        self.backwards -= self.backwards > 0
        return not self.backwards

    def forget(self) -> None:
        """Knows nothing any more: events are missing."""
        self.optimizers.clear()
        self.backwards = 0


def _ends(events: Sequence[Event], over: bool) -> Iterable[_End]:
    """Yields the ends of steps. Nothing is known of what began before the one that comes next: it is cut off there."""
    after = 0
    while (found := _first_end(events, after, over)) is not None:
        yield found
        after = found.after


def _first_end(events: Sequence[Event], begin: int, over: bool) -> _End | None:
    """Returns the first end after the events before ``begin``."""
    known, found, within = _Open(), None, None
    for position in range(begin, len(events)):
        _, at, kind, about = events[position]
        if kind in ("forward", "backward_begin"):
            if found is not None and not known.backwards:
                return found
            known.backwards += kind == "backward_begin"
        elif kind == "optimizer_begin":
            known.begin_optimizer(about)
        elif kind == "optimizer_end":
            optimizer, ending = about
            if known.end_optimizer(optimizer):
                within = ending
        elif kind == "backward_end":
            known.end_backward()
        elif kind == "lost":
            known.forget()
        if within is not None and not known.backwards:
            found, within = _End(position + 1, at, within), None
    return found if over else None


# -- what a step holds -------------------------------------------------------------------------------------------------


def _step(events: Sequence[Event], start: Start, end: int, ending: UpdateEnd) -> StepRecord:
    """Returns a step. The first one is a warm-up: nobody has seen where it starts. One that lacks events is aborted."""
    record = StepRecord(start.step, start.at)
    record.end = max(start.at, end)
    before = start.ending
    record.status = "warmup" if before is None else before.level
    record.own_ns = ending.own_ns
    if before is not None and before.cpu_ns is not None and ending.cpu_ns is not None:
        record.cpu_ns = max(0, ending.cpu_ns - before.cpu_ns)
    if any(event.kind == "lost" for event in events):
        record.status = "aborted"
    record.backwards = _backwards(events)
    if record.status == BARE:
        return record
    record.spans = _spans(events, start.at, record.end)
    waits = [(max(event.at, start.at), event.about) for event in events if event.kind == "data"]
    record.data = waits if waits or ending.feeds else None
    if not ending.complete:
        record.status = LIGHT if record.status == FULL else record.status
        return record
    record.buckets = [event.about for event in events if event.kind == "collective"]
    record.first_seq = next((bucket.seq for bucket in record.buckets), None)
    return record


def _backwards(events: Iterable[Event]) -> int:
    """Returns how many backwards there were that are in no other."""
    known, count = _Open(), 0
    for event in events:
        if event.kind == "backward_begin":
            count += not known.backwards
            known.backwards += 1
        elif event.kind == "backward_end":
            known.end_backward()
    return count


def _spans(events: Sequence[Event], start: int, end: int) -> list[PhaseSpan]:
    """Returns the phases, one after the other. Of those that are in each other, the innermost has the time.

    The forward begins with the first call of a module, where that is seen; otherwise with the end of what came before:
    a wait for data, a backward, an optimizer (or its start, if the backward is its closure's). It includes the loss.
    """
    found: list[PhaseSpan] = []
    known, since, forward = _Open(), start, False  # what is innermost has run since then

    def ends_now(phase: PhaseName | None, at: int) -> None:
        nonlocal since
        if phase is not None and at > since:
            found.append((phase, since, at))
        since = max(since, at)

    def innermost() -> PhaseName | None:
        if forward or known.backwards:
            return "forward" if forward else "backward"
        return "optimizer" if known.optimizers else None

    for _, at, kind, about in events:
        at = min(max(at, start), end)
        if kind == "forward" and not (forward or known.backwards):
            ends_now(innermost(), at)
            forward = True
        elif kind == "backward_begin":
            if not known.backwards:
                ends_now("forward", at)
                forward = False
            known.backwards += 1
        elif kind == "backward_end":
            if known.backwards == 1:
                ends_now("backward", at)
            known.end_backward()
        elif kind == "optimizer_begin":
            before = innermost()
            if known.begin_optimizer(about):
                ends_now(before, at)
                forward = False
        elif kind == "optimizer_end":
            if known.end_optimizer(about[0]):
                ends_now("optimizer", at)
        elif kind == "data" and innermost() is None:
            since = max(since, min(about, end))
        elif kind == "lost":
            known.forget()
            ends_now(None, at)
            forward = False
    return found
