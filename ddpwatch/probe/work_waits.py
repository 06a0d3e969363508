"""Sees when the job waits for a collective that it has issued asynchronously.

``Work.wait`` is C++, and only the interpreter shows its calls (Python ≥ 3.12), function by function. So those that
issue are looked into, what calls these, and what any of them calls that has "wait" in its name: an optimizer that waits
for what it has issued, a pipeline's schedule, a handle of a library's around a `Work`. If they are methods, others of
their objects that call some `wait` are looked into as well: a bucket of gradients, which somebody else finishes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final

from ddpwatch.probe.calls import CallsFrom, argument, can_see_events
from ddpwatch.probe.record import BucketRecord

MOST_UNWAITED: Final = 1024  # collectives that nobody has waited for yet
MOST_FUNCTIONS: Final = 64  # that are looked into
CALLERS: Final = 2  # of a function that issues, one calling the other, that are looked into, too


class _WaitOfThread(threading.local):
    """The collective that a thread waits for."""

    waiting: BucketRecord | None = None


class WorkWaits:
    """The waits for collectives of the steps that are recorded in full.

    Args:
        charge: Takes what seeing one has cost (ns).
        on_error: Takes an error.
    """

    def __init__(self, charge: Callable[[int], None], on_error: Callable[[Exception], None]) -> None:
        self._charge, self._on_error = charge, on_error
        self._unwaited: dict[int, BucketRecord] = {}  # by the id of their `Work`
        self._places: set[int] = set()
        self._functions: dict[int, CallsFrom] = {}  # by the id of their code
        self._paused = False
        self._here = _WaitOfThread()

    def follow(self, work: Any, entry: BucketRecord, place: FrameType | None) -> None:
        """Notes the `Work` of a collective that the function of that frame has issued."""
        if len(self._unwaited) < MOST_UNWAITED:
            self._unwaited[id(work)] = entry
        if entry.index not in self._places and can_see_events():
            self._places.add(entry.index)
            for _ in range(1 + CALLERS):
                if place is not None:
                    for code in (place.f_code, *_waiting_methods(place)):
                        self._look_into(code)
                    place = place.f_back

    def _look_into(self, code: CodeType) -> None:
        if id(code) not in self._functions and len(self._functions) < MOST_FUNCTIONS:
            calls = CallsFrom(code, self._begin, self._end, self._on_error)
            calls.pause(self._paused)
            self._functions[id(code)] = calls

    def pause(self, paused: bool) -> None:
        """Sees nothing for now, or sees what is issued from here on."""
        if paused is not self._paused:
            self._paused = paused
            self._unwaited.clear()
            for calls in list(self._functions.values()):
                calls.pause(paused)

    def close(self) -> None:
        """Sees nothing more."""
        self._unwaited.clear()
        for calls in list(self._functions.values()):
            calls.close()

    def _begin(self, called: Any) -> bool:
        """Notes a call; returns whether calls from the same place are of interest."""
        inner = called.__func__ if type(called) is MethodType else called
        if type(inner) not in (FunctionType, BuiltinFunctionType) or "wait" not in inner.__name__:
            return False
        if type(inner) is FunctionType:
            self._look_into(inner.__code__)
            return False
        at = time.monotonic_ns()
        entry = None if type(called) is not MethodType else self._unwaited.pop(id(called.__self__), None)
        if entry is not None:
            self._here.waiting, entry.wait_begin = entry, at
            self._charge(time.monotonic_ns() - at)
        return True

    def _end(self) -> None:
        at, here = time.monotonic_ns(), self._here
        entry, here.waiting = here.waiting, None
        if entry is not None:
            entry.wait_end = at
            entry.done = at if entry.done is None else entry.done


def _waiting_methods(frame: FrameType) -> Iterator[CodeType]:
    """Yields the code of methods that call some `wait`, of the object of which one runs there."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return
    try:
        kind = type(argument(frame, "self"))
    except (KeyError, NameError):  # it was deleted
        return
    for one in kind.__mro__:
        for method in list(vars(one).values()):
            if type(method) is FunctionType and "wait" in method.__code__.co_names:
                yield method.__code__
