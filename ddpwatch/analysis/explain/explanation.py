"""Why a rank is late: what it does in a step that an alike rank does not, by stacks or profiles of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ddpwatch.analysis.diagnosis.incident import Incident, StackGroup
from ddpwatch.analysis.diagnosis.incident_json import Figures
from ddpwatch.analysis.diagnosis.words.wording import places_of, ranks_named
from ddpwatch.analysis.explain.lines import (
    FEWEST_STEPS,
    LineDifference,
    SampledRank,
    by_phase,
    functions_of,
    input_ratio,
    line_difference,
    sampled_rank,
    stalls_of,
    step_ms_of,
    whole_steps,
    with_calls,
    with_stalls,
)
from ddpwatch.analysis.explain.sentences import STACKS, cut_short, sentences
from ddpwatch.wire.messages import StackSamples

KEPT_ORDERS = 64
SHOWN_LINES = 8  # that differ most: with all else, they fit on 24 lines


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
    shared = whole_steps(own) if peer is None else set(whole_steps(peer))
    slots = [slot for slot in whole_steps(own) if slot in shared]
    here, there = functions_of(own, slots), {} if peer is None else functions_of(peer, slots)
    step_ms, peer_step_ms = step_ms_of(here, slots), None if peer is None else step_ms_of(there, slots)
    keys = {*here, *there}
    compared = peer_step_ms if len(slots) >= FEWEST_STEPS else None
    lines = [line_difference(key, here.get(key), there.get(key), slots, compared, len(keys)) for key in keys]
    if compared is not None:
        apart_ns = (own.end_ns - own.start_ns) / max(own.count, 1)
        stalls = stalls_of(here, there, slots, apart_ns)
        lines = [with_stalls(line, here, there, slots, stalls, len(keys)) for line in lines]
    if own.profiler:
        lines = [with_calls(line, own, here, peer, there) for line in lines]
    lines.sort(key=_more_ms, reverse=True)
    ranks = [sampled_rank(own, step_ms, slots), *([] if peer is None else [sampled_rank(peer, peer_step_ms, slots)])]
    parts, peer_parts = by_phase(here), by_phase(there)
    phases = [
        line_difference(key, part, peer_parts.get(key), slots, compared, len(parts)) for key, part in parts.items()
    ]
    obstacle = next((each for each in (own, peer) if each is not None and each.obstacle), None)
    if obstacle is None:
        text, following = sentences(own, lines, phases, ranks, len(slots), input_ratio(own, peer, slots))
        text, following = cut_short(text, following, own, peer, len(slots))
    else:
        text = f"rank {obstacle.rank} was not profiled: {obstacle.obstacle}"
        following = STACKS.format(own.rank)
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
    if hang.evidence.why == "mismatch":  # nobody holds up the others
        following = hang.next_step
    return Explanation(rank, None, 0, text, (), (), stacks, following)


def _more_ms(line: LineDifference) -> float:
    return line.ms if line.difference_ms is None else line.difference_ms


def _is_sound(samples: StackSamples) -> bool:
    columns = ((samples.sample_slot, samples.slots), (samples.sample_line, samples.lines))
    if samples.profiler and len(samples.calls) != len(samples.lines):
        return False
    if samples.input_elements and len(samples.input_elements) != len(samples.slots):
        return False
    return all(min(column, default=0) >= 0 and max(column, default=-1) < len(table) for column, table in columns)
