"""The event log: what the threads that train leave for the sender thread, which makes steps of it (`probe.steps_of`).

A thread that trains only appends: what happened, when, and what belongs to it. What that means is found later, when all
that it depends on is known.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from ddpwatch.sampling.levels import FULL
from ddpwatch.wire.messages import StepStatus

MOST_EVENTS: Final = 65_536  # in the log; some MB, which the sender thread takes out about twice a second

# `forward` is the first call of a module, with gradients, since an update or a backward; `lost` is put in by the reader
EventKind = Literal[
    "forward", "backward_begin", "backward_end", "optimizer_begin", "optimizer_end", "data", "collective", "lost"
]


@dataclass(frozen=True, slots=True)
class UpdateEnd:
    """What is known where an optimizer has stepped: of the step that ends there, if no other optimizer steps for it.

    Attributes:
        level: How much is recorded of the step after it.
        own_ns: What the hooks have measured of themselves since the ending before.
        cpu_ns: CPU time of the job in this process, None if it is not needed.
        feeds: Whether a DataLoader feeds the loop.
        complete: Whether all its collectives were seen.
    """

    level: StepStatus = FULL
    own_ns: int = 0
    cpu_ns: int | None = None
    feeds: bool = False
    complete: bool = True


class Event(NamedTuple):
    """Something that happened on a thread that trains.

    Attributes:
        number: Counts the events of a log, so that lost ones show.
        at: When (absolute ns).
        kind: What.
        about: An optimizer's id, with its `UpdateEnd` where it ends; until when the loop waited for data; a
            `BucketRecord` of a collective; or how many events were lost.
    """

    number: int
    at: int
    kind: EventKind
    about: Any = None


class EventLog:
    """Events of all threads that train, newest last. From a full log the oldest are lost, and counted.

    Any thread may append, one thread takes. There is no lock: counting, appending and taking are one operation each.

    Args:
        most: How many events it holds.

    Attributes:
        lost: How many were lost, as far as the taker has come.
    """

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self._numbers = itertools.count()
        self._taken = 0  # all with a lower number were taken, or are lost
        self.lost = 0

    def add_event(self, kind: EventKind, at: int, about: Any = None) -> None:
        """Appends an event."""
        self._events.append(Event(next(self._numbers), at, kind, about))

    def take_events(self) -> list[Event]:
        """Returns the events since the last call, by their time; in the place of lost ones, one that counts them."""
        events = self._events
        taken = [events.popleft() for _ in range(len(events))]
        if not taken:
            return []
        first = min(event.number for event in taken)
        lost, self._taken = max(0, first - self._taken), max(event.number for event in taken) + 1
        if lost:
            self.lost += lost
            taken.append(Event(first, taken[0].at, "lost", lost))
        return sorted(taken, key=attrgetter("at"))
