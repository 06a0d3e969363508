"""Why a rank is late, in a sentence: by what differs between it and its peer. And what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddpwatch.analysis.explain.lines import FEWEST_STEPS, WORTH, LineDifference, SampledRank
from ddpwatch.common.text import number, percent
from ddpwatch.sampling.stack_order import EXPLAIN, FIRST_INCIDENT, MOST_PROFILED, MOST_STEPS, RUN_ENDED
from ddpwatch.wire.messages import GPU, OUTSIDE, StackSamples

MATTERS = 0.05  # of a step: other lines do not say whether all take longer
CLEARLY = 0.75  # of what a rank spends more, it computes, or waits
SPREAD = 2.0  # how many times more or less than all others a line may grow, where all grow together
STARVED = 0.1  # more of the time than its peer, a rank waits for a core: that is worth a word, too
ALL_STARVED = 0.2  # of the time, both do; as many as make the node's pressure a cause
MOST_NAMED = 2  # lines, where the second differs by half as much at least
EARLIER = f"next time, run it for longer, or with {EXPLAIN}={FIRST_INCIDENT}, which asks as soon as a rank is late"
MORE_STEPS = 100  # to sample after too few, at least
STACKS = "sample stacks, which say where: `ddpwatch explain --rank {}`"
_SAMPLED = "`ddpwatch explain --rank {} --steps {}`"
_PROFILED = "`ddpwatch explain --rank {} --how profiler --steps {}`"
_LARGER = "a larger batch, or longer sequences?"
_PROFILE = "profile it, which says whether it runs other operators: `ddpwatch explain --rank {} --how profiler`"
_PARAMETERS = "look for parameters that need gradients on one of them alone"
_ENGINE = "_engine_run_backward"  # in which a backward's operators are, as stacks show it
_GRADIENT = "AccumulateGrad"  # called for each parameter that needs one
_ON_DATA = "look at what its forward does that depends on the data: routing, masks, lengths"
_BATCHES = "compare the ranks' batch sizes and lengths of samples"
_NO_CORE = "on its host, `ps -eo pid,pcpu,comm --sort=-pcpu` shows who has the cores: stop what is not the job's"
_SLOW_MACHINE = "its code is not why: look at clocks, power limits and other processes of its device and host"
_WHERE = {
    "forward": "in the forward", "backward": "in the backward", "optimizer": "in the optimizer",
    "sync": "while it waits for its buckets", "data": "as it loads data", "input": "before the forward",
    "between": "after the forward or backward", GPU: "on the GPU",
}  # fmt: skip


def where(line: LineDifference) -> str:
    """Returns in which phase and module a line is; empty if that is not known."""
    phase = _WHERE.get(line.phase, "")
    if line.module and line.phase == "forward":
        return f"{phase} of {line.module}"
    return ", ".join(filter(None, (phase, f"in {line.module}" if line.module else "")))


def sentences(
    own: StackSamples,
    lines: Sequence[LineDifference],
    phases: Sequence[LineDifference],
    ranks: Sequence[SampledRank],
    steps: int,
    inputs: float | None,
) -> tuple[str, str]:
    """Returns the one sentence that matters, others if inputs are larger or a core was missing; and what to do next.

    ``inputs`` is `input_ratio`.
    """
    again = _again(own)
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
    denied, grown, following = _denied(*ranks), _grown(lines, phases), again
    larger = "" if inputs in (None, 1.0) else f"its model's inputs are {_times(inputs)} as large"
    if grown is not None:
        (said, following), larger = _alike(own, grown, inputs), ""
    elif longer:
        said, following = _spends(own, longer, inputs)
        following = (
            _PARAMETERS if any(line.function == _GRADIENT and _calls_more(line) for line in lines) else following
        )
        if denied and not larger and _lacks_a_core(longer, *ranks):
            said, following = f"{said}, as {denied}", _NO_CORE
            denied = ""
        elif not denied:
            said += _computes(lines, longer, *ranks)
    elif (other := _other_operator(lines, ranks[1].step_ms)) is not None:
        said = f"rank {own.rank} runs other operators than rank {own.peer}, at no cost beyond noise: {_calls(other)}"
        following = _PARAMETERS if other.function == _GRADIENT else f"look at what calls {other.place} on one of them"
    elif denied:
        said = f"rank {own.rank} does what rank {own.peer} does"
        following = _BATCHES if larger else again
    else:
        between = "in a line between" if larger else "between"
        said = f"no difference beyond noise {between} rank {own.rank} and rank {own.peer}"
        denied = _both_denied(*ranks)
        following = _BATCHES if larger else f"if it is late, {again}"
    if denied and (again in following or following == _SLOW_MACHINE or said.endswith(_LARGER)):
        following = _NO_CORE
    return "; ".join(filter(None, (said, larger, denied))), following


def cut_short(said: str, following: str, own: StackSamples, peer: StackSamples | None, steps: int) -> tuple[str, str]:
    """Returns what is said, and what to do next, with why fewer steps were sampled than were asked for."""
    why = own.cut_short or ("" if peer is None else peer.cut_short)
    if not why or steps >= own.ordered:
        return said, following
    of_all = f"{steps} of {own.ordered} steps"
    if steps >= FEWEST_STEPS:
        return f"{said}; of {of_all}: {why}", following
    few = f"too few steps of rank {own.rank} were sampled to say why it is late, {of_all}: {why}"
    return few, EARLIER if why == RUN_ENDED else following


def _alike(own: StackSamples, grown: _Grown, inputs: float | None) -> tuple[str, str]:
    """Returns that a rank takes longer in all that it does, and what to do; ``inputs`` is `input_ratio`."""
    why, following = "each takes more" if own.profiler else "all lines take more", _SLOW_MACHINE
    if inputs is None and grown.has_usual_update:
        why, following = _LARGER, _BATCHES
    elif inputs is not None and inputs != 1:
        why, following = f"on inputs {_times(inputs)} as large", _BATCHES if inputs > 1 else _SLOW_MACHINE
    elif inputs is not None:
        why, following = f"{why}, on inputs as large", _ON_DATA if grown.has_usual_update else _SLOW_MACHINE
    does = "runs the same operators" if own.profiler else "does the same"
    return f"rank {own.rank} {does} as rank {own.peer}, {grown.longer}: {why}", following


def _spends(own: StackSamples, longer: Sequence[LineDifference], inputs: float | None) -> tuple[str, str]:
    """Returns where a rank spends more, and what to do; larger inputs let a line grow by their square at most."""
    least = (longer[0].difference_ms or 0.0) / 2
    main = [line for line in longer[:MOST_NAMED] if (line.difference_ms or 0.0) >= least]
    said = f"rank {own.rank} spends {'; '.join([_more(main[0]), *(_more(line, 'ms') for line in main[1:])])}"
    places = list(dict.fromkeys(line.place for line in main))
    do = f"{' and '.join(places)} {'does' if len(places) == 1 else 'do'}"
    following = f"look at what {do} on rank {own.rank}, and not on rank {own.peer}"
    if longer[0].function == OUTSIDE:
        following = STACKS.format(own.rank)
    elif longer[0].inner.endswith(f" in {_ENGINE}"):
        following = _PROFILE.format(own.rank)
    most = (inputs or 1) ** 2 - 1
    if all((line.difference_ms or 0.0) <= most * (line.peer_ms or 0.0) + (line.reach_ms or 0.0) for line in main):
        following = _BATCHES
    return said, following


def _times(ratio: float | None) -> str:
    return f"{number(ratio, 2).rstrip('0').rstrip('.')} times"


def _again(own: StackSamples) -> str:
    """Returns what shows more than this did: clearly more steps, as far as allowed; else the other way to look."""
    steps = len(set(own.slots))
    if own.profiler:
        more, way, most = f"profile more steps: {_PROFILED}", STACKS, MOST_PROFILED
    else:
        more, way, most = f"sample more steps: {_SAMPLED}", _PROFILE, MOST_STEPS
    wanted = min(most, max(MORE_STEPS, 4 * steps))
    return more.format(own.rank, wanted) if 2 * steps <= wanted else way.format(own.rank)


def _is_longer(line: LineDifference) -> bool:
    return line.certain and (line.difference_ms or 0.0) > 0 and line.phase != "sync"


class _Grown(NamedTuple):
    """The phases that take longer, and how many times as long; and whether the update takes as long as ever."""

    longer: str
    has_usual_update: bool


def _grown(lines: Sequence[LineDifference], phases: Sequence[LineDifference]) -> _Grown | None:
    """Returns which phases take longer than the peer's, if all their lines do; None if not."""
    longer = [part for part in phases if _is_longer(part)]
    here, there = sum(part.ms for part in longer), sum(part.peer_ms or 0.0 for part in longer)
    if there <= 0 or len(longer) < 2 or _other_operator(lines, there) is not None:
        return None
    names, more, same = [part.phase for part in longer], here / there - 1, []
    for part in (*phases, *(line for line in lines if line.phase in names)):
        if part.phase == "sync" or max(part.ms, part.peer_ms or 0.0) < MATTERS * there:
            continue
        expected, noise = more * (part.peer_ms or 0.0), max(part.reach_ms or 0.0, WORTH * there)
        if not expected / SPREAD - noise <= (part.difference_ms or 0.0) <= expected * SPREAD + noise:
            if part.phase in names:
                return None
            same.append(part.phase)
    names.sort(key=[*_WHERE, *names].index)
    phases_named = f"{', '.join(names[:-1])} and {names[-1]} " if same else ""
    return _Grown(f"{phases_named}{here / there:.1f} times as long", "optimizer" in same)


