"""Sees the calls of somebody else's function: its start, its return, and where an exception leaves it.

On Python ≥ 3.12 the interpreter itself calls back (`sys.monitoring`, with events of that function's code alone).
Nothing is patched: tracebacks, the lines that warnings name, pickles and identities stay as they are. A call costs
0.8 µs, 1.4 µs with its arguments (Python 3.13). Exceptions cannot be limited to one function: while somebody wants
them, every frame of the process that one leaves costs 0.1 µs. An older Python, or one whose free tool ids others have
taken, gets a wrapper around the function instead: one frame more.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

_TOOL_IDS = (4, 3)  # of six: debuggers, coverage, profilers and optimizers expect to find theirs, also later on
_get_variable: Any = None
if sys.version_info[:2] == (3, 12):
    import ctypes

    _get_variable = ctypes.pythonapi["PyFrame_GetVar"]  # one of our own: as an attribute, it is the whole process's
    _get_variable.restype, _get_variable.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.py_object]
GROUP_MAKER: Final = "_new_group_with_tag"  # torch's function that makes a process group, and has said who is in it
Place = tuple[Any, str]  # a module or class, and the name by which the function is found there


class SeenCalls:
    """The calls of one function, seen until `close`.

    What calls back never raises, except what a signal handler of the job's raises meanwhile.

    Args:
        places: Where the function is found. What lies there may be decorated: then its innermost part is seen.
        begin: Called when a call starts, with the parameters of these ``names``.
        end: Called when it has returned, with the same and the result.
        failed: Called when an exception leaves it, with the same and the exception.
        names: Which of its parameters are passed on.
        on_error: Takes an error of theirs, and raises it if it is the job's. Else nothing is seen after that.
        code: See this instead, in whatever function it runs; by events or not at all.
        of: A weak reference to what the first of ``names`` must be; else whatever it is.

    Attributes:
        by_events: Whether the interpreter calls back, which adds no frame.
        paused: Whether it does not for now: see `pause`.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        begin: Callable[..., None] | None = None,
        end: Callable[..., None] | None = None,
        failed: Callable[..., None] | None = None,
        names: Sequence[str] = (),
        on_error: Callable[[Exception], None],
        code: CodeType | None = None,
        of: Callable[[], object] | None = None,
    ) -> None:
        self.begin, self.end, self.failed, self.names, self.of = begin, end, failed, names, of
        self.paused = False
        self._on_error = on_error
        self._function = getattr(*places[0]) if places else None
        self._wrapper: Callable[..., Any] | None = None
        self._patched: list[Place] = []
        self._code = code or _own_code(self._function)
        self.by_events = self._code is not None and _monitor(self, self._code)
        if not self.by_events:
            self._code = None
            self._wrapper = _wrapper(self, self._function) if self._function is not None else None
            self.also_in(places)

    def also_in(self, places: Sequence[Place]) -> None:
        """Notes that the function is found in more places, where a wrapper has to be, too."""
        for place, name in places:
            if self._wrapper is not None and getattr(place, name, None) is self._function:
                setattr(place, name, self._wrapper)
                self._patched.append((place, name))

    def pause(self, paused: bool) -> None:
        """Lets calls pass, at no cost where they are seen by events; or sees them again."""
        if paused is not self.paused:
            self.paused = paused
            if self._code is not None:
                _listen(self._code)

    def close(self) -> None:
        """Sees nothing more, and leaves nothing behind: but for wrappers that others have wrapped since."""
        self.begin = self.end = self.failed = None
        code, self._code = self._code, None
        if code is not None:
            _monitor_no_more(self, code)
        for place, name in self._patched:
            if getattr(place, name, None) is self._wrapper:
                setattr(place, name, self._function)
        self._patched.clear()

    def tell(self, what: Callable[..., None], call: FrameType | Mapping[str, Any], *outcome: object) -> None:
        """Calls back about a call: its frame, or its parameters by name."""
        try:
            arguments: list[Any] = []
            if self.names:
                arguments = [argument(call, name) for name in self.names]
                if self.of is not None and arguments[0] is not self.of():
                    return
            what(*arguments, *outcome)
        except Exception as error:
            self._on_error(error)
            self.close()


