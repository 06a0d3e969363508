"""A run's frames, assembled into steps and diagnosed: what reports, comparisons, exports and the library share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.assembly import StepAssembler
from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.words.rows import incident_row, lost_row
from ddpwatch.analysis.diagnosis.words.verdict import Verdict, verdict
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.analysis.window import Summary
from ddpwatch.wire.messages import Bye, Layout, Message

if TYPE_CHECKING:
    from ddpwatch.wire.transport import Frame


class DiagnosedRun:
    """Takes a run's frames and returns its steps.

    Args:
        expected: How many ranks will send a step, where that is fewer than the run has.

    Attributes:
        groups: The run's process groups.
        layouts: The newest layouts.
    """

    def __init__(self, expected: int | None = None) -> None:
        self._assembler = StepAssembler(expected)
        self.groups = self._assembler.groups
        self.layouts = Layouts(self.groups)
        self._diagnosis = Diagnosis(self.layouts, self.groups)

    def apply(self, message: Message, received_ns: int = 0) -> list[StepAcrossRanks]:
        """Takes one message, and when it was received (0 if that is not known); returns the steps that it completes."""
        self._diagnosis.apply(message, received_ns)
        completed = self._assembler.apply(message)
        for across in completed:
            self._diagnosis.add_step(across)
        if isinstance(message, Layout):
            self.layouts.apply_layout(message)
        return completed

    def rest(self) -> Iterator[StepAcrossRanks]:
        """The steps that still lack a rank."""
        for across in self._assembler.rest():
            self._diagnosis.add_step(across)
            yield across

    def steps(self, frames: Iterable[Frame]) -> Iterator[StepAcrossRanks]:
        """The steps of all frames."""
        for message, envelope in frames:
            yield from self.apply(message, envelope.received_ns)
        yield from self.rest()

    def lost(self) -> dict[str, Any]:
        """Where the rank-time went so far."""
        return lost_row(self._diagnosis.lost())

    def incidents(self) -> list[dict[str, Any]]:
        """What went wrong so far, worst first."""
        return [incident_row(incident, self.layouts) for incident in self._diagnosis.incidents()]

    def verdict(self, summary: Summary, end: Bye | None, steps: int, forwards: bool | None) -> Verdict:
        """What matters most, given the figures of all steps; the rest as for `words.verdict`."""
        about = (len(summary.ranks), end, self.groups.world_size, steps, forwards)
        return verdict(summary, self._diagnosis.incidents(), *about)


def diagnosed(frames: Iterable[Frame], expected: int | None = None) -> DiagnosedRun:
    """The diagnosis of all frames. ``expected`` as for `DiagnosedRun`."""
    run = DiagnosedRun(expected)
    for _ in run.steps(frames):
        pass
    return run
