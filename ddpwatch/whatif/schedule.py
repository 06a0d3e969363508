"""Plays steps: ranks compute, buckets are launched when the last rank is ready, and the wire moves them in order.

Compute on all ranks is slowed alike while anything moves, and no bucket moves before its last rank has launched it. So
ranks meet the wire only through the last of them, and one step costs no more than its buckets: ``ready`` and
``computed`` below are on the clock that compute would have with nothing beside it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

EPSILON_NS = 0.5


class Speeds(NamedTuple):
    """How many collectives move at once, and how fast; see `ddpwatch.whatif.model.Physics`."""

    workers: int
    sharing: float
    compute_slowdown: float
    comm_slowdown: float

    @property
    def simple(self) -> bool:
        """Whether nothing slows anything."""
        return self.workers == 1 and not self.compute_slowdown and not self.comm_slowdown


class Played(NamedTuple):
    """One step's wire.

    Attributes:
        dones: When each bucket was done.
        clock: Moments on the clock of compute, and how far that is behind at each; empty if nothing slows it.
    """

    dones: list[float]
    clock: tuple[list[float], list[float]]

    def wall(self, at: float) -> float:
        """Returns when compute is so far."""
        times, behind = self.clock
        if not times or at <= times[0]:
            return at
        i = bisect_right(times, at) - 1
        if i == len(times) - 1 or times[i + 1] == times[i]:
            return at + behind[i]
        share = (at - times[i]) / (times[i + 1] - times[i])
        return at + behind[i] + share * (behind[i + 1] - behind[i])


def play(ready: Sequence[float], works: Sequence[float], computed: float, speeds: Speeds) -> Played:
    """Plays one step.

    Args:
        ready: Per bucket, when its last rank could launch it; each at least the one before.
        works: Per bucket, what it takes alone.
        computed: When the last rank has computed.
        speeds: How fast things move.
    """
    if speeds.simple:
        return Played(_in_line(ready, works), ([], []))
    return _play(ready, works, computed, speeds)


def _in_line(ready: Sequence[float], works: Sequence[float]) -> list[float]:
    dones, now = [], 0.0
    for at, work in zip(ready, works, strict=True):
        now = (at if at > now else now) + work
        dones.append(now)
    return dones


def _play(ready: Sequence[float], works: Sequence[float], computed: float, speeds: Speeds) -> Played:
    """Plays from event to event: a launch, a completion, or the end of compute.

    All buckets in flight are equally fast. So one number counts what each has got: ``served``, to which a bucket adds
    its work when it starts, and is done when that is reached.
    """
    workers, sharing, slow, drag = speeds
    pace, beside = 1 / (1 + slow), 1 / (1 + drag)
    dones = [0.0] * len(works)
    moving: list[tuple[float, int]] = []
    times: list[float] = []
    delays: list[float] = []
    now, behind, served, following, count = ready[0] if ready else 0.0, 0.0, 0.0, 0, len(works)
    while following < count or moving:
        if not moving:
            now = max(now, ready[following] + behind)
        worked = now - behind
        while following < count and len(moving) < workers and ready[following] <= worked + EPSILON_NS:
            insort(moving, (served + works[following], following))
            following += 1
        rest = computed - worked
        computing = rest > EPSILON_NS
        speed = (beside if computing else 1.0) * (1.0 if len(moving) == 1 else sharing)
        span = (moving[0][0] - served) / speed
        if computing:
            if following < count and len(moving) < workers:
                rest = min(rest, ready[following] - worked)
            span = min(span, rest / pace)
            times += (worked, worked + span * pace)
            delays += (behind, behind := behind + span * (1 - pace))
        now += span
        served += span * speed
        while moving and moving[0][0] <= served + EPSILON_NS:
            dones[moving.pop(0)[1]] = now
    return Played(dones, (times, delays))
