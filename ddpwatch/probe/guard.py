"""The guard: where ddpwatch's own errors end. After one, a feature goes off, or all watching; the job trains on."""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, TypeVar

from torch._C import DisableTorchFunction

from ddpwatch.errors import DdpwatchError
from ddpwatch.wire.messages import WATCHING, Feature

CLOSING: Final[Feature] = "closing"  # at the end, when nothing can go off any more
Result = TypeVar("Result")
_log = logging.getLogger("ddpwatch")


class Guard:
    """Takes every error of ddpwatch's in this process. Safe on any thread.

    An error turns off the feature that it belongs to (`WATCHING` is all of them), and the rest goes on. What a signal
    handler of the job's raises while ddpwatch's code runs is no such error: it passes, as a ``KeyboardInterrupt`` does.

    Args:
        on_failure: Takes a feature that has gone off, and why; once per feature.

    Attributes:
        off: What is off.
    """

    def __init__(self, on_failure: Callable[[Feature, Exception], None]) -> None:
        self.off: set[Feature] = set()
        self._on_failure = on_failure

    def run(self, feature: Feature, call: Callable[..., Result], *arguments: Any) -> Result | None:
        """Calls what belongs to a feature. None if that is off, or goes off now.

        A job's `TorchFunctionMode`, or its own class of tensors, sees nothing of what it calls.
        """
        if feature in self.off:
            return None
        try:
            with DisableTorchFunction():
                return call(*arguments)
        except Exception as error:
            self.failed(error, feature)
            return None

    def failed(self, error: Exception, feature: Feature = WATCHING) -> None:
        """Takes an error where it was caught.

        Raises:
            Exception: The error itself, if it is the job's.
        """
        if is_the_jobs(error):
            raise error
        if feature in self.off:
            return
        if feature != CLOSING:  # which must be tried again
            self.off.add(feature)
        try:
            self._on_failure(feature, error)
        except Exception as another:
            _log.debug("ddpwatch cannot say what is off: %s", another)


def reason_of(error: BaseException) -> str:
    """Returns why something is off, in our words.

    What torch says would seem to be about the job. It is in the debug log.
    """
    if isinstance(error, DdpwatchError):
        return str(error)
    kind, missing = type(error).__name__, getattr(error, "name", None)  # what a torch lacks, for one
    if isinstance(error, KeyError) and error.args:
        missing = error.args[0]
    if isinstance(missing, str) and missing.isidentifier():
        kind += f" ({missing})"
    if isinstance(error, (OSError, ImportError)):  # the system's text, or Python's
        return f"{kind}: {error.strerror if isinstance(error, OSError) else error.msg}"
    place, trace = "", error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith("ddpwatch.") and module != __name__:
            place = f" in {module.rpartition('.')[2]}.{trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return kind + place


def is_the_jobs(error: BaseException) -> bool:
    """Returns whether a signal handler has raised it: Python may run one between any two instructions."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)  # a method has its function's
