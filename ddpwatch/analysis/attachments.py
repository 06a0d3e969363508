"""The documents attached to a recording when it closes: who ran, and what stood out in the newest steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from ddpwatch.sampling.levels import FULL
from ddpwatch.wire.messages import (
    PAUSE_PHASES,
    Bye,
    ClockExchange,
    FrameError,
    Group,
    Hello,
    Layout,
    Mark,
    Message,
    NodeStep,
    Step,
)
from ddpwatch.wire.node_step import expand

if TYPE_CHECKING:
    from ddpwatch.analysis.figures import Report

ATTACHED_STEPS = 2000  # of all ranks together: reporting on them takes a fraction of a second
ATTACHED_MARKS = 256  # of each rank: the newest pauses, which explain steps
ATTACHED_PINGS = 1024  # of all nodes
ATTACHED_FULL = 400  # older full steps, for the overlap alone, as only one step in 64 may be full


class AttachmentBuilder:
    """Keeps the newest steps and the messages that introduce them; its memory is bounded."""

    def __init__(self) -> None:
        self._full: deque[Step] = deque(maxlen=ATTACHED_FULL)
        self._steps: deque[Step | NodeStep] = deque()
        self._kept = 0  # steps of ranks
        self._marks: dict[int, deque[Mark]] = {}
        self._others: dict[tuple[object, ...], Message] = {}
        self._members: dict[int, list[int]] = {}
        self._pings: deque[ClockExchange] = deque(maxlen=ATTACHED_PINGS)

    def apply_message(self, message: Message) -> None:
        """Takes one message."""
        if isinstance(message, (Step, NodeStep)):
            self._steps.append(message)
            self._kept += _ranks_in(message)
            while self._kept - _ranks_in(self._steps[0]) >= ATTACHED_STEPS:
                self._drop(self._steps.popleft())
        elif isinstance(message, Mark) and message.kind in PAUSE_PHASES:
            self._marks.setdefault(message.rank, deque(maxlen=ATTACHED_MARKS)).append(message)
        elif isinstance(message, (Hello, Bye)):
            self._others[type(message), message.rank] = message
        elif isinstance(message, Group):
            members = self._members.setdefault(message.id, message.ranks)  # one list: every member sends them all
            self._others[Group, message.rank, message.id] = msgspec.structs.replace(message, ranks=members)
        elif isinstance(message, ClockExchange):
            self._pings.append(message)
        elif isinstance(message, Layout):
            self._others[Layout, message.module, message.epoch % 4] = message

    def _drop(self, oldest: Step | NodeStep) -> None:
        """Drops a step, unless it is full. Those of nodes are dropped unread, as reading takes long."""
        self._kept -= _ranks_in(oldest)
        if isinstance(oldest, Step) and oldest.status == FULL:
            self._full.append(oldest)

    def documents(self) -> dict[str, bytes]:
        """Returns the documents by name: ``run.json``, ``findings.json`` and ``incidents.json``."""
        from ddpwatch.analysis.findings import findings

        steps = [step for message in self._steps for step in _steps_of(message)]
        report, numbers = self._report(steps), [step.step for step in steps]
        span = [min(numbers, default=None), max(numbers, default=None)]
        overlap = self._report([*self._full, *steps]).overlap if self._full else report.overlap
        about = {"steps": span, "findings": findings(report), "overlap": overlap}
        incidents = {"steps": span, "lost": report.lost, "incidents": report.incidents}
        run = {**report.run.as_json(), "ends": {str(row.rank): row.end for row in report.ranks}}
        documents = {"run.json": run, "findings.json": about, "incidents.json": incidents}
        return {name: msgspec.json.encode(document) for name, document in documents.items()}

    def _report(self, steps: list[Step]) -> Report:
        """Reports on these steps. A mark comes before the step that it lies in, as it did when it was received."""
        from ddpwatch.analysis.report_builder import ReportBuilder

        builder, marks = ReportBuilder(), {rank: deque(kept) for rank, kept in self._marks.items()}
        for message in (*self._others.values(), *self._pings, *steps):
            if isinstance(message, Step):
                waiting, end_ns = marks.get(message.rank), message.start_ns + message.duration_ns
                while waiting and waiting[0].start_ns < end_ns:
                    builder.apply_message(waiting.popleft())
            builder.apply_message(message)
        return builder.report()


def _ranks_in(message: Step | NodeStep) -> int:
    return len(message.ranks) if isinstance(message, NodeStep) else 1


def _steps_of(message: Step | NodeStep) -> list[Step]:
    if isinstance(message, Step):
        return [message]
    try:
        return expand(message)
    except FrameError:
        return []
