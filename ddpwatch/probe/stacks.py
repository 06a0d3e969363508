"""A rank's stacks, taken once when it stands still, and its training thread's in a pause. For the sender thread.

`faulthandler.dump_traceback` writes them from C, without touching a frame's reference count, into a file in memory. No
signal is involved, and nothing is installed: docs/architecture.md, "Hangs", says why.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os

from ddpwatch.sampling.stillness import Stillness
from ddpwatch.wire.messages import Beat, Stack, Step

MAX_TEXT = 32_768
REST_NS = 30_000_000_000  # between two
PAUSE_REST_NS = 5_000_000_000  # the same, of pauses


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
        self._taken_ns: dict[bool, int] = {}  # by whether it had been standing still for too long

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
        taken_ns, rest_ns = self._taken_ns.get(too_long), REST_NS if too_long else PAUSE_REST_NS
        return taken_ns is not None and (taken_ns >= self._stillness.since_ns or now_ns - taken_ns < rest_ns)


def dump(thread: int) -> tuple[str, int]:
    """Returns the stacks of all threads but the calling one, that thread's first, and how many there are.

    The text is empty without any.
    """
    with contextlib.suppress(AttributeError, OSError, RuntimeError):  # no such file here, or no room for it
        file = os.memfd_create("ddpwatch-stack")
        try:
            faulthandler.dump_traceback(file=file, all_threads=True)
            return in_order(os.pread(file, 4 * 1024 * 1024, 0).decode("ascii", "replace"), thread)
        finally:
            os.close(file)
    return "", 0


def in_order(text: str, thread: int) -> tuple[str, int]:
    """Sorts faulthandler's blocks, one per thread: the training thread's first, without the calling thread's."""
    blocks = [block.strip("\n") for block in text.split("\n\n")]
    name = f"0x{thread:016x}"
    others = [block for block in blocks if block and not block.startswith("Current")]
    others.sort(key=lambda block: name not in block.partition("\n")[0])
    return "\n\n".join(others)[:MAX_TEXT], sum("hread 0x" in block.partition("\n")[0] for block in blocks)
