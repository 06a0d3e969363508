"""What a recorder attaches to a recording when it closes it: who ran, and what stood out in the newest steps."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from ddpwatch.analysis.diagnosis.findings import findings
from ddpwatch.analysis.report import ReportBuilder
from ddpwatch.messages import Bye, Hello, Layout, Message, Step

KEEP_STEPS = 2000  # of all ranks together: working them out takes a fraction of a second
KEEP_FULL = 400  # older ones that were recorded in full, which may be one in 64


class AttachmentBuilder:
    """Keeps the newest steps, and what introduces them; bounded in memory."""

    def __init__(self) -> None:
        self._full: deque[Step] = deque(maxlen=KEEP_FULL)
        self._steps: deque[Step] = deque()
        self._others: dict[tuple[object, ...], Message] = {}

    def apply(self, message: Message) -> None:
        """Takes one message."""
        if isinstance(message, Step):
            self._steps.append(message)
            if len(self._steps) > KEEP_STEPS and (oldest := self._steps.popleft()).status == "ok":
                self._full.append(oldest)
        elif isinstance(message, (Hello, Bye)):
            self._others[type(message), message.rank] = message
        elif isinstance(message, Layout):
            self._others[Layout, message.module, message.epoch % 4] = message

    def documents(self) -> dict[str, bytes]:
        """``run.json`` and ``findings.json``, as JSON."""
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
