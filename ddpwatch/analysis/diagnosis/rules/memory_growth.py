"""A rank takes more and more memory: of its host, or of its GPU. Says when that will be full, if it goes on.

What a start takes, a cache that fills up, a block that an allocator takes now and then, and what gathers until a
garbage collection are no such growth: the least that a rank had in each of eight parts of a stretch must rise from part
to part, each time by at least 0.7 of the mean rise for as many steps, and be more than it ever had before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, MemoryFigures
from ddpwatch.analysis.placement import Gpu, Host, Placement
from ddpwatch.common.text import duration, size
from ddpwatch.common.units import S_PER_HOUR
from ddpwatch.wire.messages import Beat, Device, Hello, RankSample

PARTS: Final = 8
EVEN: Final = 0.7  # of the mean rise in a step: at least that is in each part
KEEP: Final = 256  # samples of a rank, one a second; of a longer run, fewer
NEWEST: Final = (128, 64, 32)  # of them, in which growth may have started later
FEWEST_STEPS: Final = 200  # by then, garbage has been collected
SAMPLE_NS: Final = 1_000_000_000
DAY_S: Final = 24 * S_PER_HOUR  # full within one: a warning; within an hour an error, as that ends the run
AHEAD: Final = 10  # times as long as it has grown: what is farther ahead is no error, as caches and allocators stop
FAR_S: Final = 7 * DAY_S  # is not said


_Of = Literal["host", "gpu"]


class _Sample(NamedTuple):
    """A rank's use of a memory (bytes) when a step is its newest."""

    at_ns: int
    step: int
    used: int


_used = attrgetter("used")


class _Growth(NamedTuple):
    """A stretch in which memory grows: its ends, and by how many bytes in a step."""

    since: _Sample
    until: _Sample
    step_bytes: float


@dataclass(slots=True)
class _Memory:
    """One memory that a rank uses: its samples, and what is left of it; the growth that lasts, and one that is over."""

    samples: list[_Sample] = field(default_factory=list)
    every_ns: int = SAMPLE_NS
    left: int | None = None
    growth: _Growth | None = None
    over: _Growth | None = None

    def add_sample(self, sample: _Sample) -> None:
        """Adds one, if it is time for one. Of two, the one with less stays when there are too many."""
        if self.samples and sample.at_ns - self.samples[-1].at_ns < self.every_ns:
            return
        self.samples.append(sample)
        if len(self.samples) > KEEP:
            pairs = zip(self.samples[::2], self.samples[1::2], strict=False)
            self.samples, self.every_ns = [min(pair, key=_used) for pair in pairs], 2 * self.every_ns
        if len(self.samples) % PARTS == 0:
            self._judge()

    def _judge(self) -> None:
        stretches = (self.samples, *(self.samples[-count:] for count in NEWEST if count < len(self.samples)))
        before, self.growth = self.growth, next(filter(None, map(self._growth, stretches)), None)
        if self.growth is None:
            self.over = before or self.over
        elif self.over is not None and self.growth.since.step <= self.over.until.step:
            self.over = None  # it goes on

    def _growth(self, stretch: Sequence[_Sample]) -> _Growth | None:
        size, steps = len(stretch) // PARTS, stretch[-1].step - stretch[0].step
        if len(stretch) < NEWEST[-1] or steps < FEWEST_STEPS or stretch[-1].used <= stretch[0].used:
            return None
        stretch = stretch[-size * PARTS :]
        least = [min(stretch[at : at + size], key=_used) for at in range(0, len(stretch), size)]
        steps = least[-1].step - least[0].step
        step_bytes = (least[-1].used - least[0].used) / steps if steps else 0.0  # what grows in a pause is in no step
        is_even = step_bytes > 0 and all(
            after.used - before.used >= EVEN * step_bytes * (after.step - before.step)
            for before, after in pairwise(least)
        )
        before = self.samples[: len(self.samples) - len(stretch)]
        if not is_even or least[-1].used <= max(map(_used, before), default=0):
            return None
        return _Growth(stretch[0], stretch[-1], step_bytes)


