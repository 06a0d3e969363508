"""Seeing the calls of somebody else's function: by the interpreter's events where there are any, else by a wrapper."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ddpwatch.probe import calls
from ddpwatch.probe.calls import CallsFrom, SeenCalls

TOOL_IDS = calls._TOOL_IDS
HAS_EVENTS = sys.version_info >= (3, 12)
Told = list[tuple[Any, ...]]


class Library:
    """Somebody else's."""

    def warn(self, text: str = "old") -> str:
        warnings.warn(text, stacklevel=2)
        return text

    def fail(self) -> None:
        raise KeyError("theirs")

    def count_down(self, number: int) -> int:
        return number and self.count_down(number - 1)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def decorator(*arguments: Any) -> Any:
        return function(*arguments)

    return decorator


@decorated
def load(name: str) -> str:
    return name


@decorated
def save(name: str) -> str:
    return name.upper()


HERE = sys.modules[__name__]


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


def test_a_function_is_not_seen_while_that_is_paused() -> None:
    told: Told = []
    seen = SeenCalls([(Library, "count_down")], begin=lambda: told.append(("begin",)), on_error=unexpected)
    for paused in (True, True, False):
        seen.pause(paused)
        Library().count_down(0)
        assert told == ([] if paused else [("begin",)])
    seen.pause(True)
    seen.close()
    Library().count_down(0)
    assert len(told) == 1


def see(*places: calls.Place, told: Told, names: tuple[str, ...] = (), **options: Any) -> SeenCalls:
    """Sees a function, and notes what it is told."""
    notes = {kind: functools.partial(note, told, kind) for kind in ("begin", "end", "failed")}
    return SeenCalls(places, names=names, **{"on_error": unexpected, **notes, **options})


def note(told: Told, *what: Any) -> None:
    told.append(what)


@pytest.fixture(autouse=True)
def none_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have left is not seen here: modules that live on, for one."""
    for name, value in {"_tool": None, "_seen": {}, "_codes": {}, "_TOOL_IDS": (5,)}.items():
        monkeypatch.setattr(calls, name, value)


@pytest.fixture(params=["events", "wrapper"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways to see calls; the second is also taken where another tool has all ids."""
    if request.param == "events" and not HAS_EVENTS:
        pytest.skip("Python < 3.12 has no such events")
    if request.param == "wrapper":
        monkeypatch.setattr(calls, "_TOOL_IDS", ())
    before = dict(vars(Library)), load, save
    yield request.param
    assert (dict(vars(Library)), load, save) == before
    assert not calls._seen
    assert calls._tool is None


def test_what_is_told(way: str) -> None:
    told: Told = []
    library = Library()
    seen = see((Library, "warn"), told=told, names=("self", "text"))
    with pytest.warns(UserWarning, match="new"):
        assert library.warn(text="new") == "new"
    seen.close()
    with pytest.warns(UserWarning, match="newer"):
        library.warn("newer")
    assert told == [("begin", library, "new"), ("end", library, "new", "new")]


def test_an_exception_passes(way: str) -> None:
    told: Told = []
    seen = see((Library, "fail"), told=told, names=("self",))
    library = Library()
    with pytest.raises(KeyError) as caught:
        library.fail()
    seen.close()
    assert told == [("begin", library), ("failed", library, caught.value)]


def test_calls_within_calls(way: str) -> None:
    told: Told = []
    seen = see((Library, "count_down"), told=told, names=("number",))
    assert Library().count_down(2) == 0
    seen.close()
    assert told == [
        ("begin", 2), ("begin", 1), ("begin", 0), ("end", 0, 0), ("end", 1, 0), ("end", 2, 0)
    ]  # fmt: skip


def test_a_thread(way: str) -> None:
    idents: list[int] = []
    see_thread = lambda: idents.append(threading.get_ident())  # noqa: E731
    seen = SeenCalls([(Library, "count_down")], begin=see_thread, on_error=unexpected)
    thread = threading.Thread(target=Library().count_down, args=(0,))
    thread.start()
    thread.join()
    seen.close()
    assert idents == [thread.ident]


def test_a_decorator_is_shared_but_what_it_decorates_is_not(way: str) -> None:
    told: Told = []
    seen = see((HERE, "save"), told=told)
    assert (load("a"), save("b")) == ("a", "B")
    assert pickle.loads(pickle.dumps(save)) is save
    seen.close()
    assert told == [("begin",), ("end", "B")]


def test_more_than_one_sees_a_function(way: str) -> None:
    first: Told = []
    second: Told = []
    one, two = (see((Library, "count_down"), told=told) for told in (first, second))
    Library().count_down(0)
    two.close()
    Library().count_down(0)
    one.close()
    assert (len(first), len(second)) == (4, 2)


