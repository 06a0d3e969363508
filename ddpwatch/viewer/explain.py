"""Why a rank of a live run is late: which ranks to sample, and what their samples show."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.incident_news import message_text
from ddpwatch.analysis.diagnosis.words.turned_off import Off
from ddpwatch.analysis.explain.explanation import Explanation, explain, explain_hang
from ddpwatch.analysis.explain.sentences import EARLIER
from ddpwatch.common.text import spans
from ddpwatch.common.units import NS_PER_S
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.sampling.lease import LEAD_STEPS
from ddpwatch.sampling.stack_order import LEAD_NS, MOST_PROFILED, MOST_STEPS, PARTIAL, StackOrder
from ddpwatch.viewer.live_source import LiveSource, snapshot
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import PROFILES, STACK_SAMPLES, WATCHING, StackSamples, Status, Step
from ddpwatch.wire.transport import Frame

NOBODY_LATE = "no rank is named late"
SAMPLED_S = 3.0  # unless a number of steps is given,
PERIOD_S = 60.0  # or the rank is late, or pauses, in every so many steps: then so long at most
SAMPLED_STEPS = 10  # at least; the same
HANG_S = 3.0  # without a step, before something is ordered
RECENT_STEPS = 50  # by which it is judged what a step takes, as everywhere in the dashboard
ANSWER_S = 10.0  # beyond what the steps take twice


@dataclass(slots=True)
class StackRequest:
    """What to sample of a run, and what of that has come.

    Attributes:
        order: The ranks and the steps.
        step_s: How long a step takes.
        clock: A monotonic clock in seconds.
        since_s: When it was asked for, or ranks last had another order.
    """

    order: StackOrder
    step_s: float
    clock: Callable[[], float]
    since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.since_s = self.clock()

    @property
    def text(self) -> str:
        """What is under way."""
        order = self.order
        beside = "" if order.compared_with is None else f" and rank {order.peer}"
        how = "profiling" if order.profiler else "sampling"
        takes_s = LEAD_NS / NS_PER_S + (LEAD_STEPS + order.steps) * self.step_s
        return f"{how} rank {order.rank}{beside} for {order.steps} steps, some {takes_s:.0f} s"

    def is_over(self, state: RunState) -> bool:
        """Returns whether no more samples will come: all are there, some cannot come any more, or it takes too long."""
        status, now_s = state.status, self.clock()
        if status is not None and status.order not in (0, self.order.number):
            self.since_s = now_s
        has_all = state.explanations.answer(self.order.number).keys() >= {self.order.rank, self.order.peer}
        if has_all or state.end is not None or self._off(state) is not None:
            return True
        step_s = max(self.step_s, _step_s(state, self.order.rank))
        return now_s - self.since_s > 2 * self.order.steps * step_s + ANSWER_S

    def answer(self, state: RunState) -> Explanation:
        """Returns what the samples show.

        Raises:
            DdpwatchError: None have come.
        """
        result = explain(state.explanations.answer(self.order.number).values())
        if result is not None:
            return result
        if (off := self._off(state)) is not None:
            raise DdpwatchError(off.message, "the job goes on")
        if state.end is not None:
            raise DdpwatchError("the run ended before its ranks had sent any samples", EARLIER)
        raise DdpwatchError(
            f"rank {self.order.rank} has sent no samples",
            "it does not go on, is watched by an older ddpwatch, or its node has no memory that processes share",
        )

    def _off(self, state: RunState) -> Off | None:
        """Returns why a rank of the order takes no samples, if that is known."""
        needed = (WATCHING, PROFILES if self.order.profiler else STACK_SAMPLES)
        off = (off for off in state.off.found() if off.feature in needed)
        return next((each for each in off if {self.order.rank, self.order.peer} & set(each.ranks)), None)


def explain_live(
    source: LiveSource,
    rank: int | None,
    peer: int | None,
    steps: int | None,
    say: Callable[[str], object],
    profiler: bool = False,
) -> tuple[Explanation, list[StackSamples]]:
    """Orders samples of a rank's stacks and of a peer's; returns what they show, and them. In a hang, where ranks are.

    Args:
        source: A new one. Closed at the end.
        rank: The rank to explain; None for the one that is late.
        peer: The rank to compare it with; None for one that is not late.
        steps: How many; None for some seconds of them.
        say: Takes what is under way, a line.
        profiler: Whether torch's profiler is used instead.

    Raises:
        UsageError: There is no such rank, or none is late.
        DdpwatchError: No samples have come.
    """
    state = RunState()
    try:
        for message, envelope in snapshot(source):
            state.apply_message(message, envelope.received_ns, envelope.frame)
        over = _over(state, rank)
        hang = hang_of(state.diagnosis.incidents()) if over else _hang_found(source, state)
        if hang is not None:
            return explain_hang(hang), []
        if over and (kept := [found for found in state.explanations.all() if rank in (None, found.rank)]):
            return kept[-1], []
        request = request_of(state, rank, peer, steps, profiler=profiler)
        say(request.text)
        source.order_stacks(request.order)
        while not request.is_over(state) and not source.over:
            for message, envelope in source.read(0.2):
                state.apply_message(message, envelope.received_ns, envelope.frame)
    finally:
        source.close()
    return request.answer(state), list(state.explanations.answer(request.order.number).values())


def _over(state: RunState, rank: int | None) -> str:
    """Returns that the run, or that rank, has ended; empty as long as it goes on."""
    if state.end is not None:
        return "the run has ended"
    known = None if rank is None else state.ranks.get(rank)
    return "" if known is None or known.bye is None else f"rank {rank} has ended"


def _hang_found(source: LiveSource, state: RunState) -> Incident | None:
    """Returns the hang that lasts. One shows in heartbeats that come from now on, unless a step comes.

    Once it shows, waits for one more status: some ranks' stacks may arrive a moment later.
    """
    hang = hang_of(state.diagnosis.incidents())
    for message, envelope in _frames(source, HANG_S):
        state.apply_message(message, envelope.received_ns, envelope.frame)
        if isinstance(message, Step) and hang is None:
            break
        if isinstance(message, Status):  # twice a second
            before, hang = hang, hang_of(state.diagnosis.incidents())
            if before is not None:
                break
    return hang


def hang_of(incidents: Iterable[Incident]) -> Incident | None:
    """Returns the hang that lasts, if one does: in it, no step can be sampled."""
    return next((one for one in incidents if one.kind == "hang" and one.open), None)


def do_samples_say_why(incident: Incident) -> bool:
    """Returns whether it is ranks' lateness, and not once: where they spend time may show why."""
    return bool(incident.ranks) and (KINDS[incident.kind].late or incident.period is not None)


