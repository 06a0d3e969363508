"""Why a rank is late: what it does in a step that an alike rank does not, by stacks or profiles of both.

Each function of the user's code gets the time of its samples in each step, by phase, in all modules together: in a
model of many layers, none of them may differ by more than chance alone. In a profile, each operator has its own. Two
ranks are compared step by step. A difference counts if it is beyond chance (Student's t on the means of stretches of steps, as
neighbours are alike; the confidence holds for all lines together), and worth a word.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from math import sqrt
from statistics import fmean, stdev
from typing import Literal, NamedTuple, TypeVar

from msgspec import structs

from ddpwatch.analysis.diagnosis.incident import Incident, StackGroup
from ddpwatch.analysis.diagnosis.incident_json import Figures
from ddpwatch.analysis.diagnosis.words.wording import places_of, ranks_named
from ddpwatch.common.statistics import student
from ddpwatch.common.text import number, percent
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.sampling.stack_order import MOST_PROFILED, MOST_STEPS
from ddpwatch.wire.messages import GPU, OUTSIDE, StackSamples

CONFIDENCE = 0.99  # that no line differs by chance alone
WORTH = 0.02  # of the peer's step
FEWEST_STEPS = 5
STRETCHES = 20  # of steps, at most
MATTERS = 0.05  # of a step: other lines do not say whether all take longer
SPREAD = 2.0  # how many times more or less than all others a line may grow, where all grow together
STARVED = 0.1  # more of the time than its peer, a rank waits for a core: that is worth a word, too
KEPT_ORDERS = 64
SHOWN_LINES = 8  # that differ most: with all else, they fit on 24 lines
MOST_NAMED = 2  # of them, where the second differs by half as much at least
MORE_STEPS = 100  # to sample after too few, at least
_Of = TypeVar("_Of")
_LARGER = "a larger batch, or longer sequences?"
_BATCHES = "compare the ranks' batch sizes and lengths of samples"
_NO_CORE = "on its host, `ps -eo pid,pcpu,comm --sort=-pcpu` shows who has the cores: stop what is not the job's"
_SLOW_MACHINE = "its code is not why: look at clocks, power limits and other processes of its device and host"
_STACKS = "sample stacks, which say where: `ddpwatch explain --rank {}`"
_WHERE = {
    "forward": "in the forward", "backward": "in the backward", "optimizer": "in the optimizer",
    "sync": "while it waits for its buckets", "input": "before the forward", "between": "after the forward or backward",
    GPU: "on the GPU",
}  # fmt: skip


class LineDifference(Figures, frozen=True):
    """A function of the user's code, in one phase, or an operator; ``line`` is where it differs most.

    ``module`` is the one in which most of the difference is, or what has all modules where it is.

    Times are ms a step, of the explained rank and its peer. ``reach_ms`` is half the width of the difference's
    interval, ``certain`` whether it is beyond chance, and worth a word. ``inner`` is what it mostly calls there.
    ``calls`` are those of an operator in a step.
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


class Explanation(Figures, frozen=True):
    """Why a rank is late; ``lines`` by what it spends more in them, without a peer by what it spends.

    In a hang, nothing is sampled: ``stacks`` are where ranks stand still. ``next_step`` is what to do after that. With
    ``how`` "profiler", lines are operators.
    """

    rank: int
    peer: int | None
    steps: int
    text: str
    ranks: Sequence[SampledRank]
    lines: Sequence[LineDifference]
    stacks: Sequence[StackGroup] = ()
    next_step: str = ""
    how: Literal["stacks", "profiler"] = "stacks"


class _Key(NamedTuple):
    phase: str
    file: str
    function: str


@dataclass(slots=True)
class _Function:
    """The ns of a rank's samples in a function, by step, module, line, and by what it calls; an operator's calls."""

    by_slot: Counter[int] = field(default_factory=Counter)
    by_module: Counter[str] = field(default_factory=Counter)
    by_line: Counter[int] = field(default_factory=Counter)
    by_inner: Counter[str] = field(default_factory=Counter)
    calls: int = 0


