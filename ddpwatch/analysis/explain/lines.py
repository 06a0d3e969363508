"""Differences between two ranks in a step: of each line of code or operator, and of each rank.

Each function of the user's code gets the time of its samples in each step, by phase, in all modules together: in a
model of many layers, none of them may differ by more than chance alone. In a profile, each operator has its own. Two
ranks are compared step by step. A difference counts if it is beyond chance (Student's t on steps, and on the means of
stretches of steps, as neighbours may be alike; the widest interval counts, and the confidence holds for all lines
together), and worth a word. Of a rank that is late in some steps only, means say little: there, a line counts that most
of the time goes to in these steps, more often than its share of the others makes likely.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from math import comb, sqrt
from statistics import fmean, median, stdev
from typing import NamedTuple, TypeVar

from msgspec import structs

from ddpwatch.analysis.diagnosis.incident_json import Figures
from ddpwatch.common.statistics import student
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.wire.messages import GPU, StackSamples

CONFIDENCE = 0.99  # that no line differs by chance alone
WORTH = 0.02  # of the peer's step
FEWEST_STEPS = 5
SAMPLES_OFF = 3  # with up to 1.5 before each, at most so much of two steps is the next one's, or that before's
FEWEST_STALLS = 2  # to say what a rank does in them
STRETCHES = (20, 10)  # of steps, at most
_Of = TypeVar("_Of")


class LineDifference(Figures, frozen=True):
    """A function of the user's code, in one phase, or an operator; ``line`` is where it differs most.

    ``module`` is the one in which most of the difference is, or the common part of their names where it is in several.

    Times are ms a step, of the explained rank and its peer. ``reach_ms`` is half the width of the difference's
    interval, ``certain`` whether it is beyond chance, and worth a word. ``inner`` is what it mostly calls there.
    ``calls`` are those of an operator in a step. ``stalls`` are the steps that alone show it, each by ``stall_ms``.
    """

    phase: str
    module: str
    file: str
    line: int
    function: str
    inner: str
    ms: float
    peer_ms: float | None
    difference_ms: float | None
    reach_ms: float | None
    certain: bool
    calls: float | None = None
    peer_calls: float | None = None
    stalls: int | None = None
    stall_ms: float | None = None

    @property
    def place(self) -> str:
        """The function, with its file and line, or the operator."""
        if self.calls is not None:
            return self.function or "other operators"
        return f"{self.function}() ({self.file}:{self.line})" if self.function else "other lines"


class SampledRank(Figures, frozen=True):
    """A rank's samples, and what the operating system says of its training thread for the same time.

    ``step_ms`` is a sampled step's mean. ``cost`` is the sampling's CPU time, or by how much a profile made the steps
    longer, ``on_core`` how long the thread ran, and ``starved`` how long it waited for a core: shares of the time.
    ``input_elements`` are those of the tensors that the model is called with in a step.
    """

    rank: int
    samples: int
    seconds: float
    step_ms: float | None
    longest_ms: float | None
    cost: float | None
    on_core: float | None
    starved: float | None
    preempted: int | None
    major_faults: int | None
    input_elements: float | None


class Key(NamedTuple):
    """A function in a phase, or an operator."""

    phase: str
    file: str
    function: str


@dataclass(slots=True)
class Function:
    """The ns of a rank's samples in a function, by step, module, line, and by what it calls; an operator's calls."""

    by_slot: Counter[int] = field(default_factory=Counter)
    by_module: Counter[str] = field(default_factory=Counter)
    by_line: Counter[int] = field(default_factory=Counter)
    by_inner: Counter[str] = field(default_factory=Counter)
    calls: int = 0


def whole_steps(samples: StackSamples) -> list[int]:
    """Returns the steps that were sampled whole: without bare ones, whose phases are unknown, if there are others."""
    if samples.profiler:
        return list(dict.fromkeys(samples.slots))
    whole = list(dict.fromkeys(samples.slots))[1:-1]
    columns = zip(samples.sample_slot, samples.sample_line, strict=True)
    bare = {samples.slots[slot] for slot, line in columns if not samples.lines[line].phase}
    return [slot for slot in whole if slot not in bare] or whole


def functions_of(samples: StackSamples, slots: Sequence[int]) -> dict[Key, Function]:
    """Returns what a rank spends in each function in these steps."""
    found: defaultdict[Key, Function] = defaultdict(Function)
    wanted = set(slots)
    for place, at, ns in zip(samples.sample_slot, samples.sample_line, samples.sample_ns, strict=True):
        slot, line = samples.slots[place], samples.lines[at]
        if slot in wanted:
            function = found[Key(line.phase, line.file, line.function)]
            function.by_slot[slot] += ns
            function.by_module[line.module] += ns
            function.by_line[line.line] += ns
            function.by_inner[line.inner] += ns
    for line, calls in zip(samples.lines, samples.calls, strict=False):
        found[Key(line.phase, line.file, line.function)].calls += calls
    return dict(found)


def by_phase(functions: Mapping[Key, Function]) -> dict[Key, Function]:
    """Returns the time of each phase, in whichever function."""
    found: defaultdict[Key, Function] = defaultdict(Function)
    for key, function in functions.items():
        found[Key(key.phase, "", "")].by_slot += function.by_slot
    return dict(found)


def with_calls(
    line: LineDifference,
    own: StackSamples,
    here: Mapping[Key, Function],
    peer: StackSamples | None,
    there: Mapping[Key, Function],
) -> LineDifference:
    """Adds how often an operator is called in a step."""
    key = Key(line.phase, line.file, line.function)

    def of(samples: StackSamples, functions: Mapping[Key, Function]) -> float:
        return functions[key].calls / max(1, len(samples.slots)) if key in functions else 0.0

    return structs.replace(line, calls=of(own, here), peer_calls=None if peer is None else of(peer, there))


def step_ms_of(functions: Mapping[Key, Function], slots: Sequence[int]) -> float | None:
    """Returns the mean duration of a step; None without one."""
    total = sum(function.by_slot.total() for key, function in functions.items() if key.phase != GPU)  # beside the host
    return total / len(slots) / NS_PER_MS if slots else None


def line_difference(
    key: Key, own: Function | None, peer: Function | None, slots: Sequence[int], step_ms: float | None, lines: int
) -> LineDifference:
    """Compares a function; ``step_ms`` is the peer's step, None if there is nothing to compare."""
    own, other = own or Function(), peer or Function()
    here, there = ([each.by_slot[slot] / NS_PER_MS for slot in slots] for each in (own, other))
    difference: float | None = None
    reach: float | None = None
    most, by_line, by_module, certain = own, own.by_line, own.by_module, False
    if step_ms is not None:
        difference, reach = _difference([a - b for a, b in zip(here, there, strict=True)], lines)
        certain = abs(difference) > max(reach, WORTH * step_ms)
        most, least = (own, other) if difference >= 0 else (other, own)
        by_line, by_module = _minus(most.by_line, least.by_line), _minus(most.by_module, least.by_module)
    return LineDifference(
        key.phase,
        _module(by_module),
        key.file,
        max(by_line, key=by_line.__getitem__, default=0),
        key.function,
        max(most.by_inner, key=most.by_inner.__getitem__, default=""),
        fmean(here) if slots else 0.0,
        None if step_ms is None else fmean(there),
        difference,
        reach,
        certain,
    )