def fatal_to(incidents: Iterable[Incident], rank: int | None) -> Incident | None:
    """Returns the death or hang that ended a run; None without one, or if that rank was late before."""
    found = list(incidents)
    if any(rank in one.ranks and do_samples_say_why(one) for one in found):
        return None
    return next((one for one in found if one.severity == "error" and not do_samples_say_why(one)), None)


def request_of(
    state: RunState,
    rank: int | None,
    peer: int | None = None,
    steps: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    profiler: bool = False,
) -> StackRequest:
    """Returns what to ask of a run; the arguments and errors are those of `explain_live`."""
    if state.status is not None and state.status.whole:
        raise UsageError(
            "this host shows only its own ranks, and gives them no orders",
            state.status.whole.replace("attach", "explain", 1),
        )
    late = _late_ranks(state)
    if over := _over(state, rank):
        if (fatal := fatal_to(state.diagnosis.incidents(), rank)) is not None:
            raise UsageError(f"{over}: {message_text(fatal)}", fatal.next_step)
        raise UsageError(over, EARLIER)
    if rank is None:
        if not late:
            raise UsageError(NOBODY_LATE, _choice(_watched(state)))
        rank = late[0]
    if peer is None:
        least_late = {other: at for at, other in enumerate(late)}
        peer = max(_alike(state, rank), key=lambda other: least_late.get(other, len(late)), default=rank)
    for each in (rank, peer):
        if each not in state.ranks or not state.ranks[each].watched:
            raise UsageError(f"there is no rank {each} that is watched", f"there are {_named(_watched(state))}")
    step_s = _step_s(state, rank)
    if profiler:
        wanted = min(steps or MOST_PROFILED, MOST_PROFILED)
    else:
        usual = max(SAMPLED_STEPS, ceil(SAMPLED_S / step_s), _period(state, rank, step_s))
        wanted = min((steps or usual) + PARTIAL, MOST_STEPS)
    order = StackOrder(secrets.randbelow((1 << 32) - 1) + 1, rank, peer, wanted, profiler=profiler)
    return StackRequest(order, step_s, clock)


def _late_ranks(state: RunState) -> list[int]:
    """Returns the ranks that are late now, or were: those of the worst incident first."""
    late = [one for one in state.diagnosis.incidents() if KINDS[one.kind].late and one.ranks]
    late.sort(key=lambda incident: not incident.open)
    return list(dict.fromkeys(rank for incident in late for rank in incident.ranks))


def _period(state: RunState, rank: int, step_s: float) -> int:
    """Returns every how many steps the rank strikes at the longest; 0 if it has no rhythm, or a very slow one."""
    own = (one.period or 0 for one in state.diagnosis.incidents() if one.ranks == (rank,) and one.open)
    return max((period for period in own if period * step_s <= PERIOD_S), default=0)


def _watched(state: RunState) -> list[int]:
    return [rank for rank, known in state.ranks.items() if known.watched]


def _alike(state: RunState, rank: int) -> list[int]:
    """Returns the other ranks of the rank's groups that are watched; those of its own host first."""
    groups = [set(state.groups.members(group) or ()) for group in state.groups.of_rank(rank)]
    others = [other for other in _watched(state) if other != rank and any(other in group for group in groups)]
    return sorted(others, key=lambda other: _host(state, other) != _host(state, rank))


def _host(state: RunState, rank: int) -> str:
    known = state.ranks.get(rank)
    return "" if known is None or known.hello is None else known.hello.host


def _choice(ranks: Sequence[int]) -> str:
    """Returns how to choose a rank, by one that there is."""
    if not ranks:
        return "no rank is watched"
    first, last = min(ranks), max(ranks)
    return f"choose one, e.g. --rank {last}" + (f", and --with {first} to compare it with" if first != last else "")


def _named(ranks: Sequence[int]) -> str:
    return f"the ranks {spans(ranks, gap=', ')}" if ranks else "none"


def _step_s(state: RunState, rank: int) -> float:
    newest = [across.longest_ns for across in state.steps.values() if across.ordinary and rank in across.members]
    if not newest:
        raise UsageError(f"rank {rank} has taken no step yet that counts", "try again in some steps")
    return max(fmean(newest[-RECENT_STEPS:]) / NS_PER_S, 1e-4)


def _frames(source: LiveSource, patience_s: float) -> Iterator[Frame]:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and not source.over:
        yield from source.read(0.2)
