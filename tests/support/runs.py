"""Runs made up for tests: real messages with figures that can be worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.wire.messages import BucketLayout, Bye, Device, Hello, Layout, Mark, Message, Span, Step, encode
from ddpwatch.wire.transport import Envelope

MS = 1_000_000
BEGIN = 1_700_000_000 * 10**9
HOSTILE = "</script><img src=x onerror=alert(1)>=cmd|é"


def step_of(rank: int, number: int, slower: float = 1.0, jitter: random.Random | None = None, shift: int = 0) -> Step:
    """100 ms: 3 data, 2 between, 20 forward, 50 backward, 10 exposed, 10 optimizer, 5 other. Rank r is 2r ms late."""
    noise = 1.0 if jitter is None else 1 + jitter.gauss(0, 0.02)

    def at(ms: float) -> int:
        return int(ms * MS * slower * noise)

    late = 2 * rank
    return Step(
        rank=rank, step=number, status="warmup" if number == 0 else "ok", start_ns=number * 110 * MS + shift,
        duration_ns=at(100), own_ns=at(0.1), epoch=1, data=[(at(1), at(4))],
        spans=[Span("forward", at(5), at(25)), Span("backward", at(25), at(75)), Span("sync", at(75), at(86)),
               Span("optimizer", at(90), at(100))],
        hook_param=[2, 1, 0], hook_ns=[at(30), at(50), at(60)],
        comm_module=[0, 0], comm_label=[0, 1], comm_bytes=[1000, 2000],
        comm_ready=[at(38), at(60)], comm_launch=[at(40 + late), at(65 + late)],
        comm_done=[at(60), at(85)],
    )  # fmt: skip


def hello_of(rank: int, world: int, host: str = "node", boot: str = "b") -> Hello:
    return Hello(
        run_id="train-1", rank=rank, local_rank=rank, world_size=world, host=host, pid=100 + rank, boot_id=boot,
        backend="gloo", torch="2.13", module="GPT", parameters=750, script="train.py", ddp={"hook": "my_hook", "n": 1},
    )  # fmt: skip


def run_of(
    ranks: int = 2, steps: int = 12, slower: float = 1.0, seed: int | None = None, boots: tuple[str, ...] = ()
) -> Iterator[tuple[Message, int]]:
    """A run with receive times; with ``boots`` the ranks are on hosts whose clocks differ by 7 s."""
    dice = None if seed is None else random.Random(seed)
    for rank in range(ranks):
        place = rank % len(boots) if boots else 0
        yield hello_of(rank, ranks, f"node{place}", boots[place] if boots else "b"), BEGIN
        layout = Layout(
            rank=rank, module_name="GPT", params=["w", HOSTILE, "v"],
            buckets=[BucketLayout(0, 1000, [2]), BucketLayout(1, 2000, [0, 1])],
        )  # fmt: skip
        yield layout, BEGIN
    for number in range(steps):
        received = BEGIN + (number + 1) * 110 * MS
        for rank in range(ranks):
            shift = 7_000 * MS * (rank % len(boots)) if boots else 0
            yield step_of(rank, number, slower, dice, shift), received + rank
        if number == 2:
            yield Mark(rank=0, name="checkpoint /home/me", start_ns=number * 110 * MS), received + 50
            at_ns = number * 110 * MS
            device = Device(host="node", boot_id="b", kind="cpu", at_ns=at_ns, utilization=50.0, memory_used=10**9)
            yield device, received + 60
    for rank in range(ranks):
        reason = "exception" if rank == 1 else "finished"
        detail = "RuntimeError: /home/me/secret is missing" if rank == 1 else ""
        bye = Bye(rank=rank, by="rank", reason=reason, detail=detail, at_ns=steps * 110 * MS, step=steps - 1)
        yield bye, BEGIN + (steps + 2) * 110 * MS


def record(
    path: Path, frames: Iterator[tuple[Message, int]] | None = None, flush_every: int = 8, run_id: str = "train-1"
) -> Path:
    """Writes a run to a file."""
    writer = RecordingWriter(path, {"run_id": run_id})
    for number, (message, received_ns) in enumerate(frames or run_of()):
        writer.write_message(message, Envelope(number + 1, received_ns, encode(message)))
        if number % flush_every == flush_every - 1:
            writer.flush()
    writer.close()
    return path