def _calls_more(line: LineDifference) -> bool:
    """Returns whether a rank calls an operator more or less often than its peer, in every step."""
    if line.calls is None or line.peer_calls is None or line.phase == "sync":
        return False
    return abs(line.calls - line.peer_calls) >= 1


def _other_operator(lines: Sequence[LineDifference], step_ms: float | None) -> LineDifference | None:
    """Returns one that a rank calls more or less often, that of gradients first, if any is worth a word."""
    others = [line for line in lines if _calls_more(line)]
    if all(max(line.ms, line.peer_ms or 0.0) < WORTH * (step_ms or 0.0) for line in others):
        return None
    return next((line for line in others if line.function == _GRADIENT), others[0])


def _calls(line: LineDifference) -> str:
    said = ", ".join(filter(None, (line.place, where(line))))
    return f"{said}: {number(line.calls, 0)} calls a step, its peer {number(line.peer_calls, 0)}"


def _most(lines: Sequence[LineDifference]) -> str:
    line = lines[0]
    return ", ".join(filter(None, (f"{line.place}: {number(line.ms)} ms a step", where(line))))


def _more(line: LineDifference, unit: str = "ms more a step") -> str:
    if _calls_more(line):
        return f"{number(line.difference_ms)} {unit} in {_calls(line)}"
    place = line.place if line.function == OUTSIDE else f"in {line.place}"
    if line.stalls:
        said = ", ".join(filter(None, (f"{number(line.stall_ms)} ms more {place}", where(line))))
        return f"{said}, in {line.stalls} steps"
    said = ", ".join(filter(None, (f"{number(line.difference_ms)} {unit} {place}", where(line))))
    if line.inner.endswith(f" in {_ENGINE}"):
        return f"{said}: in torch's operators"
    return said


