"""A made-up HSDP job: frames of known geometry, with every collective that FSDP2 issues for a parameter group.

Four ranks, two shards each of two replicas. A step takes 100 ms on ranks that are not late. Each collective blocks, as
on Gloo: the rank waits from its launch to its completion, 2 ms for an all-gather, a reduce-scatter, or an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ddpwatch.wire.messages import BucketLayout, CollectiveOp, Group, Layout, Message, Span, Step
from tests.support.frames import MS, START_NS, hello

BLOCKS = 3  # parameter groups besides the root's, which comes first
SHARDS, REPLICAS = 2, 2
WORLD = SHARDS * REPLICAS
TRANSFER_MS, FORWARD_MS, BACKWARD_MS, OPTIMIZER_MS = 2, 6, 9, 5
NBYTES = 4 << 20


@dataclass
class _Step:
    """One rank's step while it is made. Times in ms from its start."""

    at: int = 1
    spans: list[Span] = field(default_factory=list)
    ops: list[tuple[int, CollectiveOp, int, int]] = field(default_factory=list)  # group, op, launch, done

    def compute(self, phase: str, ms: int) -> None:
        self.spans.append(Span(phase, self.at * MS, (self.at + ms) * MS))  # type: ignore[arg-type]
        self.at += ms

    def collective(self, group: int, op: CollectiveOp, wait_ms: int = 0) -> None:
        done = self.at + wait_ms + TRANSFER_MS
        self.ops.append((group, op, self.at, done))
        self.spans.append(Span("sync", self.at * MS, done * MS))
        self.at = done


def sharding(rank: int) -> int:
    """The id of the group that a rank's parameters are sharded in: 10 or 11."""
    return 10 + rank // SHARDS


def replication(rank: int) -> int:
    """The id of the group that its gradients are then averaged in: 20 or 21."""
    return 20 + rank % SHARDS


def introduction() -> Iterator[Message]:
    names = ["embed.weight", *(f"blocks.{i}.{name}" for i in range(BLOCKS) for name in ("qkv.weight", "out.weight"))]
    groups = [BucketLayout(0, NBYTES // 4, [0], "GPT")]
    groups += [BucketLayout(i + 1, NBYTES, [1 + 2 * i, 2 + 2 * i], f"blocks.{i}") for i in range(BLOCKS)]
    for rank in range(WORLD):
        about = {"strategy": "hsdp", "parameter_groups": BLOCKS + 1, "reshard_after_forward": True}
        yield hello(rank, WORLD, ddp=about)
        replica = list(range(rank // SHARDS * SHARDS, (rank // SHARDS + 1) * SHARDS))
        yield Group(rank=rank, id=sharding(rank), name="3", ranks=replica, kind="sharding", backend="gloo")
        same_shard = list(range(rank % SHARDS, WORLD, SHARDS))
        yield Group(rank=rank, id=replication(rank), name="1", ranks=same_shard, kind="replication", backend="gloo")
        yield Layout(rank=rank, module_name="GPT", kind="group", group=sharding(rank), params=names, buckets=groups)


def step(rank: int, number: int, late_ms: int = 0, late_rank: int = 3) -> Step:
    """One step. The late rank's backward of the middle block takes ``late_ms`` longer, and the others wait for it.

    Its replica waits in the reduce-scatter, the other one in the all-reduce.
    """
    made, late_block = _Step(), BLOCKS // 2 + 1
    made.compute("forward", 1)
    made.collective(0, "all_gather")
    for block in range(1, BLOCKS + 1):
        made.collective(block, "all_gather")
        made.compute("forward", FORWARD_MS)
    made.compute("backward", 1)
    for block in range(BLOCKS, 0, -1):
        made.collective(block, "all_gather")
        late = late_ms if block == late_block else 0
        made.compute("backward", BACKWARD_MS + (late if rank == late_rank else 0))
        same_replica = sharding(rank) == sharding(late_rank)
        made.collective(block, "reduce_scatter", late if same_replica and rank != late_rank else 0)
        made.collective(block, "all_reduce", 0 if same_replica else late)
    made.compute("backward", 2)
    made.collective(0, "reduce_scatter")
    made.collective(0, "all_reduce")
    made.compute("optimizer", OPTIMIZER_MS)
    return _encoded(made, rank, number, late_ms)


def _encoded(made: _Step, rank: int, number: int, late_ms: int) -> Step:
    labels, ops, launches, dones = map(list, zip(*made.ops, strict=True))
    counts = {"all_reduce": 0, "": 0}
    numbers = []
    for op in ops:
        kind = op if op == "all_reduce" else ""
        numbers.append(counts[kind] - (100 if kind else 0))
        counts[kind] += 1
    length_ms = 100 + late_ms
    return Step(
        rank=rank, step=number, epoch=1, status="ok" if number else "warmup",
        start_ns=START_NS + number * length_ms * MS, duration_ns=length_ms * MS, spans=made.spans,
        hook_param=[], hook_ns=[], comm_module=[0] * len(ops), comm_label=labels,
        comm_bytes=[NBYTES // (1 if label else 4) // (SHARDS if op == "all_reduce" else 1)
                    for label, op in zip(labels, ops, strict=True)],
        comm_ready=[at * MS if op == "reduce_scatter" else None for op, at in zip(ops, launches, strict=True)],
        comm_launch=[at * MS for at in launches], comm_done=[at * MS for at in dones],
        comm_wait_begin=[at * MS for at in launches], comm_wait_end=[at * MS for at in dones],
        comm_group=[replication(rank) if op == "all_reduce" else sharding(rank) for op in ops], comm_op=ops,
        comm_first_seq=1000 * number + 100, comm_seq=numbers, own_ns=200_000, data=[(0, MS)],
    )  # fmt: skip


def hsdp_run(steps: int = 20, late_ms: int = 0) -> Iterator[Message]:
    """A run without its end."""
    yield from introduction()
    for number in range(steps):
        yield from (step(rank, number, late_ms) for rank in range(WORLD))
