"""How a process that multiprocessing has started ends.

Its finalizers run once its exception is handled and forgotten, on Python ≥ 3.13. Then the one who handles it is seen.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType

from ddpwatch.probe.calls import SeenCalls

FORGETS = sys.version_info >= (3, 13)


class ChildEnd:
    """Sees how this process ends, if multiprocessing has started it.

    Args:
        ended: Called when the process's function has returned or raised: with the exit code, and the exception unless
            it was `SystemExit`. More than once; the first time has the exception.
        on_error: As for `SeenCalls`.
    """

    def __init__(
        self, ended: Callable[[int, BaseException | None], None], on_error: Callable[[Exception], None]
    ) -> None:
        self._ended = ended
        is_child = FORGETS and multiprocessing.parent_process() is not None
        # What a process's `_bootstrap` calls: the first where it handles an exception, the second in any case.
        places = [(traceback, "print_exc"), (threading, "_shutdown")] if is_child else []
        self._seen = [SeenCalls([place], begin=self._look, on_error=on_error) for place in places]

    def close(self) -> None:
        """Sees nothing more."""
        for seen in self._seen:
            seen.close()

    def _look(self) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
            frame = frame.f_back
        code = None if frame is None else frame.f_locals.get("exitcode")
        if isinstance(code, int):  # otherwise the function is still running
            self._ended(code, sys.exc_info()[1])
