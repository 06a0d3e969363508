"""A run as its frames show it: its groups, layouts and clocks, its steps of all ranks, and the diagnosis.

Reports, comparisons, exports, what-if and viewers hold one `Run` each and add what is theirs: sums, a window, a
drawing. So all of them see the same steps in the same order and on the same time line, and the same incidents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import ClockDomains
from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.incident_json import IncidentFigures, LostFigures, incident_row, lost_row
from ddpwatch.analysis.diagnosis.words.verdict import Verdict, verdict
from ddpwatch.analysis.estimate import Estimate
from ddpwatch.analysis.explain.explanation import Explanations
from ddpwatch.analysis.figures import RunTime
from ddpwatch.analysis.goodput import RunSpan
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.kept_steps import KeptSteps, StepLimit
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.analysis.matching import NumberedStep, StepMatcher
from ddpwatch.analysis.memory import Memory
from ddpwatch.analysis.throughput import Throughput
from ddpwatch.analysis.window import Summary
from ddpwatch.wire.messages import (
    Beat,
    Bye,
    ClockExchange,
    Group,
    Hello,
    Layout,
    Message,
    StackSamples,
    Step,
    sends_no_more,
)

if TYPE_CHECKING:
    from ddpwatch.wire.transport import Frame

OPEN = StepLimit(1024, 131_072, 64)  # steps that wait for their last ranks: some 0.4 GB


class Run:
    """Takes a run's messages and returns its steps, each once it is closed.

    A step is closed when all ranks have sent it. It is closed with the ranks that it has when a newer one is complete,
    as each rank's frames come in order, and when too many wait. Then it is put onto the time line, by what is known of
    the clocks so far, and diagnosed.

    Args:
        expected: How many ranks will send a step, where that is fewer than the run has.
        diagnosed: Whether to make the diagnosis.
        source: The recording, for commands that read it.
        kept: Takes each step as soon as one rank has sent it. Frames that come for a step after it was closed are added
            to what is kept of it, and dropped if it is no longer kept. None: such frames make a step of their own.

    Attributes:
        groups: The process groups.
        layouts: By module, group and epoch.
        clocks: The ranks' clocks; of several, steps are on one time line where possible.
        newest: By rank, the number of its newest step among all ranks, which may count otherwise.
        explanations: Why ranks are late, as far as somebody has asked.
        throughput: What it gets done.
        memory: What its ranks use.
    """

    def __init__(
        self, expected: int | None = None, diagnosed: bool = True, kept: KeptSteps | None = None, source: str = ""
    ) -> None:
        self.groups = Groups()
        self.layouts = Layouts(self.groups)
        self.clocks = ClockDomains()
        self.newest: dict[int, int] = {}
        self.explanations = Explanations()
        self.throughput = Throughput(self.groups)
        self.memory = Memory()
        self._span = RunSpan()
        self._diagnosis = Diagnosis(self.layouts, self.groups, source) if diagnosed else None
        self._matcher = StepMatcher(self.groups.members)
        self._selected = expected
        self._kept = kept
        self._open: dict[int, StepAcrossRanks] = {}
        self._expect_ranks()

    @property
    def diagnosis(self) -> Diagnosis:
        """What is wrong with the run, and where its time goes."""
        assert self._diagnosis is not None, "this run is not diagnosed"
        return self._diagnosis

    def apply_message(self, message: Message, received_ns: int = 0, frame: bytes = b"") -> list[StepAcrossRanks]:
        """Takes one message, when it was received (0 if that is not known), and the frame that it came in, if known.

        Returns the steps that it closes: the one that it completes and those before it that lack a rank, oldest first,
        or the one that has waited longest, if too many wait.
        """
        self._span.apply_message(message, received_ns)
        if self._diagnosis is not None:
            self._diagnosis.apply_message(message, received_ns)
        if isinstance(message, Step):
            return self._add_steps(self._matcher.add_step(message), message, frame)
        self.throughput.apply_message(message)
        self.memory.apply_message(message)
        if isinstance(message, Hello):
            self.clocks.meet(message)
            self.groups.apply_message(message)
            self._expect_ranks()
        elif isinstance(message, Group):
            self.groups.apply_message(message)
        elif isinstance(message, Layout):
            self.layouts.apply_layout(message)
        elif isinstance(message, ClockExchange):
            self.clocks.exchange(message)
        elif isinstance(message, StackSamples):
            self.explanations.add_samples(message)
            if self._diagnosis is not None:
                self._diagnosis.places.explained = self.explanations.next_steps()
        elif isinstance(message, (Bye, Beat)) and message.rank is not None and sends_no_more(message):
            return self._add_steps(self._matcher.leave(message.rank))
        return []

    def rest(self) -> Iterator[StepAcrossRanks]:
        """Closes the steps that still lack a rank, oldest first."""
        yield from self._add_steps(self._matcher.rest())
        for number in sorted(self._open):
            yield self._close(number)

    def steps(self, frames: Iterable[Frame]) -> Iterator[StepAcrossRanks]:
        """Takes all frames of a run, and yields its steps."""
        for message, envelope in frames:
            yield from self.apply_message(message, envelope.received_ns, envelope.frame)
        yield from self.rest()

    def estimate(self) -> Estimate:
        """Returns what holds for all steps so far."""
        return self.diagnosis.estimate()

    def lost(self) -> LostFigures:
        """Returns where the rank-time went so far."""
        return lost_row(self.diagnosis.lost())

    def time(self) -> RunTime | None:
        """Returns where the rank-time went so far, with what lies before and after the steps; None before the first."""
        found = self.diagnosis
        return self._span.time(found.lost(), max(self.groups.world_size, 1))

    def incidents(self) -> list[IncidentFigures]:
        """Returns what went wrong so far, worst first."""
        return [incident_row(incident, self.layouts) for incident in self.diagnosis.incidents()]

    def verdict(self, summary: Summary, end: Bye | None, steps: int, forwards: bool | None) -> Verdict:
        """Returns what matters most, given the figures of all steps; the rest as for `words.verdict`."""
        about = (len(summary.ranks), end, self.groups.world_size, steps, forwards)
        return verdict(summary, self.diagnosis.incidents(), *about, lost=self.diagnosis.lost())

    # -- inside ----------------------------------------------------------------------------------------------

    def _expect_ranks(self) -> None:
        world_size = max(self.groups.world_size, 1)
        self._expected = world_size if self._selected is None else min(world_size, self._selected)
        self._most_open = OPEN.of(self._expected)

    def _add_steps(
        self, steps: Iterable[NumberedStep], sent: Step | None = None, frame: bytes = b""
    ) -> list[StepAcrossRanks]:
        """Adds numbered steps; ``frame`` is what ``sent`` came as."""
        closed: list[StepAcrossRanks] = []
        for number, step in steps:
            if number > self.newest.get(step.rank, -1):
                self.newest[step.rank] = number
            across = self._step(number)
            if across is None:
                continue
            across.add_step(step, frame if step is sent else b"")
            if len(across) >= self._expected and number in self._open:
                closed += [self._close(older) for older in sorted(self._open) if older <= number]
            elif len(self._open) > self._most_open:
                closed.append(self._close(next(iter(self._open))))
            elif self.clocks.several and len(across) >= self.clocks.ranks:
                self._align(across)  # it waits for ranks that nobody has seen yet, or has been closed before
        return closed

    def _step(self, number: int) -> StepAcrossRanks | None:
        """Returns the step of that number, a new one if need be; None if it is older than anything kept."""
        across = self._open.get(number)
        if across is None and self._kept is not None:
            across = self._kept.by_number.get(number)
        if across is None:
            across = StepAcrossRanks(number, not self.clocks.several, self.groups.members, self.groups.role)
            if self._kept is not None and not self._kept.add_step(across, len(self.newest)):
                return None
            self._open[number] = across
        return across

    def _close(self, number: int) -> StepAcrossRanks:
        across = self._open.pop(number)
        if self.clocks.several and not across.shifts:
            self._align(across)
        if self._diagnosis is not None:
            self._diagnosis.add_step(across)
        return across

    def _align(self, across: StepAcrossRanks) -> None:
        self.clocks.observe(across.ranks)
        across.align(self.clocks.shifts(across.ranks))


def diagnosed(frames: Iterable[Frame], expected: int | None = None) -> Run:
    """Returns the run after all frames. ``expected`` as for `Run`."""
    run = Run(expected)
    for _ in run.steps(frames):
        pass
    return run


def steps_across_ranks(messages: Iterable[Message], expected: int | None = None) -> Iterator[StepAcrossRanks]:
    """Yields the steps of a run, undiagnosed, each as soon as it is closed. ``expected`` as for `Run`."""
    run = Run(expected, diagnosed=False)
    for message in messages:
        yield from run.apply_message(message)
    yield from run.rest()
