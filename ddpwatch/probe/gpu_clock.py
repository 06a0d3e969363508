"""Where a GPU's clock lies on the host's: an estimate, and how far the truth may lie from it. No torch, no thread.

At any moment, host time = GPU time + offset. Every event that the GPU has passed bounds the offset from both sides:
the GPU cannot pass an event before the host enqueued it, and it has passed it when a query first says so. A bound is
tight where the GPU was idle (from below), or where a query followed at once, as after a synchronisation (from above).

Bounds age: the offset drifts, by at most `MAX_DRIFT_PPM` of the time that passes. Two narrow intervals some seconds
apart bound the drift itself more closely, for as long as both are in the window. Clocks that drift faster, as a virtual
machine's may, contradict their bounds again and again, in one direction: then the limit is widened until they do not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

MAX_DRIFT_PPM = 100.0  # crystals differ by less than 50; the rest is for a host clock that is being slewed
DRIFTS_NOT_JUMPS = 3  # contradictions in a row, in one direction: then the limit is WIDER times as large
WIDER = 4
DRIFT_CHANGE_PPM = 1.0  # by which the drift may change within the window, as the GPU warms up
WINDOW_NS = 60_000_000_000
SNAPSHOT_EVERY_NS = 1_000_000_000
EVENT_ERROR_NS = 2_000  # resolution of an event's time, with the rounding of differences between events
_PPM = 1e-6


class Passage(NamedTuple):
    """An event that the GPU has passed.

    Attributes:
        gpu_ns: When, on the GPU's clock; its zero is arbitrary.
        enqueued_ns: When the host was about to enqueue it.
        passed_ns: When the host knew that the GPU had passed it.
    """

    gpu_ns: int
    enqueued_ns: int
    passed_ns: int


class _Bounds(NamedTuple):
    """Bounds of the offset at a GPU time (ns)."""

    gpu_ns: int
    low: int
    high: int


class GpuClockMap:
    """Turns GPU times into host times.

    Offset and drift are estimated as before, unless the bounds force them to move: a step starts where the one before
    it has ended.

    Attributes:
        epoch: How often the clocks have jumped: bounds contradicted each other, and those from before were dropped.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._now = _Bounds(0, 0, 0)
        self._offset = 0
        self._known = False
        self._snapshots: deque[_Bounds] = deque()
        self._contradictions = 0  # in a row; below 0 if the offset fell
        self._drift = self._widest = (-MAX_DRIFT_PPM * _PPM, MAX_DRIFT_PPM * _PPM)
        self._likely_drift = 0.0

    @property
    def drift_ppm(self) -> tuple[float, float]:
        """Bounds of the offset's drift, in millionths of the time that passes."""
        return self._drift[0] / _PPM, self._drift[1] / _PPM

    def observe(self, passages: Sequence[Passage]) -> None:
        """Takes the passages of a step: at least one, the last one last, and none before those of an earlier call."""
        gpu_ns = passages[-1].gpu_ns
        aged, new = self._aged(gpu_ns), self._bounds(passages, gpu_ns)
        low, high = max(aged.low, new.low), min(aged.high, new.high)
        if not self._known or low > high:
            if self._known:
                self._count_contradiction(rises=new.low > aged.high)
            low, high = self._start_epoch(passages, gpu_ns)
        else:
            self._offset = min(max(self._offset_at(gpu_ns), low), high)
        self._now = _Bounds(gpu_ns, low, high)
        if not self._snapshots or gpu_ns - self._snapshots[-1].gpu_ns >= SNAPSHOT_EVERY_NS:
            self._take_snapshot()

    def host_ns(self, gpu_ns: int) -> int:
        """Returns the host's time at a GPU time that is no later than the newest passage."""
        return gpu_ns + self._offset_at(gpu_ns)

    def error_ns(self, gpu_ns: int) -> int:
        """Returns how far `host_ns` may lie from the truth, for that GPU time and all later ones."""
        age = self._now.gpu_ns - gpu_ns
        offset = self._offset_at(gpu_ns)
        low = self._now.low - math.ceil(self._drift[1] * age)
        high = self._now.high - math.floor(self._drift[0] * age)
        return max(offset - low, high - offset)

    # -- inside ----------------------------------------------------------------------------------------------

    def _offset_at(self, gpu_ns: int) -> int:
        return self._offset + round(self._likely_drift * (gpu_ns - self._now.gpu_ns))

    def _aged(self, gpu_ns: int) -> _Bounds:
        """Returns what is known from before, at a later time."""
        before, low, high = self._now
        slowest, fastest = self._drift
        age = gpu_ns - before
        return _Bounds(gpu_ns, low + math.floor(slowest * age), high + math.ceil(fastest * age))

    def _bounds(self, passages: Sequence[Passage], gpu_ns: int) -> _Bounds:
        """Returns what a step's passages say about the offset at its end."""
        slowest, fastest = self._drift
        low = max(enqueued - at + slowest * (gpu_ns - at) for at, enqueued, _ in passages)
        high = min(passed - at + fastest * (gpu_ns - at) for at, _, passed in passages)
        return _Bounds(gpu_ns, math.floor(low) - EVENT_ERROR_NS, math.ceil(high) + EVENT_ERROR_NS)

    def _start_epoch(self, passages: Sequence[Passage], gpu_ns: int) -> tuple[int, int]:
        """Forgets what was known. If a clock jumped within the step, only its last passage counts."""
        self.epoch += self._known
        self._known, self._drift, self._likely_drift = True, self._widest, 0.0
        self._snapshots.clear()
        _, low, high = self._bounds(passages, gpu_ns)
        if low > high:
            passages = passages[-1:]
            _, low, high = self._bounds(passages, gpu_ns)
        # The GPU is usually idle when an epoch starts, and the bound from below is tight then.
        self._offset = min(max(enqueued - at for at, enqueued, _ in passages), high)
        return low, high

    def _count_contradiction(self, rises: bool) -> None:
        """Widens the drift's limit if contradictions in one direction show that it is too low."""
        before, step = self._contradictions, 1 if rises else -1
        self._contradictions = before + step if before * step > 0 else step
        if abs(self._contradictions) >= DRIFTS_NOT_JUMPS:
            self._contradictions = 0
            self._widest = (WIDER * self._widest[0], WIDER * self._widest[1])

    def _take_snapshot(self) -> None:
        """Bounds the drift by the differences to earlier snapshots."""
        now, snapshots = self._now, self._snapshots
        while snapshots and now.gpu_ns - snapshots[0].gpu_ns > WINDOW_NS:
            snapshots.popleft()
        slowest, fastest = self._widest
        change = DRIFT_CHANGE_PPM * _PPM
        for before in snapshots:
            age = now.gpu_ns - before.gpu_ns
            slowest = max(slowest, (now.low - before.high) / age - change)
            fastest = min(fastest, (now.high - before.low) / age + change)
        if slowest > fastest:  # it changes faster than it should
            snapshots.clear()
            slowest, fastest = self._widest
        self._drift = (slowest, fastest)
        self._likely_drift = min(max(self._likely_drift, slowest), fastest)
        snapshots.append(now)