@pytest.mark.parametrize("kind", ["begin", "end", "failed"])
def test_an_error_of_ours_ends_the_seeing_and_nothing_else(way: str, kind: str) -> None:
    told: Told = []
    errors: list[Exception] = []
    seen = see((Library, "fail"), (Library, "fail"), told=told, on_error=errors.append, **{kind: lambda *_: 1 / 0})
    also = see((Library, "count_down"), told=told, on_error=errors.append, **{kind: lambda *_: 1 / 0})
    for _ in range(2):
        with pytest.raises(KeyError, match="theirs"):
            Library().fail()
        assert Library().count_down(0) == 0
    seen.close()
    also.close()
    raised = {"begin": 2, "end": 1, "failed": 1}[kind]
    assert [type(error) for error in errors] == [ZeroDivisionError] * raised


def test_a_parameter_that_is_not_there_is_an_error_of_ours(way: str) -> None:
    errors: list[Exception] = []
    seen = SeenCalls([(Library, "count_down")], begin=lambda _: None, names=["other"], on_error=errors.append)
    assert Library().count_down(0) == 0
    seen.close()
    assert len(errors) == 1


def test_what_a_signal_handler_raises_passes(way: str) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    seen = SeenCalls([(Library, "count_down")], begin=interrupted, on_error=unexpected)
    with pytest.raises(KeyboardInterrupt):
        Library().count_down(0)
    seen.close()


def of_warning_and_traceback() -> tuple[int, str]:
    """The line that a warning names, and a traceback."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Library().warn()
    try:
        Library().fail()
    except KeyError:
        return caught[0].lineno, traceback.format_exc()
    raise AssertionError


@pytest.mark.skipif(not HAS_EVENTS, reason="a wrapper is a frame")
def test_no_frame_and_nothing_patched() -> None:
    plain, function, told = of_warning_and_traceback(), Library.warn, []
    seen = [see((Library, name), told=told, names=("self",)) for name in ("warn", "fail")]
    assert of_warning_and_traceback() == plain
    assert Library.warn is function
    assert [kind for kind, *_ in told] == ["begin", "end", "begin", "failed"]
    for one in seen:
        one.close()


@pytest.mark.skipif(not HAS_EVENTS, reason="Python < 3.12 has no tools")
def test_other_tools_keep_their_ids() -> None:
    """Neither a debugger, coverage, profiler or optimizer is kept from its id, nor does it matter who has ours."""
    monitoring = sys.monitoring
    told: Told = []
    for tool in calls._TOOL_IDS:
        monitoring.use_tool_id(tool, "other")
    seen = see((Library, "count_down"), told=told)
    for tool in calls._TOOL_IDS:
        monitoring.free_tool_id(tool)
    Library().count_down(0)
    seen.close()
    assert len(told) == 2
    named = {monitoring.DEBUGGER_ID, monitoring.COVERAGE_ID, monitoring.PROFILER_ID, monitoring.OPTIMIZER_ID}
    assert not named & set(TOOL_IDS)


@pytest.mark.skipif(not HAS_EVENTS, reason="calls of C functions cannot be seen before Python 3.12")
class TestCallsFrom:
    """The calls that a function makes."""

    def calling(self, told: list[str], begin: Callable[[Any], bool]) -> CallsFrom:
        return CallsFrom(_sorts.__code__, begin, lambda: told.append("end"), on_error=unexpected)

    def test_what_is_of_no_interest_is_told_once(self) -> None:
        told: list[str] = []

        def begin(called: Any) -> bool:
            told.append(called.__name__)
            return called is sorted

        seen = self.calling(told, begin)
        assert _sorts([2, 1]) == [1, 2]
        _sorts([])
        assert told == ["len", "end", "sorted", "end", "sorted", "end"]
        with pytest.raises(TypeError):
            _sorts([2, "1"])
        assert told[6:] == ["sorted", "end"]  # also of what raises
        seen.close()
        _sorts([])
        assert len(told) == 8
        assert calls._tool is None

    def test_it_pauses_at_no_cost(self) -> None:
        told: list[str] = []
        seen = self.calling(told, lambda called: told.append(called.__name__) or True)
        tool = calls._tool
        seen.pause(True)
        _sorts([1])
        assert (told, sys.monitoring.get_local_events(tool, _sorts.__code__)) == ([], 0)  # type: ignore[attr-defined]
        seen.pause(False)
        _sorts([1])
        assert told == ["len", "end", "sorted", "end"]
        seen.close()

    def test_an_error_of_ours_ends_it(self) -> None:
        errors: list[Exception] = []
        seen = CallsFrom(_sorts.__code__, lambda called: bool(1 / 0), lambda: None, errors.append)
        assert _sorts([2, 1]) == [1, 2]
        assert [type(error) for error in errors] == [ZeroDivisionError]
        assert calls._tool is None
        seen.close()


def _sorts(values: list[Any]) -> list[Any]:
    assert len(values) >= 0
    return sorted(values)
