"""A rank's stacks, taken once when it stands still, and its training thread's in a pause. For the sender thread.

Frames are read under the GIL, one thread's after the other's, and none is held longer. No signal is involved, and
nothing is installed.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from ddpwatch.probe.identity import as_text
from ddpwatch.sampling.stillness import Stillness
from ddpwatch.wire.messages import Beat, Stack, Step

MAX_TEXT = 32_768
MOST_CALLS = 100  # of a thread
REST_NS = 5_000_000_000  # between two hangs' stacks, and between two pauses'


class StackTaker:
    """Finds out when the rank stands still, and takes its stacks then.

    Args:
        rank: Put into the message.
        thread: The training thread's ident, which may change.
    """

    def __init__(self, rank: int, thread: int) -> None:
        self._rank = rank
        self.thread = thread
        self._stillness = Stillness()
        self._taken_ns: dict[bool, int] = {}  # when last, by whether it had been standing still for too long

    def add_step(self, step: Step) -> None:
        """Takes the next step: how long they are decides how long the rank may stand still."""
        self._stillness.add_step(step)

    def take_beat(self, beat: Beat) -> Stack | None:
        """Returns the stacks the first time that a heartbeat shows the rank standing still for too long.

        In a pause, which may be over soon, the training thread's.
        """
        stillness = self._stillness
        stillness.add_beat(beat)
        too_long = stillness.lasts_too_long
        if not (too_long or stillness.pauses) or self._is_taken(beat.at_ns, too_long):
            return None
        self._taken_ns[too_long] = beat.at_ns
        text, threads = dump(self.thread)
        if not too_long:
            text = text.partition("\n\n")[0]
        if not text:
            return None
        return Stack(
            rank=self._rank, at_ns=beat.at_ns, since_ns=stillness.since_ns, step=beat.step, text=text, threads=threads
        )

    def _is_taken(self, now_ns: int, too_long: bool) -> bool:
        taken_ns = self._taken_ns.get(too_long)
        return taken_ns is not None and (taken_ns >= self._stillness.since_ns or now_ns - taken_ns < REST_NS)


def dump(thread: int) -> tuple[str, int]:
    """Returns the stacks of all threads but the calling one, that thread's first, and how many threads there are.

    They have the format of Python's `faulthandler`, which is not called: Python 3.13.0 crashes where a frame that C++
    has called is just being destroyed.
    """
    frames = frames_of_others()
    threads = len(frames) + 1
    texts = []
    for ident in sorted(frames, key=lambda ident: ident != thread):
        texts.append(f"Thread 0x{ident:016x} (most recent call first):\n{_calls(frames.pop(ident))}")
    return as_text("\n\n".join(texts), MAX_TEXT), threads


def frames_of_others() -> dict[int, FrameType]:
    """Returns the innermost frames of all threads but the calling one, by ident.

    Whose own would own, by what it was assigned to, itself and with that all others: until garbage is collected.
    """
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def _calls(frame: FrameType | None) -> str:
    """Returns a line per call, from the innermost on."""
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_CALLS:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