class Explanations:
    """Gathers the samples of a run, and explains the ranks."""

    def __init__(self) -> None:
        self._orders: dict[int, dict[int, StackSamples]] = {}
        self._explained: dict[int, Explanation | None] = {}  # as far as nothing has come since

    def add_samples(self, samples: StackSamples) -> None:
        """Takes a rank's samples, if their steps and lines are those that they name."""
        if _is_sound(samples):
            self._orders.setdefault(samples.order, {})[samples.rank] = samples
            self._explained.pop(samples.order, None)
            if len(self._orders) > KEPT_ORDERS:
                oldest = next(iter(self._orders))
                del self._orders[oldest]
                self._explained.pop(oldest, None)

    def answer(self, order: int) -> Mapping[int, StackSamples]:
        """Returns by rank what has come for an order."""
        return self._orders.get(order, {})

    def all(self) -> list[Explanation]:
        """Returns the explanations, oldest first."""
        for order, answer in self._orders.items():
            if order not in self._explained:
                self._explained[order] = explain(answer.values())
        return [found for order in self._orders if (found := self._explained[order]) is not None]

    def next_steps(self) -> dict[int, tuple[int, str]]:
        """Returns, of each rank that was explained last, its newest step that was sampled, and what to do now."""
        self.all()
        known = [(order, found) for order, found in self._explained.items() if found is not None]
        slots = {order: self._orders[order][found.rank].slots for order, found in known}
        return {found.rank: (max(slots[order], default=-1), found.next_step) for order, found in known}


def explain(samples: Iterable[StackSamples]) -> Explanation | None:
    """Returns why a rank is late, given the samples of one order; None without those of the rank to explain."""
    of_ranks = {each.rank: each for each in samples}
    own = next((each for each in of_ranks.values() if each.rank == each.explained), None)
    if own is None:
        return None
    peer = None if own.peer is None else of_ranks.get(own.peer)
    shared = _whole(own) if peer is None else set(_whole(peer))
    slots = [slot for slot in _whole(own) if slot in shared]
    here, there = _functions(own, slots), {} if peer is None else _functions(peer, slots)
    step_ms, peer_step_ms = _step_ms(here, slots), None if peer is None else _step_ms(there, slots)
    keys = {*here, *there}
    compared = peer_step_ms if len(slots) >= FEWEST_STEPS else None
    lines = [_line(key, here.get(key), there.get(key), slots, compared, len(keys)) for key in keys]
    if own.profiler:
        lines = [_with_calls(line, own, here, peer, there) for line in lines]
    lines.sort(key=_more_ms, reverse=True)
    ranks = [_rank(own, step_ms), *([] if peer is None else [_rank(peer, peer_step_ms)])]
    parts, peer_parts = _by_phase(here), _by_phase(there)
    phases = [_line(key, part, peer_parts.get(key), slots, compared, len(parts)) for key, part in parts.items()]
    obstacle = next((each for each in (own, peer) if each is not None and each.obstacle), None)
    if obstacle is None:
        text, following = _answer(own, lines, phases, ranks, len(slots))
    else:
        text = f"rank {obstacle.rank} was not profiled: {obstacle.obstacle}"
        following = _STACKS.format(own.rank)
    shown = sorted(lines, key=lambda line: abs(_more_ms(line)), reverse=True)[:SHOWN_LINES]
    shown.sort(key=_more_ms, reverse=True)
    compared_with = None if peer is None else peer.rank
    how: Literal["stacks", "profiler"] = "profiler" if own.profiler else "stacks"
    return Explanation(own.rank, compared_with, len(slots), text, ranks, shown, next_step=following, how=how)


def explain_hang(hang: Incident) -> Explanation:
    """Returns who holds up whom, and where."""
    stacks = hang.evidence.stacks or ()
    rank = next(iter([*hang.ranks, *(rank for group in stacks for rank in group.ranks)]), 0)
    text = f"hang: {'; '.join([hang.message, *places_of(stacks, hang.ranks)])}"
    held = next((group for group in stacks if group.site and set(group.ranks) & set(hang.ranks)), None)
    following = "" if held is None else f"find out why {ranks_named(held.ranks)} does not go on from {held.site}"
    return Explanation(rank, None, 0, text, (), (), stacks, following)


def _more_ms(line: LineDifference) -> float:
    return line.ms if line.difference_ms is None else line.difference_ms


def _is_sound(samples: StackSamples) -> bool:
    columns = ((samples.sample_slot, samples.slots), (samples.sample_line, samples.lines))
    if samples.profiler and len(samples.calls) != len(samples.lines):
        return False
    return all(min(column, default=0) >= 0 and max(column, default=-1) < len(table) for column, table in columns)


def _whole(samples: StackSamples) -> list[int]:
    """Returns the steps that were sampled whole: without bare ones, whose phases are unknown, if there are others."""
    if samples.profiler:
        return list(dict.fromkeys(samples.slots))
    whole = list(dict.fromkeys(samples.slots))[1:-1]
    columns = zip(samples.sample_slot, samples.sample_line, strict=True)
    bare = {samples.slots[slot] for slot, line in columns if not samples.lines[line].phase}
    return [slot for slot in whole if slot not in bare] or whole


