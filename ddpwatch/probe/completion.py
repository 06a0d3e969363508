"""Completions of collectives: threads of ddpwatch's own that wait for them, and the stream that waits on a GPU.

No Python of ddpwatch's runs on a backend's thread, as a callback would. If the interpreter is ending by then, taking
the GIL ends such a thread in the middle of C++, which aborts the process; an unwatched job has no Python there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist

WAITERS: Final = 2  # as many as a group of Gloo's has threads, which take its collectives in the order of their launch
TURN_S: Final = 0.1  # a collective is waited for; then it is the next one's turn
LOOK_S: Final = 0.0005  # between two looks at a future
MOST: Final = 1024  # collectives that are followed at once: they keep their tensors
# What is raised at the end of a turn would have the C++ stack in it: seconds of work, and a line on stderr.
_TRACED: Final = os.environ.get("TORCH_SHOW_CPP_STACKTRACES") == "1"

_Pending = tuple[Any, Callable[[], object], float]  # a collective's work or future, what to call, since when


class Completions:
    """Follows collectives until they are done. Its threads start with the first one.

    They take the collectives in the order of their launch, as a backend does. One that is not done after its turn goes
    to the end of the line, so that one that hangs delays no other one for long.
    """

    def __init__(self) -> None:
        self._pending: SimpleQueue[_Pending | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def follow(self, pending: Any, call: Callable[[], object]) -> None:
        """Calls when a collective is done: at once, if it is, else on a thread of ddpwatch's.

        It keeps what it is given until then, or until `stop`.

        Args:
            pending: Work of Gloo's on the host that has a future: any thread may wait for it. Of all others the future,
                which is only looked at: their ``wait`` may do more (NCCL's makes streams wait), or never end early.
            call: Must not raise.
        """
        if isinstance(pending, dist.Work) and (_TRACED or type(pending) is not dist.Work):  # a job's own, in Python
            pending = pending.get_future()
        if _is_done(pending):
            call()
        elif self._pending.qsize() < MOST:
            self._pending.put((pending, call, time.monotonic()))
            if not self._threads:
                self._start()

    def stop(self) -> None:
        """Ends the threads, within a turn. What is done by then has been called for, all else is forgotten.

        Must be called before the interpreter ends. The next collective starts them again.
        """
        self._stopping = True
        for _ in self._threads:
            self._pending.put(None)
        try:
            self._join()
        finally:  # a signal
            self._join()
            self._threads.clear()
            self._stopping = False

    def _start(self) -> None:
        for _ in range(WAITERS):
            thread = threading.Thread(target=self._wait, name="ddpwatch-completions", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _join(self) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10 * TURN_S)

    def _wait(self) -> None:
        while (followed := self._pending.get()) is not None:
            pending, call, since = followed
            if _is_done(pending) or (not self._stopping and _ends(pending, since)):
                call()
            elif not self._stopping:
                self._pending.put(followed)
            del followed, pending, call  # nothing keeps tensors while this thread rests


def _is_done(pending: Any) -> bool:
    return bool(pending.is_completed() if isinstance(pending, dist.Work) else pending.done())


def _ends(pending: Any, since: float) -> bool:
    """Waits for a turn; returns whether it is done. One that has failed is."""
    if isinstance(pending, dist.Work):
        try:
            pending.wait(timedelta(seconds=TURN_S))
        except Exception:  # the turn has ended, or the collective failed: then the job's own wait raises it, too
            if not _is_done(pending):
                return False
            time.sleep(10 * LOOK_S)  # else its thread may be the last to own its tensors, and would have to end them
        return True
    until = time.monotonic() + TURN_S
    while not pending.done():
        now = time.monotonic()
        if now >= until:
            return False
        time.sleep(min(TURN_S, max(LOOK_S, (now - since) / 64)))
    return True


def waiting_stream(device: torch.device) -> torch.cuda.Stream:
    """Makes a stream that waits for the collectives of full steps.

    Without one, torch runs a future's callback on one of its pool's 32 streams, which a job has, too: on an H100 that
    broke a CUDA graph which another thread was capturing on that stream. Each priority has a pool; a job takes streams
    of the default priority, NCCL those of -1.
    """
    return torch.cuda.Stream(device, priority=-3)  # type: ignore[no-untyped-call]
