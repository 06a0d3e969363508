"""A synthetic run: frames with known geometry. One step takes 100 ms; the figures below are in ms from its start.

waits for data 0-1, forward 2-30, backward 31-80, sync 80-90, optimizer 91-95; bucket 0 in flight 50-60 (hidden),
bucket 1 70-90 (80-90 of it exposed). A late rank's backward takes ``late_ms`` longer, from before bucket 1 on.
Training is synchronous: a step starts and ends at the same time on every rank, and the next one follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Beat, BucketLayout, Bye, Device, Hello, Layout, Message, Span, Status, Step, encode
from ddpwatch.wire.transport import Envelope, Frame

MS = 1_000_000
STEP_MS = 100
START_NS = 1_000_000 * MS
EPOCH_NS = 1_700_000_000_000 * MS
RUN = "train-120000-abcd"


def hello(rank: int = 0, world: int = 2, **changes: object) -> Hello:
    about = {
        "run_id": RUN, "rank": rank, "local_rank": rank, "world_size": world, "host": "node1", "pid": 4000 + rank,
        "boot_id": "boot", "backend": "gloo", "torch": "2.13.0", "module": "GPT", "parameters": 2_500_000,
        "script": "train.py",
    }  # fmt: skip
    return Hello(**{**about, **changes})  # type: ignore[arg-type]


def layout(rank: int = 0) -> Layout:
    buckets = [BucketLayout(0, 1 << 20, [2, 3]), BucketLayout(1, 4 << 20, [0, 1])]
    return Layout(rank=rank, epoch=2, params=["a", "b", "c", "d"], buckets=buckets)


def step(rank: int = 0, number: int = 0, late_ms: int = 0, wait_ms: int = 0, **changes: object) -> Step:
    """One rank's step, after ``number`` ordinary ones.

    ``late_ms`` prolongs the rank's own backward, ``wait_ms`` its wait for bucket 1. Of a sequence with late steps, use
    `synchronous`.
    """
    backward = 80 + late_ms
    done = backward + 10 + wait_ms
    columns = {
        "rank": rank, "step": number, "epoch": 2,
        "start_ns": START_NS + number * STEP_MS * MS,
        "duration_ns": (STEP_MS + late_ms + wait_ms) * MS,
        "spans": [
            Span("forward", 2 * MS, 30 * MS), Span("backward", 31 * MS, backward * MS),
            Span("sync", backward * MS, done * MS), Span("optimizer", (done + 1) * MS, (done + 5) * MS),
        ],
        "hook_param": [3, 2, 1, 0], "hook_ns": [40 * MS, 50 * MS, (60 + late_ms) * MS, (70 + late_ms) * MS],
        "comm_module": [0, 0], "comm_label": [0, 1], "comm_bytes": [1 << 20, 4 << 20],
        "comm_ready": [50 * MS, (70 + late_ms) * MS], "comm_launch": [50 * MS, (70 + late_ms) * MS],
        "comm_done": [60 * MS, done * MS], "own_ns": 200_000, "data": [(0, MS)],
    }  # fmt: skip
    return Step(**{**columns, **changes})  # type: ignore[arg-type]


def synchronous(
    lateness: Iterable[Sequence[int]],
    first: int = 0,
    start_ms: int | None = None,
    statuses: Mapping[int, str] | None = None,
    **changes: object,
) -> Iterator[list[Step]]:
    """The steps of all ranks, one after the other: who is not late waits for the latest rank.

    Args:
        lateness: For each step, how late each rank is (ms).
        first: Number of the first step.
        start_ms: When it starts; after ``first`` ordinary steps if None.
        statuses: The status of steps that are not "ok".
        changes: Fields of every step.
    """
    at_ms = first * STEP_MS if start_ms is None else start_ms
    for number, late in enumerate(lateness, start=first):
        about = {"status": (statuses or {}).get(number, "ok"), "start_ns": START_NS + at_ms * MS, **changes}
        yield [step(rank, number, late_ms, max(late) - late_ms, **about) for rank, late_ms in enumerate(late)]
        at_ms += STEP_MS + max(late)


def light(rank: int = 0, number: int = 0, **changes: object) -> Step:
    """A step whose collectives were not timed."""
    untimed = {"status": "shadow", "comm_done": [None, None], "hook_param": [], "hook_ns": []}
    return step(rank, number, **{**untimed, **changes})  # type: ignore[arg-type]


def beat(rank: int = 0, number: int = 0, phase: str = "forward", for_s: float = 0.0, **changes: object) -> Beat:
    at_ns = START_NS + 1000 * STEP_MS * MS
    about = {"rank": rank, "at_ns": at_ns, "since_ns": at_ns - int(for_s * 1e9), "step": number, "phase": phase}
    return Beat(**{**about, **changes})  # type: ignore[arg-type]


def device(second: int, utilization: float | None = 50.0, kind: str = "cpu", index: int = 0) -> Device:
    about: dict[str, object] = {"memory_used": 2 << 30, "memory_total": 16 << 30}
    if kind == "cuda":
        about |= {"power_w": 312.0, "power_limit_w": 700.0, "temperature_c": 61.0, "name": "NVIDIA H200"}
    else:
        about["name"] = "8 CPUs"
    return Device(
        host="node1", boot_id="boot", kind=kind, index=index, at_ns=START_NS + second * 1000 * MS,
        utilization=utilization, **about,
    )  # type: ignore[arg-type]  # fmt: skip


def bye(rank: int | None = None, reason: str = "finished", **changes: object) -> Bye:
    about = {"rank": rank, "by": "collector", "reason": reason, "at_ns": START_NS + (1000 * STEP_MS + 1) * MS}
    return Bye(**{**about, **changes})  # type: ignore[arg-type]


def killed(rank: int = 1, number: int = 39, **changes: object) -> Bye:
    return bye(rank, "killed", detail="SIGKILL", signal=9, step=number, phase="backward", in_flight=[1], **changes)


def status() -> Status:
    return Status(at_ns=START_NS, frames=10, bytes=1000)


def run(steps: int = 40, world: int = 2, late_rank: int | None = None, late_ms: int = 40) -> Iterator[Message]:
    """A run without its end: hellos, a warm-up step, steps, device samples."""
    for rank in range(world):
        yield hello(rank, world)
        yield layout(rank)
    late = [late_ms if rank == late_rank else 0 for rank in range(world)]
    for number, ranks in enumerate(synchronous([late] * steps, statuses={0: "warmup"})):
        yield from ranks
        if number % 10 == 9:
            yield device(number // 10, 40.0 + number % 40)


def enveloped(messages: Iterator[Message] | list[Message], every_ms: int = 50) -> list[Frame]:
    """Frames as a source yields them, one every ``every_ms``."""
    return [
        (message, Envelope(seq, EPOCH_NS + seq * every_ms * MS, encode(message)))
        for seq, message in enumerate(messages, start=1)
    ]


def state_of(messages: Iterator[Message] | list[Message]) -> RunState:
    state = RunState()
    for message, envelope in enveloped(messages):
        state.apply_message(message, envelope.received_ns)
    return state


def diagnosed(lateness: Sequence[Sequence[int]], **changes: object) -> RunState:
    """The state after steps in which each rank is late (ms)."""
    world = len(lateness[0])
    steps = [one for ranks in synchronous(lateness, **changes) for one in ranks]
    return state_of([*(hello(rank, world) for rank in range(world)), layout(), *steps])


def bare(rank: int = 0, number: int = 0) -> Step:
    """A step of which only start and end are known."""
    columns = ("hook_param", "hook_ns", "comm_module", "comm_label", "comm_bytes")
    empty = {name: [] for name in (*columns, "comm_ready", "comm_launch", "comm_done", "spans")}
    return step(rank, number, status="unwatched", synced=False, data=None, **empty)
