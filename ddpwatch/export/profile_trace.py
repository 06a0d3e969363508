"""A profile of ranks as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

Each rank is a process, with a lane for its steps, one for each thread, and one for each stream of a GPU. Ranks need not
share a clock: each one's time starts with its first step.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ddpwatch.errors import UsageError
from ddpwatch.wire.messages import StackSamples
from ddpwatch.wire.profile_trace import unpack

STEPS_LANE = 0


def write_profile(samples: Iterable[StackSamples], out: Path) -> str:
    """Writes the trace, compressed if the file's name ends in .gz; returns a line about it.

    Raises:
        UsageError: There is no profile, or the file cannot be written.
        FrameError: The profile is damaged.
    """
    events = [event for each in samples if each.trace for event in _events(each)]
    if not events:
        raise UsageError(f"{out}: there is no profile to write", "ddpwatch explain --how profiler takes one")
    content = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})
    try:
        out.write_bytes(gzip.compress(content) if out.suffix == ".gz" else content)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}", "give --trace a path you can write to") from error
    return f"{out}: {len(events)} events; open it in https://ui.perfetto.dev"


def _events(samples: StackSamples) -> Iterator[dict[str, Any]]:
    starts, events = unpack(samples.trace)
    rank, begin = samples.rank, starts[0][1]
    yield _named("process_name", rank, STEPS_LANE, f"rank {rank}")
    yield _named("thread_name", rank, STEPS_LANE, "steps")
    for (slot, start), (_, end) in pairwise(starts):
        yield _slice(f"step {slot}", "step", rank, STEPS_LANE, start - begin, end - start)
    lanes: dict[tuple[bool, int], int] = {}
    for event in events:
        lane = lanes.setdefault((event.on_gpu, event.lane), len(lanes) + 1)
        category = "GPU" if event.on_gpu else "operator"
        yield _slice(event.name, category, rank, lane, event.start - begin, event.end - event.start)
    for (on_gpu, number), lane in lanes.items():
        yield _named("thread_name", rank, lane, f"{'GPU stream' if on_gpu else 'thread'} {number}")


def _named(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _slice(name: str, category: str, rank: int, lane: int, start_ns: int, ns: int) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": rank, "tid": lane, "ts": start_ns / 1000, "dur": ns / 1000,
    }  # fmt: skip