def _functions(samples: StackSamples, slots: Sequence[int]) -> dict[_Key, _Function]:
    found: defaultdict[_Key, _Function] = defaultdict(_Function)
    wanted = set(slots)
    for place, at, ns in zip(samples.sample_slot, samples.sample_line, samples.sample_ns, strict=True):
        slot, line = samples.slots[place], samples.lines[at]
        if slot in wanted:
            function = found[_Key(line.phase, line.file, line.function)]
            function.by_slot[slot] += ns
            function.by_module[line.module] += ns
            function.by_line[line.line] += ns
            function.by_inner[line.inner] += ns
    for line, calls in zip(samples.lines, samples.calls, strict=False):
        found[_Key(line.phase, line.file, line.function)].calls += calls
    return dict(found)


def _by_phase(functions: Mapping[_Key, _Function]) -> dict[_Key, _Function]:
    """Returns the time of each phase, in whichever function."""
    found: defaultdict[_Key, _Function] = defaultdict(_Function)
    for key, function in functions.items():
        found[_Key(key.phase, "", "")].by_slot += function.by_slot
    return dict(found)


def _with_calls(
    line: LineDifference,
    own: StackSamples,
    here: Mapping[_Key, _Function],
    peer: StackSamples | None,
    there: Mapping[_Key, _Function],
) -> LineDifference:
    """Adds how often an operator is called in a step."""
    key = _Key(line.phase, line.file, line.function)

    def of(samples: StackSamples, functions: Mapping[_Key, _Function]) -> float:
        return functions[key].calls / max(1, len(samples.slots)) if key in functions else 0.0

    return structs.replace(line, calls=of(own, here), peer_calls=None if peer is None else of(peer, there))


def _step_ms(functions: Mapping[_Key, _Function], slots: Sequence[int]) -> float | None:
    total = sum(function.by_slot.total() for key, function in functions.items() if key.phase != GPU)  # beside the host
    return total / len(slots) / NS_PER_MS if slots else None


def _line(
    key: _Key, own: _Function | None, peer: _Function | None, slots: Sequence[int], step_ms: float | None, lines: int
) -> LineDifference:
    """Compares a function; ``step_ms`` is the peer's step, None if there is nothing to compare."""
    own, other = own or _Function(), peer or _Function()
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
    """Returns the mean, and half the width of its interval, of which there are so many at once."""
    count = min(STRETCHES, len(differences))
    ends = [len(differences) * part // count for part in range(count + 1)]
    stretches = [fmean(differences[since:until]) for since, until in pairwise(ends)]  # none is left out
    quantile = student(1 - (1 - CONFIDENCE) / lines, len(stretches) - 1)
    return fmean(differences), quantile * stdev(stretches) / sqrt(len(stretches))


def _rank(samples: StackSamples, step_ms: float | None) -> SampledRank:
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
    )


# -- sentences -------------------------------------------------------------------------------------------------


def where(line: LineDifference) -> str:
    """Returns in which phase and module a line is; empty if that is not known."""
    phase = _WHERE.get(line.phase, "")
    if line.module and line.phase == "forward":
        return f"{phase} of {line.module}"
    return ", ".join(filter(None, (phase, f"in {line.module}" if line.module else "")))


