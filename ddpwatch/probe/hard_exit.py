"""Says goodbye where a job ends by ``os._exit``, which runs no exit handler. Some do as a library hangs at exit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NoReturn

_HOMES = [module for module in (os, __import__(os.name)) if hasattr(module, "_exit")]  # whence it is pickled, too


def before_hard_exit(say_goodbye: Callable[[int], None]) -> Callable[[], None]:
    """Calls a function when this process, not one that it forks, is about to end by ``os._exit``.

    ``os._exit`` is replaced. It never returns, so no traceback shows that.

    Args:
        say_goodbye: Takes the exit code. Must not take long; the process ends whatever it raises.

    Returns:
        What takes that back.
    """
    original, watched = os._exit, os.getpid()

    @functools.wraps(original)
    def _exit(status: int) -> NoReturn:
        try:
            if isinstance(status, int) and os.getpid() == watched and os._exit is _exit:
                say_goodbye(status)
        finally:
            original(status)

    def restore() -> None:
        if os._exit is _exit:
            for home in _HOMES:
                home._exit = original  # type: ignore[attr-defined]

    for home in _HOMES:
        home._exit = _exit  # type: ignore[attr-defined]
    return restore
