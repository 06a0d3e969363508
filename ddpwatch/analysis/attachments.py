"""The documents attached to a recording when it closes: who ran, and what stood out in the newest steps."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from ddpwatch.analysis.diagnosis.findings import findings
from ddpwatch.analysis.report_figures import ReportBuilder
from ddpwatch.messages import Bye, Hello, Layout, Message, Step
from ddpwatch.sampling.levels import FULL

ATTACHED_STEPS = 2000  # of all ranks together: reporting on them takes a fraction of a second
KEEP_FULL = 400  # older full steps, as only one step in 64 may be full


class AttachmentBuilder:
    """Keeps the newest steps and the messages that introduce them; its memory is bounded."""

    def __init__(self) -> None:
        self._full: deque[Step] = deque(maxlen=KEEP_FULL)
        self._steps: deque[Step] = deque()
        self._others: dict[tuple[object, ...], Message] = {}

    def apply(self, message: Message) -> None:
        """Takes one message."""
        if isinstance(message, Step):
            self._steps.append(message)
            if len(self._steps) > ATTACHED_STEPS and (oldest := self._steps.popleft()).status == FULL:
                self._full.append(oldest)
        elif isinstance(message, (Hello, Bye)):
            self._others[type(message), message.rank] = message
        elif isinstance(message, Layout):
            self._others[Layout, message.module, message.epoch % 4] = message

    def documents(self) -> dict[str, bytes]:
        """The documents by name: ``run.json`` and ``findings.json``."""
        report = self._report()
        first, last = min((s.step for s in self._steps), default=None), max((s.step for s in self._steps), default=None)
        about = {"steps": [first, last], "findings": findings(report), "overlap": report["overlap"]}
        run = {**report["run"], "ends": {str(row["rank"]): row["end"] for row in report["ranks"]}}
        return {"run.json": msgspec.json.encode(run), "findings.json": msgspec.json.encode(about)}

    def _report(self) -> dict[str, Any]:
        builder = ReportBuilder()
        for message in (*self._others.values(), *self._full, *self._steps):
            builder.apply(message)
        return builder.report()
