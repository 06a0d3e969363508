"""One step as a Chrome trace: what the key E writes."""

from __future__ import annotations

from pathlib import Path

from ddpwatch.export.chrome_trace import align, write_chrome
from ddpwatch.messages import Mark, Message
from ddpwatch.state import RunState, StepAcrossRanks
from ddpwatch.transport import Envelope, Frame


def step_frames(state: RunState, view: StepAcrossRanks) -> list[Frame]:
    """All that a trace of one step needs: who its ranks are, its buckets' layouts, their frames and marks."""
    hellos = [rank.hello for number, rank in state.ranks.items() if rank.hello is not None and number in view.members]
    marks = [mark for mark in state.marks if _within(mark, view)]
    messages: list[Message] = [*hellos, *state.layouts.values(), *marks, *(view.ranks[rank] for rank in view.members)]
    return [(message, Envelope(0, 0, b"")) for message in messages]


def _within(mark: Mark, view: StepAcrossRanks) -> bool:
    step = view.ranks[mark.rank] if mark.rank in view.members else None
    end_ns = mark.start_ns if mark.end_ns is None else mark.end_ns
    return step is not None and end_ns >= step.start_ns and mark.start_ns < step.start_ns + step.duration_ns


def write_step(frames: list[Frame], ranks: int, path: Path) -> int:
    """Writes the trace; returns the number of events.

    Args:
        frames: What `step_frames` gave.
        ranks: How many ranks have sent the step.
        path: Where to.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("wb") as out:
        return write_chrome(frames, align(frames, ranks), out, ranks)