def stalls_of(
    here: Mapping[Key, Function], there: Mapping[Key, Function], slots: Sequence[int], sample_ns: float
) -> dict[int, int]:
    """Returns by how much (ns) a rank takes longer than its peer, where that is more than the peer's usual step.

    Waits for buckets do not count: in them, one rank waits for the other. Nor do differences that come from when the
    samples were taken, ``sample_ns`` apart.
    """
    own, peer = (
        [sum(function.by_slot[slot] for key, function in functions.items() if key.phase != "sync") for slot in slots]
        for functions in (here, there)
    )
    least = median(peer) + SAMPLES_OFF * sample_ns if peer else 0.0
    return {slot: a - b for slot, a, b in zip(slots, own, peer, strict=True) if a - b > least}


def with_stalls(
    line: LineDifference,
    here: Mapping[Key, Function],
    there: Mapping[Key, Function],
    slots: Sequence[int],
    stalls: Mapping[int, int],
    lines: int,
) -> LineDifference:
    """Returns a line as certain if it takes most of several stalls, and that is not by chance.

    By chance, a stall is in a line as often as the line's share of all other time says.
    """
    key = Key(line.phase, line.file, line.function)
    own, peer = here.get(key, Function()).by_slot, there.get(key, Function()).by_slot
    more = {slot: own[slot] - peer[slot] for slot, ns in stalls.items() if 2 * (own[slot] - peer[slot]) > ns}
    if line.certain or len(more) < FEWEST_STALLS or (line.difference_ms or 0.0) <= 0:
        return line
    others = [slot for slot in slots if slot not in stalls]
    all_ns = sum(function.by_slot[slot] for function in here.values() for slot in others)
    share = max(sum(own[slot] for slot in others), all_ns / max(len(others), 1)) / max(all_ns, 1)  # a step's at least
    chance = lines * comb(len(stalls), len(more)) * share ** len(more)
    if chance > 1 - CONFIDENCE:
        return line
    return structs.replace(
        line, certain=True, reach_ms=None, stalls=len(more), stall_ms=fmean(more.values()) / NS_PER_MS
    )


