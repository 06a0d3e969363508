"""Exports one step as a Chrome trace: what the key E writes."""

from __future__ import annotations

from pathlib import Path

from ddpwatch.export.chrome_trace import align, write_chrome
from ddpwatch.tui.models.lanes import in_step
from ddpwatch.viewer.state import RunState, StepAcrossRanks
from ddpwatch.wire.messages import Message
from ddpwatch.wire.transport import Envelope, Frame


def step_frames(state: RunState, step: StepAcrossRanks) -> list[Frame]:
    """Returns the frames that a trace of one step needs: its ranks' hellos, the layouts, the step and its marks."""
    hellos = [rank.hello for number, rank in state.ranks.items() if rank.hello is not None and number in step.members]
    marks = [mark for mark in state.marks if mark.rank in step.members and in_step(mark, step.ranks[mark.rank])]
    messages: list[Message] = [*hellos, *state.layouts.values(), *marks, *(step.ranks[rank] for rank in step.members)]
    return [(message, Envelope(0, 0, b"")) for message in messages]


def write_step(frames: list[Frame], ranks: int, path: Path) -> int:
    """Writes the trace and returns its number of events.

    Args:
        frames: The result of `step_frames`.
        ranks: How many ranks have sent the step.
        path: The file to write.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("wb") as out:
        return write_chrome(frames, align(frames, ranks), out, ranks)
