"""A made-up DDP job whose compute and wire are known exactly: its messages under any bucket cap."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from ddpwatch.whatif.answer import WhatIf
from ddpwatch.whatif.assignment import MIB, Parameter, initial, limits_of, rebuilt
from ddpwatch.whatif.recorded import Recorded, recorded_of
from ddpwatch.whatif.scenarios import Change
from ddpwatch.whatif.schedule import Speeds, play
from ddpwatch.wire.messages import BucketLayout, Hello, Layout, Message, Span, Step

MS = 1_000_000.0
FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS, DATA_MS = 30.0, 60.0, 8.0, 5.0


def line(latency_ms: float = 0.4, ms_per_mib: float = 3.5) -> Callable[[float], float]:
    """α + β bytes, in ns."""
    return lambda nbytes: MS * (latency_ms + ms_per_mib * nbytes / MIB)


LINE = line()
ONE_STREAM = Speeds(1, 1.0, 0.0, 0.0)


@dataclass(frozen=True)
class MadeUpJob:
    """A job.

    ``late_ms`` is what a rank's backward takes longer in every ``late_every``-th step. ``jitter`` is relative, of all
    compute.
    """

    ranks: int = 2
    steps: int = 40
    sizes_mib: tuple[float, ...] = (*[0.125, 0.004] * 6, *[1.0, 0.01] * 8, *[3.0, 0.02] * 4)
    cap_mib: float | None = 2.0
    cost: Callable[[float], float] = LINE
    speeds: Speeds = ONE_STREAM
    backend: str = "nccl"
    copy_ns_per_byte: float = 0.1
    data_ms: float = DATA_MS
    late_ms: tuple[float, ...] = ()
    late_every: int = 1
    jitter: float = 0.03
    wire_jitter: float = 0.05
    seed: int = 1
    find_unused: bool = False

    def but(self, **changes: object) -> MadeUpJob:
        """Another setting of the same job."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @cached_property
    def parameters(self) -> list[Parameter]:
        """In order of registration; gradients come in the reverse order."""
        return [
            Parameter(int(mib * MIB) // 4 * 4, "float32 cpu", rows=0 if mib < 0.1 else 64) for mib in self.sizes_mib
        ]

    @cached_property
    def buckets(self) -> list[list[int]]:
        limits = limits_of(int((self.cap_mib or 25) * MIB), self.cap_mib is None)
        if self.find_unused:
            return initial(self.parameters, limits)
        return rebuilt(self.parameters, limits, range(len(self.sizes_mib))[::-1])

    def messages(self) -> Iterator[Message]:
        flags = {"bucket_cap_mb": float(self.cap_mib or 25), "find_unused_parameters": self.find_unused}
        for rank in range(self.ranks):
            yield Hello(
                run_id="r", rank=rank, world_size=self.ranks, host="h", pid=rank, boot_id="b", backend=self.backend,
                torch="2.13.0", ddp=flags,
            )  # fmt: skip
            yield self.layout(rank)
        for ranks in self.played():
            yield from ranks

    def layout(self, rank: int) -> Layout:
        parameters = self.parameters
        return Layout(
            rank=rank,
            epoch=3,
            params=[f"p{i}" for i in range(len(parameters))],
            param_bytes=[p.nbytes for p in parameters],
            param_rows=[p.rows for p in parameters],
            param_kind=[p.kind for p in parameters],
            buckets=[
                BucketLayout(i, sum(parameters[p].nbytes for p in ids), ids) for i, ids in enumerate(self.buckets)
            ],
        )

    def played(self) -> Iterator[list[Step]]:
        """Its steps, one after the other."""
        dice, clocks = random.Random(self.seed), [1e9] * self.ranks
        for number in range(self.steps):
            steps = self._step(number, clocks, dice)
            clocks = [step.start_ns + float(step.duration_ns) for step in steps]
            yield steps

    def _step(self, number: int, clocks: list[float], dice: random.Random) -> list[Step]:
        parameters, buckets = self.parameters, self.buckets
        own = [self._compute(rank, number, dice) for rank in range(self.ranks)]
        slow = 1 + dice.gauss(0, self.wire_jitter)
        begins = [clock + before for clock, (before, *_) in zip(clocks, own, strict=True)]
        ready = [
            [begin + max(at[p] for p in ids) for ids in buckets] for begin, (_, at, *_) in zip(begins, own, strict=True)
        ]
        launches = list(accumulate(map(max, zip(*ready, strict=True)), max))
        ends = [begin + compute for begin, (_, _, compute, _) in zip(begins, own, strict=True)]
        sizes = [sum(parameters[p].nbytes for p in ids) for ids in buckets]
        played = play(launches, [self.cost(nbytes) * slow for nbytes in sizes], max(ends), self.speeds)
        after = list(accumulate(reversed(sizes)))[::-1]
        copied = max(done + self.copy_ns_per_byte * rest for done, rest in zip(played.dones, after, strict=True))
        steps = []
        for rank, (before, at, _, optimizer) in enumerate(own):
            start, wall = clocks[rank], played.wall
            computed = wall(ends[rank])
            synced = max(computed + self.copy_ns_per_byte * after[0], copied)

            def since(moment: float, start: float = start) -> int:
                return round(moment - start)

            fires = sorted((since(wall(begins[rank] + moment)), p) for p, moment in enumerate(at))
            mine = [since(wall(moment)) for moment in accumulate(ready[rank], max)]
            steps.append(
                Step(
                    rank=rank,
                    step=number,
                    status="warmup" if number == 0 else "ok",
                    epoch=3,
                    start_ns=round(start),
                    duration_ns=since(synced + optimizer + MS),
                    spans=[
                        Span("forward", round(self.data_ms * MS), round(before)),
                        Span("backward", round(before), since(computed)),
                        Span("sync", since(computed), since(synced)),
                        Span("optimizer", since(synced), since(synced + optimizer)),
                    ],
                    hook_param=[p for _, p in fires],
                    hook_ns=[at_ns for at_ns, _ in fires],
                    comm_first_seq=1 + number * len(buckets),
                    comm_seq=list(range(len(buckets))),
                    comm_module=[0] * len(buckets),
                    comm_label=list(range(len(buckets))),
                    comm_bytes=sizes,
                    comm_ready=list(mine),
                    comm_launch=mine,
                    comm_done=[since(done) for done in played.dones],
                    data=[(0, round(self.data_ms * MS))],
                )
            )
        return steps

    def _compute(self, rank: int, number: int, dice: random.Random) -> tuple[float, list[float], float, float]:
        """ns: until the backward, until each gradient, of the backward, of the optimizer."""
        noise = 1 + dice.gauss(0, self.jitter)
        late = self.late_ms[rank] if rank < len(self.late_ms) and number % self.late_every == 0 else 0.0
        count = len(self.sizes_mib)
        backward = MS * (BACKWARD_MS * noise + late)
        at = [backward * (count - p) / (count + 1) for p in range(count)]
        return MS * (self.data_ms + FORWARD_MS * noise), at, backward, MS * OPTIMIZER_MS

    def recorded(self) -> Recorded:
        """What a recording of it shows: of equal jobs the same, which no test changes."""
        return recorded(self)

    @property
    def step_ms(self) -> float:
        """Its mean step, as a recording would measure it."""
        return self.recorded().measured_ns / MS


@cache
def recorded(job: MadeUpJob) -> Recorded:
    """What a recording of the job shows."""
    return recorded_of(job.messages())


def built(messages: Iterable[Message]) -> WhatIf:
    """What can be asked of a recording with these messages."""
    return WhatIf(recorded_of(messages))


def refused(asked: WhatIf, change: Change) -> str:
    """Why the change is not predicted."""
    assert asked.ask([change]) == []
    return asked.refused[-1][1]


def edited(job: MadeUpJob, **changes: object) -> Iterator[Message]:
    """The job's messages, with other values in the fields that they have."""
    for message in job.messages():
        for name, value in changes.items():
            if hasattr(message, name):
                setattr(message, name, value)
        yield message
