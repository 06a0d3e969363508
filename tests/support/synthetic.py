"""The frames of a made-up job with any number of ranks, of known geometry and with reproducible noise.

One step takes about 120 ms: input 2, forward 28, backward 49, exposed communication, optimizer 8. Hooks fire evenly
over the backward, in reverse order of the parameters; every bucket is launched 40 µs after its last one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ddpwatch.wire.messages import BucketLayout, Device, Hello, Layout, Mark, Message, Span, Step, encode
from ddpwatch.wire.transport import Envelope, Frame

MS = 1_000_000
STEP_NS = 120 * MS
START_NS = 10**15
EPOCH_NS = 1_700_000_000 * 10**9


class Fleet:
    """The frames of one synthetic job.

    Args:
        world: How many ranks.
        buckets: How many buckets a step has.
        params: How many parameters, spread evenly over the buckets.
        late: By how many ms a rank launches late.
        gpus: Whether the ranks train on GPUs.
        seed: The seed of the noise.
    """

    def __init__(
        self,
        world: int,
        buckets: int = 25,
        params: int = 300,
        late: dict[int, float] | None = None,
        gpus: bool = False,
        seed: int = 0,
    ) -> None:
        self.world, self.buckets, self.params = world, buckets, params
        self.late, self.gpus = late or {}, gpus
        self._random = random.Random(seed)
        self._names = [f"blocks.{i * 12 // params}.{('attn', 'mlp')[i % 2]}.weight_{i}" for i in range(params)]

    def introduction(self) -> Iterator[Message]:
        """The hello and the layout of every rank."""
        per = self.params // self.buckets
        order = list(range(self.params))[::-1]
        layout = [BucketLayout(i, 4 << 20, order[i * per : (i + 1) * per]) for i in range(self.buckets)]
        for rank in range(self.world):
            yield Hello(
                run_id="synthetic", rank=rank, local_rank=rank % 8, world_size=self.world, host="node1",
                pid=4000 + rank, boot_id="boot", device_kind="cuda" if self.gpus else "cpu",
                timing_source="cuda events" if self.gpus else "host",
                device_uuid=f"GPU-{rank}" if self.gpus else "", backend="nccl" if self.gpus else "gloo",
                torch="2.13.0", module="GPT", parameters=25_000_000,
                script="synthetic.py",
            )  # fmt: skip
            yield Layout(rank=rank, epoch=2, params=self._names, buckets=layout)

    def step(self, rank: int, number: int) -> Step:
        """One rank's step."""
        noise, late = self._random.random, int(self.late.get(rank, 0.0) * MS)
        latest = int(max(self.late.values(), default=0.0) * MS)
        backward = (80 * MS) + late
        fires = [int(31 * MS + (i + 1) * 49 * MS / self.params + noise() * 0.1 * MS) for i in range(self.params)]
        fires = [at + (late if i >= self.params // 3 else 0) for i, at in enumerate(fires)]
        per = self.params // self.buckets
        ready = [fires[(i + 1) * per - 1] for i in range(self.buckets)]
        wait = [latest - late if (i + 1) * per > self.params // 3 else 0 for i in range(self.buckets)]
        launch = [at + 40_000 for at in ready]
        done: list[int | None] = [
            at + extra + int((1.6 + noise()) * MS) for at, extra in zip(launch, wait, strict=True)
        ]
        end = max(backward, *filter(None, done))
        return Step(
            rank=rank, step=number, epoch=2, status="warmup" if number == 0 else "ok",
            start_ns=START_NS + number * (STEP_NS + latest) + int(noise() * 0.2 * MS), duration_ns=end + 9 * MS,
            spans=[Span("forward", 2 * MS, 30 * MS), Span("backward", 31 * MS, backward), Span("sync", backward, end),
                   Span("optimizer", end + MS // 2, end + 8 * MS)],
            hook_param=list(range(self.params))[::-1], hook_ns=fires, comm_module=[0] * self.buckets,
            comm_label=list(range(self.buckets)), comm_bytes=[4 << 20] * self.buckets, comm_ready=[*ready],
            comm_launch=launch, comm_done=done, own_ns=90_000,
        )  # fmt: skip

    def devices(self, second: int) -> Iterator[Device]:
        """One sample of every device, at that second."""
        at_ns = START_NS + second * 10**9
        for index in range(min(self.world, 8) if self.gpus else 0):
            yield Device(
                host="node1", boot_id="boot", kind="cuda", at_ns=at_ns, index=index, uuid=f"GPU-{index}",
                name="Synthetic GPU", utilization=88 + 10 * self._random.random(),
                memory_used=61 << 30, memory_total=139 << 30,
                power_w=420 + 60 * self._random.random(), power_limit_w=700.0, temperature_c=58.0,
            )  # fmt: skip
        yield Device(
            host="node1", boot_id="boot", kind="cpu", at_ns=at_ns, name="16 CPUs",
            utilization=35 + 20 * self._random.random(), memory_used=40 << 30, memory_total=128 << 30,
        )  # fmt: skip

    def frames(self, steps: int) -> Iterator[Message]:
        """A complete run, with a sample of the devices every eight steps and one mark in the last."""
        yield from self.introduction()
        for number in range(steps):
            if number % 8 == 0:
                yield from self.devices(number // 8)
            for rank in range(self.world):
                yield self.step(rank, number)
            if number == steps - 1:
                yield Mark(rank=0, name="evaluate", start_ns=START_NS + number * STEP_NS + 20 * MS)


def enveloped(messages: Iterator[Message], every_ns: int = 10 * MS) -> Iterator[Frame]:
    """The frames as a source yields them, received at equal intervals."""
    for seq, message in enumerate(messages, start=1):
        yield message, Envelope(seq, EPOCH_NS + seq * every_ns, encode(message))