def _computes(lines: Sequence[LineDifference], longer: Sequence[LineDifference], *ranks: SampledRank) -> str:
    """Returns whether a rank computes in what it spends more, or waits there; empty if that is not clear."""
    sync = [line for line in lines if line.phase == "sync"]
    for_buckets = sum(line.ms for line in sync), sum(line.peer_ms or 0.0 for line in sync)
    own, peer = (_waits_ms(rank, ms) for rank, ms in zip(ranks, for_buckets, strict=True))
    if own is None or peer is None or longer[0].phase == GPU:
        return ""
    more_ms = sum(line.difference_ms or 0.0 for line in longer)
    if own - peer >= CLEARLY * more_ms:
        return "; it waits there, and does not compute"
    return "; it computes there" if own - peer <= (1 - CLEARLY) * more_ms else ""


def _waits_ms(rank: SampledRank, for_buckets_ms: float) -> float | None:
    """Returns how long in a step a rank neither runs, nor waits for a core or for its buckets; None if not known."""
    if rank.on_core is None or rank.starved is None or rank.step_ms is None:
        return None
    return max(0.0, (1 - rank.on_core - rank.starved) * rank.step_ms - for_buckets_ms)


def _denied(own: SampledRank, peer: SampledRank) -> str:
    """Returns that the rank had to wait for a core; empty if it had not, or not longer than its peer."""
    if own.starved is None or peer.starved is None or own.starved - peer.starved < STARVED:
        return ""
    return f"it waited for a core for {percent(own.starved)} of the time, rank {peer.rank} for {percent(peer.starved)}"


def _lacks_a_core(longer: Sequence[LineDifference], own: SampledRank, peer: SampledRank) -> bool:
    """Returns whether a rank clearly waited for a core, other than its peer, in what it spends more in its lines.

    Not if it does more work: if it calls operators more often, or ran for half of that longer.
    """
    if any(map(_calls_more, longer)):
        return False
    more_ms = sum(line.difference_ms or 0.0 for line in longer)
    waited_ms, ran_ms = (
        (here or 0.0) * (own.step_ms or 0.0) - (there or 0.0) * (peer.step_ms or 0.0)
        for here, there in ((own.starved, peer.starved), (own.on_core, peer.on_core))
    )
    return CLEARLY * more_ms <= waited_ms and 2 * ran_ms <= more_ms


def _both_denied(own: SampledRank, peer: SampledRank) -> str:
    """Returns that both ranks had to wait for a core for long; empty if they had not."""
    if own.starved is None or peer.starved is None or min(own.starved, peer.starved) < ALL_STARVED:
        return ""
    return f"both waited for a core, for {percent(own.starved)} and {percent(peer.starved)} of the time"
