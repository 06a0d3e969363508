"""Why a rank is late: the phase, the bucket and the parameter, gathered over its late steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.incident import ModuleBucket
from ddpwatch.analysis.diagnosis.late.residuals import MANY_RANKS
from ddpwatch.analysis.step import BACKWARD_GATHER, BucketKey, rest_after
from ddpwatch.wire.messages import Step

COMPARED_PHASES = ("data", "between", "forward", "backward", "optimizer", "other")
REFERENCE_RANKS = 4  # whose gradients are compared with the late rank's
KEEP_LATE, KEEP_HOOKED = 128, 16  # newest late steps, and those of them with hook fires
PART_SHARE = 0.2  # of the lateness: a phase that takes so much longer is a part of it


class StepFacts:
    """One step with its split, and what a typical rank spent on each phase (ns)."""

    __slots__ = ("_typical", "across", "split")

    def __init__(self, across: StepAcrossRanks, split: StepSplit) -> None:
        self.across = across
        self.split = split
        self._typical: dict[str, float | None] = {}

    def excess(self, rank: int, peers: Sequence[int]) -> dict[str, int]:
        """Returns how much longer than its peers a rank spent on each phase."""
        own = self.across.figures[rank].phases_ns
        found: dict[str, int] = {}
        for phase in COMPARED_PHASES:
            others = self._others(phase, rank, peers)
            if phase in own and others is not None:
                found[phase] = int(own[phase] - others)
        return found

    def paused_ns(self, rank: int) -> int:
        """Returns how long the rank's marks say that it paused since it launched its last bucket before."""
        return sum(self.split.delays.get(rank, {}).values())

    def _others(self, phase: str, rank: int, peers: Sequence[int]) -> float | None:
        if len(peers) == len(self.across) > MANY_RANKS:
            if phase not in self._typical:
                self._typical[phase] = self._median(phase, peers)
            return self._typical[phase]
        return self._median(phase, [peer for peer in peers if peer != rank])

    def _median(self, phase: str, ranks: Sequence[int]) -> float | None:
        figures = self.across.figures
        values = [value for rank in ranks if (value := figures[rank].phases_ns.get(phase)) is not None]
        return median(values) if values else None


class _LateStep(NamedTuple):
    step: int
    excess: dict[str, int]  # by phase, in ns
    bucket: ModuleBucket | None


