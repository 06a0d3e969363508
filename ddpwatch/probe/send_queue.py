"""The queue: what the training thread leaves for the sender thread, with no lock and without ever waiting."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from ddpwatch.probe.record import StepRecord
from ddpwatch.wire.messages import Group, Hello, Layout, Mark, Message, StackSamples

BACKLOG = 4096


class SendQueue:
    """Closed steps and other messages on their way to the sender thread.

    The training thread calls the methods. It appends, the sender thread takes from the other end.

    Attributes:
        records: Closed steps, oldest first.
        messages: All other messages, oldest first; they go out before the steps.
        hello: The rank's introduction, once it is there.
        dropped: What was lost because the sender thread did not keep up.
        wakes: Wakes the sender thread.
        due_s: From when on (`time.monotonic`) the training thread may wake it; infinite while it is awake.
        sender_cpu_ns: CPU time of the sender thread when it last went to sleep.
        groups: The ids of the process groups that were posted.
        made_late: Returns steps that the sender thread makes of what the training thread left, given whether nothing
            more is to come.
    """

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=BACKLOG)
        self.messages: deque[Message] = deque(maxlen=BACKLOG)
        self.hello: Hello | None = None
        self.dropped = 0
        self.wakes: SimpleQueue[None] = SimpleQueue()
        self.due_s = math.inf
        self.sender_cpu_ns = 0
        self.groups: set[int] = set()
        self.made_late: Callable[[bool], Iterable[StepRecord]] = lambda over: ()

    def make_steps(self, over: bool = False) -> None:
        """Makes what steps can be made by now, on the sender thread."""
        for record in self.made_late(over):
            self.add_step(record)

    def add_step(self, record: StepRecord) -> None:
        """Accepts a closed step. From a full backlog the oldest is dropped."""
        records = self.records
        if len(records) == BACKLOG:
            self.dropped += records[0].steps
        records.append(record)

    def post(self, message: Hello | Group | Layout | Mark | StackSamples) -> None:
        """Accepts any other message. From a full backlog the oldest is dropped."""
        if isinstance(message, Hello):
            self.hello = message
        elif isinstance(message, Group):
            self.groups.add(message.id)
        self.dropped += len(self.messages) == BACKLOG
        self.messages.append(message)

    def wake_if_due(self) -> None:
        """Wakes the sender thread if it has rested: the training thread is about to wait, and leaves it the core."""
        if time.monotonic() >= self.due_s:
            self.due_s = math.inf
            self.wakes.put(None)

    def job_cpu_ns(self) -> int:
        """Returns the CPU time of the process, without what the sender thread had used when it last went to sleep."""
        return time.process_time_ns() - self.sender_cpu_ns