class MemoryGrowth:
    """Finds it as samples come."""

    def __init__(self) -> None:
        self._placement = Placement()
        self._memories: dict[tuple[int, _Of], _Memory] = {}
        self._gpu_left: dict[Gpu, int] = {}
        self._steps: dict[int, int] = {}  # by rank, that of its newest heartbeat or sample

    def add_hello(self, hello: Hello) -> None:
        """Takes a rank's introduction."""
        self._placement.add_hello(hello)

    def apply_message(self, message: Beat | RankSample | Device) -> None:
        """Takes what says how much memory a rank uses, or how much is left."""
        if isinstance(message, Device):
            if message.uuid and message.memory_used is not None and message.memory_total is not None:
                left = max(0, message.memory_total - message.memory_used)
                self._gpu_left[Gpu(Host(message.host, message.boot_id), message.uuid)] = left
            return
        if message.step is not None:
            self._steps[message.rank] = message.step
        gpu_left = self._gpu_left.get(self._placement.gpus.get(message.rank, Gpu(Host(""), "")))
        self._add_sample(message.rank, "gpu", message.at_ns, message.memory_reserved, gpu_left)
        if isinstance(message, RankSample):
            self._add_sample(message.rank, "host", message.at_ns, message.memory_bytes, message.memory_left_bytes)

    def _add_sample(self, rank: int, of: _Of, at_ns: int, used: int | None, left: int | None) -> None:
        if used is None or rank not in self._steps:
            return
        memory = self._memories.setdefault((rank, of), _Memory())
        memory.left = left
        memory.add_sample(_Sample(at_ns, self._steps[rank], used))

    def incidents(self) -> Iterator[Incident]:
        """Yields those that matter, as a memory is full within a week, and infos of those that are over."""
        for (rank, of), memory in self._memories.items():
            if memory.over is not None:
                yield _ended(rank, of, memory.over)
        growing = {key: memory for key, memory in self._memories.items() if memory.growth is not None}
        for (rank, of), memory in growing.items():
            if memory.growth is not None and memory.left is not None:
                together = sum(
                    other.growth.step_bytes
                    for (peer, kind), other in growing.items()
                    if kind == of and other.growth is not None and self._share(of, rank, peer)
                )
                yield from _incident(rank, of, memory.samples[-1].used, memory.growth, memory.left, together)

    def _share(self, of: str, rank: int, peer: int) -> bool:
        """Returns whether two ranks take from the same memory."""
        places = self._placement.gpus if of == "gpu" else self._placement.hosts
        return rank == peer or (rank in places and places[rank] == places.get(peer))


def _incident(rank: int, of: str, used: int, growth: _Growth, left: int, together: float) -> Iterator[Incident]:
    since, until, step_bytes = growth
    steps_left = int(left / together)
    grown_s = (until.at_ns - since.at_ns) / 1e9
    left_s = steps_left * grown_s / (until.step - since.step)
    if left_s > FAR_S:
        return
    soon = left_s <= min(S_PER_HOUR, AHEAD * grown_s)
    whose = "its GPU" if of == "gpu" else "its host or cgroup"
    whose += " (other ranks grow there, too)" if together > step_bytes else ""
    yield Incident(
        kind="memory",
        severity="error" if soon else "warning" if left_s <= DAY_S else "info",
        message=f"rank {rank} takes {size(step_bytes)} more memory in each step: {whose} is full in some "
        f"{_rounded(steps_left):,} steps ({duration(left_s)})",
        ranks=(rank,),
        since_step=since.step,
        until_step=until.step,
        steps=until.step - since.step,
        open=True,
        evidence=Evidence(memory=MemoryFigures(of, used, step_bytes, left, steps_left)),
    )


def _ended(rank: int, of: _Of, growth: _Growth) -> Incident:
    since, until, step_bytes = growth
    whose = "of its GPU " if of == "gpu" else ""
    return Incident(
        kind="memory",
        severity="info",
        message=f"rank {rank} took {size(step_bytes)} more memory {whose}in each step",
        ranks=(rank,),
        since_step=since.step,
        until_step=until.step,
        steps=until.step - since.step,
    )


def _rounded(steps: int) -> int:
    """Returns two significant digits."""
    unit: int = 10 ** max(len(str(steps)) - 2, 0)
    return round(steps / unit) * unit