def _answer(
    own: StackSamples,
    lines: Sequence[LineDifference],
    phases: Sequence[LineDifference],
    ranks: Sequence[SampledRank],
    steps: int,
) -> tuple[str, str]:
    """Returns the one sentence that matters, a second one if a core was missing; and what to do next."""
    again = f"sample more steps: `ddpwatch explain --rank {own.rank} --steps {_more_steps(own)}`"
    if own.profiler:
        again = f"profile more steps: `ddpwatch explain --rank {own.rank} --how profiler --steps {MOST_PROFILED}`"
    if not steps:
        beside = "" if own.peer is None else " that its peer has, too"
        return f"rank {own.rank} was not sampled in a whole step{beside}", again
    if own.peer is None or len(ranks) < 2:
        said = f"rank {own.rank} spends most in {_most(lines)}"
        said += "" if own.peer is None else f"; rank {own.peer} has sent no samples"
        return said, f"look at {lines[0].place}, or compare with another rank (--with)"
    if steps < FEWEST_STEPS:
        few = f"too few steps to compare rank {own.rank} with rank {own.peer}"
        return f"{few}: {steps}, of {FEWEST_STEPS} at least", again
    longer = [line for line in lines if _is_longer(line)]
    denied, grown, following = _denied(*ranks), _grown(lines, phases, own.profiler), again
    if grown:
        does = "runs the same operators" if own.profiler else "does the same"
        said = f"rank {own.rank} {does} as rank {own.peer}, {grown}"
        following = _BATCHES if grown.endswith(_LARGER) else _SLOW_MACHINE
    elif longer:
        least = (longer[0].difference_ms or 0.0) / 2
        main = [line for line in longer[:MOST_NAMED] if (line.difference_ms or 0.0) >= least]
        said = f"rank {own.rank} spends {'; '.join([_more(main[0]), *(_more(line, 'ms') for line in main[1:])])}"
        places = list(dict.fromkeys(line.place for line in main))
        do = f"{' and '.join(places)} {'does' if len(places) == 1 else 'do'}"
        following = f"look at what {do} on rank {own.rank}, and not on rank {own.peer}"
        if longer[0].function == OUTSIDE:
            following = _STACKS.format(own.rank)
    elif (other := next(filter(_calls_more, lines), None)) is not None:
        said = f"rank {own.rank} runs other operators than rank {own.peer}, at no cost beyond noise: {_calls(other)}"
        following = f"look at what calls {other.place} on one of them"
    elif denied:
        said = f"rank {own.rank} does what rank {own.peer} does"
    else:
        said = f"no difference beyond noise between rank {own.rank} and rank {own.peer}"
    return (f"{said}; {denied}", following if longer and not grown else _NO_CORE) if denied else (said, following)


def _more_steps(own: StackSamples) -> int:
    return min(MOST_STEPS, max(MORE_STEPS, 4 * len(set(own.slots))))


def _is_longer(line: LineDifference) -> bool:
    return line.certain and (line.difference_ms or 0.0) > 0 and line.phase != "sync"


def _grown(lines: Sequence[LineDifference], phases: Sequence[LineDifference], profiler: bool) -> str:
    """Returns which phases take longer than the peer's, and how many times, if all their lines do; "" if not."""
    longer = [part for part in phases if _is_longer(part)]
    here, there = sum(part.ms for part in longer), sum(part.peer_ms or 0.0 for part in longer)
    if there <= 0 or len(longer) < 2 or any(map(_calls_more, lines)):
        return ""
    names, more, same = [part.phase for part in longer], here / there - 1, []
    for part in (*phases, *(line for line in lines if line.phase in names)):
        if part.phase == "sync" or max(part.ms, part.peer_ms or 0.0) < MATTERS * there:
            continue
        expected, noise = more * (part.peer_ms or 0.0), max(part.reach_ms or 0.0, WORTH * there)
        if not expected / SPREAD - noise <= (part.difference_ms or 0.0) <= expected * SPREAD + noise:
            if part.phase in names:
                return ""
            same.append(part.phase)
    times = f"{here / there:.1f} times as long"
    if not same:
        return f"{times}: each takes more" if profiler else f"{times}: all lines take more"
    names.sort(key=[*_WHERE, *names].index)
    why = _LARGER if "optimizer" in same else "each takes more" if profiler else "all their lines take more"
    return f"{', '.join(names[:-1])} and {names[-1]} {times}: {why}"


def _calls_more(line: LineDifference) -> bool:
    """Returns whether a rank calls an operator more or less often than its peer, in every step."""
    if line.calls is None or line.peer_calls is None or line.phase == "sync":
        return False
    return abs(line.calls - line.peer_calls) >= 1


def _calls(line: LineDifference) -> str:
    said = ", ".join(filter(None, (line.place, where(line))))
    return f"{said}: {number(line.calls, 0)} calls a step, its peer {number(line.peer_calls, 0)}"


def _most(lines: Sequence[LineDifference]) -> str:
    line = lines[0]
    return ", ".join(filter(None, (f"{line.place}: {number(line.ms)} ms a step", where(line))))


def _more(line: LineDifference, unit: str = "ms more a step") -> str:
    said = ", ".join(filter(None, (f"{number(line.difference_ms)} {unit} in {line.place}", where(line))))
    if _calls_more(line):
        return f"{number(line.difference_ms)} {unit} in {_calls(line)}"
    return f"{said}: in Python, or waiting" if line.function == OUTSIDE else said


def _denied(own: SampledRank, peer: SampledRank) -> str:
    """Returns that the rank had to wait for a core; empty if it had not, or not longer than its peer."""
    if own.starved is None or peer.starved is None or own.starved - peer.starved < STARVED:
        return ""
    return f"it waited for a core for {percent(own.starved)} of the time, rank {peer.rank} for {percent(peer.starved)}"
