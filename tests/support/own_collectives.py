"""Made-up jobs that issue their collectives themselves, of known geometry: experts, a mesh, a pipeline.

Each rank waits for a collective from its launch to its completion, as on Gloo. A transfer takes 2 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from zlib import crc32

from ddpwatch.wire.messages import (
    OWN_COLLECTIVES,
    BucketLayout,
    CollectiveOp,
    Group,
    Layout,
    Message,
    Span,
    Step,
)
from tests.support.frames import MS, START_NS, hello

TRANSFER_MS, STEP_MS = 2, 100
NBYTES = 4 << 20
LATE_MS = 20

# place, operation, group of the rank, launch in ms, how long it waits there; no completion where the wait is None
Issued = tuple[str, CollectiveOp, int, int, "int | None"]


def introduction(
    groups: Mapping[int, tuple[str, Sequence[int]]], world: int, places: Sequence[str]
) -> Iterator[Message]:
    """Hellos, groups and places; of a group its kind and its ranks."""
    for rank in range(world):
        yield hello(rank, world)
        for number, (kind, ranks) in groups.items():
            if rank in ranks:
                yield Group(rank=rank, id=number, name=str(number), ranks=list(ranks), kind=kind, backend="gloo")
        known = [BucketLayout(crc32(place.encode()), 0, [], place) for place in places]
        yield Layout(rank=rank, module=OWN_COLLECTIVES, kind="call", params=[], buckets=known)


def step(rank: int, number: int, issued: Sequence[Issued]) -> Step:
    """One step: forward, backward from 50 ms on, optimizer from 90 ms on; waits are cut out of these."""
    of_group: dict[int, int] = {}
    seqs = []
    for _, op, group, _, _ in issued:
        seqs.append(None if op in ("send", "recv") else of_group.setdefault(group, number * 100))
        of_group[group] = of_group.get(group, 0) + 1
    waits = [(at * MS, (at + wait + TRANSFER_MS) * MS) for *_, at, wait in issued if wait is not None]
    spans = [Span("sync", start, end) for start, end in waits]
    for phase, first, last in (("forward", 1, 50), ("backward", 50, 90), ("optimizer", 90, 99)):
        at = first * MS
        for start, end in sorted(waits):
            if first * MS <= start < last * MS:
                spans.append(Span(phase, at, start))  # type: ignore[arg-type]
                at = end
        spans.append(Span(phase, at, max(at, last * MS)))  # type: ignore[arg-type]
    done = [None if wait is None else (at + wait + TRANSFER_MS) * MS for *_, at, wait in issued]
    numbered = None not in seqs
    return Step(
        rank=rank,
        step=number,
        start_ns=START_NS + number * STEP_MS * MS,
        duration_ns=STEP_MS * MS,
        spans=sorted(spans, key=lambda span: (span.start, span.end)),
        comm_first_seq=0 if numbered else None,
        comm_seq=[position for position, _ in enumerate(issued)] if numbered else [],
        comm_group=[group for _, _, group, _, _ in issued],
        comm_op=[op for _, op, _, _, _ in issued],
        comm_module=[OWN_COLLECTIVES] * len(issued),
        comm_label=[crc32(place.encode()) for place, *_ in issued],
        comm_bytes=[0 if op == "barrier" else NBYTES for _, op, *_ in issued],
        comm_ready=[None] * len(issued),
        comm_launch=[at * MS for *_, at, _ in issued],
        comm_done=done,
        comm_wait_begin=[at * MS for *_, at, _ in issued] if waits else [],
        comm_wait_end=[*done] if waits else [],
    )


def run_of(
    groups: Mapping[int, tuple[str, Sequence[int]]], world: int, steps: int, issued: Callable[[int], Sequence[Issued]]
) -> Iterator[Message]:
    """A job whose ranks issue the same in every step."""
    places = list(dict.fromkeys(place for rank in range(world) for place, *_ in issued(rank)))
    yield from introduction(groups, world, places)
    for number in range(steps):
        for rank in range(world):
            yield step(rank, number, issued(rank))


def experts(steps: int = 20) -> Iterator[Message]:
    """Two experts; rank 1's takes 20 ms longer, so that rank 0 waits in the second all-to-all. A barrier at the end."""

    def issued(rank: int) -> list[Issued]:
        late, wait = (LATE_MS, 0) if rank == 1 else (0, LATE_MS)
        return [
            ("moe.py:31", "all_to_all", 7, 10, 0),
            ("moe.py:35", "all_to_all", 7, 15 + late, wait),
            *[("train.py:88", "all_reduce", 0, at, 0) for at in (60, 64, 68)],
            ("train.py:90", "barrier", 0, 95, 0),
        ]

    return run_of({0: ("all ranks", (0, 1)), 7: ("ep", (0, 1))}, 2, steps, issued)


def mesh(steps: int = 20) -> Iterator[Message]:
    """A 2×2 mesh of data and tensor parallelism. Rank 3 is late in its tensor group, and so is rank 2 among data."""

    def issued(rank: int) -> list[Issued]:
        late, wait = (LATE_MS, 0) if rank == 3 else (0, LATE_MS if rank == 2 else 0)
        replica = 0 if rank >= 2 else LATE_MS
        return [
            ("layers.py:12", "all_reduce", 20 + rank // 2, 10 + late, wait),
            ("layers.py:12", "all_reduce", 20 + rank // 2, 40, 0),
            ("train.py:40", "all_reduce", 10 + rank % 2, 60 + (LATE_MS - replica), replica),
        ]

    groups = {10: ("dp", (0, 2)), 11: ("dp", (1, 3)), 20: ("tp", (0, 1)), 21: ("tp", (2, 3))}
    return run_of({0: ("all ranks", range(4)), **groups}, 4, steps, issued)


def pipeline(steps: int = 20) -> Iterator[Message]:
    """Two stages that send and receive without saying when that is done."""

    def issued(rank: int) -> list[Issued]:
        ops: tuple[CollectiveOp, CollectiveOp] = ("send", "recv") if rank == 0 else ("recv", "send")
        return [("schedules _batch_p2p", ops[turn % 2], 5, 10 + 10 * turn, None) for turn in range(4)]

    return run_of({0: ("all ranks", (0, 1)), 5: ("pp", (0, 1))}, 2, steps, issued)