def argument(call: FrameType | Mapping[str, Any], name: str) -> Any:
    """Returns a parameter of a call: of its frame, on Python ≥ 3.12, or of parameters by name.

    On Python 3.12, `f_locals` is the dict that the job's own `locals()` has returned, if it was called in there:
    reading it would write all variables into that, and keep what they are alive as long as the frame.

    Raises:
        KeyError, NameError: The parameter has no value, or not any more.
    """
    if not isinstance(call, FrameType):
        return call[name]
    return call.f_locals[name] if _get_variable is None else _get_variable(call, name)


class CallsFrom:
    """The calls that one function makes, seen by the interpreter's events until `close` (see `can_see_events`).

    What calls back never raises, as with `SeenCalls`.

    Args:
        code: The function's.
        begin: Takes what is called. Returns whether more calls from the same place in the code shall be seen.
        end: Called when what is written in C has returned or raised.
        on_error: Takes an error of theirs, and raises it if it is the job's. Else nothing is seen after that.

    Attributes:
        paused: Whether calls pass unseen for now: see `pause`.
    """

    def __init__(
        self,
        code: CodeType,
        begin: Callable[[Any], bool],
        end: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._code, self._begin, self._end, self._on_error = code, begin, end, on_error
        self.paused = False
        if id(code) not in _callers and _take_tool() is not None:
            _codes[id(code)] = code
            _callers[id(code)] = self
            _listen(code)

    def pause(self, paused: bool) -> None:
        """Lets calls pass, at no cost, or sees them again."""
        if paused is not self.paused:
            self.paused = paused
            if _callers.get(id(self._code)) is self:
                _listen(self._code)

    def close(self) -> None:
        """Sees nothing more."""
        if _callers.get(id(self._code)) is self:
            del _callers[id(self._code)]
            _let_go(self._code)

    def tell_begin(self, called: object) -> bool:
        """Calls back about a call; returns whether more are to be seen."""
        try:
            return self.paused or self._begin(called)
        except Exception as error:
            self._on_error(error)
            self.close()
            return False

    def tell_end(self) -> None:
        """Calls back about the end of a call."""
        try:
            self._end()
        except Exception as error:
            self._on_error(error)
            self.close()


def can_see_events() -> bool:
    """Returns whether the interpreter calls back, which leaves what is seen as it is."""
    return _monitoring is not None and (_tool is not None or None in map(_monitoring.get_tool, _TOOL_IDS))


def innermost(function: Any) -> Any:
    """Returns what decorators have wrapped."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    return function


# -- Python ≥ 3.12 -----------------------------------------------------------------------------------------------------

_monitoring: Any = getattr(sys, "monitoring", None)
_seen: dict[int, tuple[SeenCalls, ...]] = {}  # by the id of the code, which `_codes` keeps: to hash code takes its time
_callers: dict[int, CallsFrom] = {}  # by the id of the code
_codes: dict[int, CodeType] = {}
_tool: int | None = None


def _own_code(function: Any) -> CodeType | None:
    """Returns the code that runs in the calls of this function only.

    A decorator's is shared by all that it decorates.
    """
    function = innermost(function)
    is_own = isinstance(function, FunctionType) and "<locals>" not in function.__qualname__
    return function.__code__ if is_own else None


def _monitor(seen: SeenCalls, code: CodeType) -> bool:
    """Sees a function by the interpreter's events. False where it cannot."""
    if _take_tool() is None:
        return False
    _codes[id(code)] = code
    _seen[id(code)] = (*_seen.get(id(code), ()), seen)
    _listen(code)
    return True


def _take_tool() -> int | None:
    """Returns an id for our callbacks, taken with the first call; None without a free one."""
    global _tool
    for tool in _TOOL_IDS if _tool is None and _monitoring is not None else ():
        try:
            _monitoring.use_tool_id(tool, "ddpwatch")
        except ValueError:
            continue
        _tool = tool
        _call_back(_on_start, _on_return, _on_unwind, _on_call, _on_end)
        break
    return _tool


def _call_back(start: Any, end: Any, unwind: Any, call: Any, called: Any) -> None:
    events = _monitoring.events
    for event, callback in (
        (events.PY_START, start),
        (events.PY_RETURN, end),
        (events.PY_UNWIND, unwind),
        (events.CALL, call),
        (events.C_RETURN, called),
        (events.C_RAISE, called),
    ):
        _monitoring.register_callback(_tool, event, callback)


def _listen(code: CodeType) -> None:
    """Asks for the events that somebody wants of this code, and for exceptions if anybody does of any."""
    events, seen = _monitoring.events, [one for one in _seen.get(id(code), ()) if not one.paused]
    start = events.PY_START if any(one.begin for one in seen) else 0
    end = events.PY_RETURN if any(one.end for one in seen) else 0
    caller = _callers.get(id(code))
    calls = events.CALL if caller is not None and not caller.paused else 0
    _monitoring.set_local_events(_tool, code, start | end | calls)
    everybody = [one for of_code in list(_seen.values()) for one in of_code]
    _monitoring.set_events(_tool, events.PY_UNWIND if any(one.failed for one in everybody) else 0)


def _monitor_no_more(seen: SeenCalls, code: CodeType) -> None:
    """Ends what `_monitor` began."""
    if not (rest := tuple(one for one in _seen[id(code)] if one is not seen)):
        del _seen[id(code)]
    else:
        _seen[id(code)] = rest
    _let_go(code)


def _let_go(code: CodeType) -> None:
    """Listens to what is still wanted of this code, and with the last of all gives the tool's id back."""
    global _tool
    _listen(code)
    if id(code) not in _seen and id(code) not in _callers:
        del _codes[id(code)]
    if not _codes and _tool is not None:
        _call_back(None, None, None, None, None)
        _monitoring.free_tool_id(_tool)
        _tool = None


# An exception out of these would reach the job. The frame above theirs is the seen function's.


def _on_start(code: CodeType, offset: int) -> None:
    for seen in _seen.get(id(code), ()):
        if seen.begin is not None and not seen.paused:
            seen.tell(seen.begin, sys._getframe(1))


def _on_return(code: CodeType, offset: int, result: object) -> None:
    for seen in _seen.get(id(code), ()):
        if seen.end is not None and not seen.paused:
            seen.tell(seen.end, sys._getframe(1), result)


def _on_unwind(code: CodeType, offset: int, error: BaseException) -> None:
    for seen in _seen.get(id(code), ()):
        if seen.failed is not None and not seen.paused:
            seen.tell(seen.failed, sys._getframe(1), error)


def _on_call(code: CodeType, offset: int, called: object, first: object) -> object:
    caller = _callers.get(id(code))
    return None if caller is None or caller.tell_begin(called) else _monitoring.DISABLE


def _on_end(code: CodeType, offset: int, called: object, first: object) -> None:
    if (caller := _callers.get(id(code))) is not None and not caller.paused:
        caller.tell_end()


# -- older Pythons -----------------------------------------------------------------------------------------------------


def _wrapper(seen: SeenCalls, original: Callable[..., Any]) -> Callable[..., Any]:
    inner = innermost(original)
    parameters = getattr(getattr(inner, "__code__", None), "co_varnames", ())
    given = getattr(inner, "__defaults__", None) or ()
    count = getattr(getattr(inner, "__code__", None), "co_argcount", 0)
    defaults = {
        **dict(zip(parameters[count - len(given) : count], given, strict=True)),
        **(getattr(inner, "__kwdefaults__", None) or {}),
    }

    @functools.wraps(original)
    def seen_call(*arguments: Any, **options: Any) -> Any:
        values = {**defaults, **dict(zip(parameters, arguments, strict=False)), **options} if seen.names else {}
        if seen.begin is not None and not seen.paused:
            seen.tell(seen.begin, values)
        try:
            result = original(*arguments, **options)
        except BaseException as error:
            if seen.failed is not None and not seen.paused:
                seen.tell(seen.failed, values, error)
            raise
        if seen.end is not None and not seen.paused:
            seen.tell(seen.end, values, result)
        return result

    return seen_call