class LatenessCause:
    """Why one rank is late.

    Args:
        rank: The rank.
        peers: The ranks of its group.
    """

    def __init__(self, rank: int, peers: Sequence[int]) -> None:
        self._rank = rank
        self._peers = peers
        self._newest: deque[_LateStep] = deque(maxlen=KEEP_LATE)
        self._hooked: deque[tuple[int, dict[int, int]]] = deque(maxlen=KEEP_HOOKED)
        self._batches = 1  # in a step, of which hooks fire in the last one
        self._rest: Counter[str] = Counter()  # what no phase explains (ns), by the phase before

    def add_step(self, facts: StepFacts, late_ns: int) -> None:
        """Takes a late step."""
        across, excess = facts.across, facts.excess(self._rank, self._peers)
        self._newest.append(_LateStep(across.step, excess, _first_late_bucket(across, self._rank, late_ns)))
        if max(excess, key=excess.__getitem__, default="") == "other":
            self._rest.update(rest_after(across.ranks[self._rank]))
        if delays := _delays(across, self._rank, self._peers):
            self._hooked.append((across.step, delays))
            self._batches = max(1, across.ranks[self._rank].micro_steps)

    @property
    def steps(self) -> int:
        """The number of late steps that show it."""
        return len(self._newest)

    def end(self, step: int) -> None:
        """Forgets the steps after that one."""
        for kept in (self._newest, self._hooked):
            while kept and kept[-1][0] > step:
                kept.pop()

    def phase(self, late_ns: float) -> tuple[str, float]:
        """Returns the phase that explains at least half of the lateness, and by how much it is longer (ns).

        "" if none does.
        """
        means = self._excess()
        phase = max(means, key=means.__getitem__, default="")
        return (phase, means[phase]) if phase and 2 * means[phase] >= late_ns else ("", 0.0)

    @property
    def rest_after(self) -> str | None:
        """The phase after which most of the rest comes, in steps whose rest makes it late; None without such steps."""
        return max(self._rest, key=self._rest.__getitem__, default=None)

    def parts(self, late_ns: float) -> dict[str, float]:
        """Returns by how much each phase is longer that makes up a part of the lateness (ns), the largest first.

        None of them if all together do not explain at least half of it.
        """
        parts = sorted((item for item in self._excess().items() if item[1] >= PART_SHARE * late_ns), key=itemgetter(1))
        return dict(reversed(parts)) if 2 * sum(ns for _, ns in parts) >= late_ns else {}

    def _excess(self) -> dict[str, float]:
        """Returns by how much each phase is longer on average (ns)."""
        total = Counter[str]()
        for _, excess, _ in self._newest:
            total.update(excess)
        return {phase: ns / self.steps for phase, ns in total.items()}

    @property
    def bucket(self) -> ModuleBucket | None:
        """The first bucket that it launches late, in most late steps."""
        buckets = Counter(bucket for _, _, bucket in self._newest if bucket is not None)
        return next((bucket for bucket, _ in buckets.most_common(1)), None)

    def param(self, excess_ns: float) -> int | None:
        """Returns the parameter at which gradients become late by half of what the backward is longer.

        Of a step of several batches, that is the backward of one of them. None without such a parameter.
        """
        lost = self._lost()
        worst = max(lost, key=lost.__getitem__, default=None)
        return worst if worst is not None and 2 * lost[worst] * self._batches >= excess_ns else None

    def is_throughout(self, excess_ns: float) -> bool:
        """Returns whether the backward is longer everywhere: each half of its gradients adds a quarter of that."""
        lost = list(self._lost().values())
        halves = lost[: len(lost) // 2], lost[len(lost) // 2 :]
        return bool(lost) and all(4 * sum(half) * self._batches >= excess_ns for half in halves)

    def _lost(self) -> dict[int, float]:
        """Returns how much time each gradient loses, of those that came in most late steps, in firing order."""
        gathered = _gathered(_growth(delays) for _, delays in self._hooked).items()
        return {param: median(own) for param, own in gathered if 2 * len(own) >= len(self._hooked)}


def _growth(delays: Mapping[int, int]) -> dict[int, int]:
    """Returns by how much each gradient is later than the one before it."""
    return {param: at - before for (param, at), before in zip(delays.items(), (0, *delays.values()), strict=False)}


def _gathered(rows: Iterable[Mapping[int, int]]) -> dict[int, list[int]]:
    """Returns the values of each parameter, over all rows."""
    found: dict[int, list[int]] = {}
    for row in rows:
        for param, value in row.items():
            found.setdefault(param, []).append(value)
    return found


def _first_late_bucket(across: StepAcrossRanks, rank: int, late_ns: int) -> ModuleBucket | None:
    """Returns the first bucket, in launch order, that shows at least half of the lateness; an only one is no place."""
    facts, buckets = across.facts_of(rank), across.skew.buckets
    if len({key[:2] for key in facts.keys}) == 1:
        return None
    for position, (key, launch) in enumerate(zip(facts.keys, facts.launch, strict=True)):
        if key in buckets and 2 * (launch - buckets[key].first) >= late_ns:
            return _computed(facts.keys, position)
    return None


def _computed(keys: Sequence[BucketKey], position: int) -> ModuleBucket:
    """Returns the bucket that is computed before a launch. FSDP2 gathers a parameter group while it computes another.

    In the backward, that is the next one to be reduced; in the forward, the one that was gathered before.
    """
    use = keys[position][4]
    if use == BACKWARD_GATHER:
        return next((key[:2] for key in keys[position:] if key[4] == "reduce_scatter"), keys[position][:2])
    if use == "all_gather" and position:
        return keys[position - 1][:2]
    return keys[position][:2]


def _delays(across: StepAcrossRanks, rank: int, peers: Sequence[int]) -> dict[int, int]:
    """Returns how much longer than on its peers each gradient took, in firing order (ns).

    Empty if hooks were not seen.
    """
    own = across.ranks[rank]
    others = [peer for peer in peers if peer != rank][:REFERENCE_RANKS]
    if not own.hook_param or not others:
        return {}
    fires = [_fires(across.ranks[peer]) for peer in others]  # old frames are packed, and decoded at every look
    delays: dict[int, int] = {}
    for param, at in _fires(own).items():
        seen = [fired[param] for fired in fires if param in fired]
        if seen:
            delays[param] = at - int(median(seen))
    return delays


def _fires(step: Step) -> dict[int, int]:
    """Returns when each gradient came, since the start of the backward (ns)."""
    fires = dict(zip(step.hook_param, step.hook_ns, strict=True))
    first = min(fires.values(), default=0)
    start = max((span.start for span in step.spans if span.phase == "backward" and span.start <= first), default=0)
    return {param: at - start for param, at in fires.items()}
