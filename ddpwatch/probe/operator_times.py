"""Sums up a profile of the training thread: each operator's own time, by step and phase. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from ddpwatch.common.intervals import subtract, total, total_within, union
from ddpwatch.wire.messages import GPU, OUTSIDE, SampledLine, Step
from ddpwatch.wire.profile_trace import ProfiledEvent

MOST_OPERATORS: Final = 256  # others are one line without a name
_OF_NODE: Final = "autograd::engine::evaluate_function: "  # what autograd does around a node, which is part of it
_COLLECTIVES: Final = ("c10d::", "gloo:", "nccl", "record_param_comms")

PhaseTimes = Sequence[tuple[str, int, int]]


class Operator(NamedTuple):
    """An operator in a phase: its calls are summed up."""

    phase: str
    name: str


class OperatorTimes:
    """The time of operators, without that of those inside them.

    Args:
        starts: The steps' slots, with when each started (ns); the last one only ends the one before.
        phases: When each phase was.

    Attributes:
        count: How many events there were in these steps.
        slots: The steps.
    """

    def __init__(self, starts: Sequence[tuple[int, int]], phases: PhaseTimes) -> None:
        self.count = 0
        self.slots = [slot for slot, _ in starts[:-1]]
        self._ends = [at for _, at in starts]
        self._phases = phases
        self._phase_starts = [start for _, start, _ in phases]
        self._calls: Counter[Operator] = Counter()
        self._ns: defaultdict[Operator, Counter[int]] = defaultdict(Counter)

    def add_events(self, events: Iterable[ProfiledEvent]) -> None:
        """Takes all there are: what lies between them is outside of operators."""
        on_host: list[ProfiledEvent] = []
        for event in events:
            if event.on_gpu:
                self._add_event(event, event.end - event.start)
            else:
                on_host.append(event)
        for event, ns in own_times(on_host):
            self._add_event(event, ns)
        covered = union((event.start, event.end) for event in on_host)
        for place, (start, end) in enumerate(pairwise(self._ends)):
            outside = subtract([(start, end)], covered)
            left = total(outside)
            for phase, ns in self._by_phase(outside, start, end):
                self._ns[Operator(phase, OUTSIDE)][place] += ns
                left -= ns
            if left > 0:
                self._ns[Operator("", OUTSIDE)][place] += left

    def _by_phase(self, free: list[tuple[int, int]], since: int, until: int) -> Iterator[tuple[str, int]]:
        for phase, start, end in self._phases:
            if start < until and end > since and (ns := total_within(free, max(start, since), min(end, until))):
                yield phase, ns

    def _add_event(self, event: ProfiledEvent, ns: int) -> None:
        place = bisect_right(self._ends, event.start) - 1
        if not 0 <= place < len(self.slots):
            return
        self.count += 1
        is_collective = event.name.startswith(_COLLECTIVES)
        phase = "sync" if is_collective else GPU if event.on_gpu else self._phase(event.start)
        name = event.name.removeprefix(_OF_NODE).removeprefix("torch::autograd::")
        operator = Operator(phase, name)
        self._calls[operator] += 1
        self._ns[operator][place] += ns

    def _phase(self, at: int) -> str:
        place = bisect_right(self._phase_starts, at) - 1
        return self._phases[place][0] if place >= 0 and at < self._phases[place][2] else ""

    def lines(self) -> list[tuple[SampledLine, int, Counter[int]]]:
        """Returns the operators, those that take longest by their names: calls, and ns by the place of the step."""
        by_time = sorted(self._ns, key=lambda operator: -self._ns[operator].total())
        calls: Counter[Operator] = Counter()
        times: defaultdict[Operator, Counter[int]] = defaultdict(Counter)
        for number, operator in enumerate(by_time):
            named = operator if number < MOST_OPERATORS else operator._replace(name="")
            calls[named] += self._calls[operator]
            times[named].update(self._ns[operator])
        return [
            (SampledLine(operator.phase, "", "", 0, operator.name[:200]), calls[operator], ns)
            for operator, ns in times.items()
        ]


def own_times(events: Iterable[ProfiledEvent]) -> Iterator[tuple[ProfiledEvent, int]]:
    """Yields events, each with its time (ns) without that of the events inside it, in the same lane."""
    ordered = sorted(events, key=lambda event: (event.lane, event.start, -event.end))
    for _, of_thread in groupby(ordered, key=attrgetter("lane")):
        around: list[tuple[ProfiledEvent, int]] = []
        for event in of_thread:
            while around and around[-1][0].end <= event.start:
                yield around.pop()
            if around:
                outer, ns = around.pop()
                around.append((outer, max(0, ns - (min(event.end, outer.end) - event.start))))
            around.append((event, event.end - event.start))
        yield from around


def phases_of(steps: Iterable[Step]) -> list[tuple[str, int, int]]:
    """Returns when each phase of the steps was (ns); nothing of steps on a GPU, whose phases are not the host's."""
    found: list[tuple[str, int, int]] = []
    for step in steps:
        if step.clock_error_ns is not None:
            continue
        at = step.start_ns
        for span in step.spans:
            start, end = step.start_ns + span.start, step.start_ns + span.end
            if start > at:
                found.append(("input" if at == step.start_ns else "between", at, start))
            if end > at:
                found.append((span.phase, max(start, at), end))
                at = end
    return found