def _minus(these: Counter[_Of], those: Counter[_Of]) -> Counter[_Of]:
    found = Counter(these)
    found.subtract(those)
    return found


def _module(ns: Counter[str]) -> str:
    """Returns the module with more than half of the time, or what has all that do have some; "" without one."""
    module = max(ns, key=ns.__getitem__, default="")
    if 2 * ns[module] > ns.total():
        return module
    paths = [name.split(".") for name, its in ns.items() if its > 0]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in shared)


def _difference(differences: Sequence[float], lines: int) -> tuple[float, float]:
    """Returns the mean, and half the width of its interval, of which there are so many at once.

    It is the widest: a few stretches may be alike by chance, and hide how much the steps vary.
    """
    counts = {min(count, len(differences)) for count in (len(differences), *STRETCHES)}
    return fmean(differences), max(_reach(differences, count, lines) for count in counts)


def _reach(differences: Sequence[float], count: int, lines: int) -> float:
    """Returns half the width of the interval by that many stretches."""
    ends = [len(differences) * part // count for part in range(count + 1)]
    stretches = [fmean(differences[since:until]) for since, until in pairwise(ends)]  # none is left out
    return student(1 - (1 - CONFIDENCE) / lines, count - 1) * stdev(stretches) / sqrt(count)


def _inputs(samples: StackSamples, slots: Sequence[int]) -> list[int]:
    """Returns the elements of the model's inputs in each step; nothing if they are not known of all."""
    elements = dict(zip(samples.slots, samples.input_elements, strict=False))
    known = [elements.get(slot, 0) for slot in slots]
    return known if all(known) else []


def input_ratio(own: StackSamples, peer: StackSamples | None, slots: Sequence[int]) -> float | None:
    """Returns how many times as large the model's inputs are as the peer's, 1 by chance alone; None if unknown."""
    here, there = _inputs(own, slots), [] if peer is None else _inputs(peer, slots)
    if len(slots) < FEWEST_STEPS or not (here and there):
        return None
    more, reach = _difference([a - b for a, b in zip(here, there, strict=True)], 1)
    return fmean(here) / fmean(there) if abs(more) > max(reach, WORTH * fmean(there)) else 1.0


def sampled_rank(samples: StackSamples, step_ms: float | None, slots: Sequence[int]) -> SampledRank:
    """Returns what is known of a rank in these steps."""
    span_ns = samples.end_ns - samples.start_ns
    share = {
        name: None if ns is None or span_ns <= 0 else ns / span_ns
        for name, ns in (("cost", samples.cpu_ns), ("run", samples.run_ns), ("wait", samples.wait_ns))
    }
    return SampledRank(
        rank=samples.rank,
        samples=samples.count,
        seconds=span_ns / 1e9,
        step_ms=step_ms,
        longest_ms=None if samples.profiler else samples.longest_ns / NS_PER_MS,
        cost=share["cost"],
        on_core=share["run"],
        starved=share["wait"],
        preempted=samples.preempted,
        major_faults=samples.major_faults,
        input_elements=fmean(known) if (known := _inputs(samples, slots)) else None,
    )
