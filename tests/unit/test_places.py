"""The names of places that issue collectives."""

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ddpwatch.probe.places import _name_of, passes_on

pytestmark = pytest.mark.same_everywhere


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/home/me/train.py", "train.py:3"),
        ("/v/lib/python3.13/site-packages/deepspeed/runtime/zero/stage3.py", "deepspeed reduce"),
        ("/usr/lib/python3/dist-packages/one_file.py", "one_file reduce"),
    ],
)
def test_a_library_s_function_is_named_and_the_line_of_a_script(file: str, name: str) -> None:
    code = compile("import sys\ndef reduce():\n    return sys._getframe()\n", file, "exec")
    exec(code, space := {})
    assert _name_of(space["reduce"]()) == name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code does not know its class")
def test_a_method_is_named_with_its_class() -> None:
    source = "import sys\ndef make():\n class Splits:\n  def __init__(self): self.at = sys._getframe()\n return Splits"
    exec(compile(source, "/v/lib/python3.13/site-packages/torchrec/dist_data.py", "exec"), space := {})
    assert _name_of(space["make"]()().at) == "torchrec Splits.__init__"


@pytest.mark.parametrize(
    ("file", "name"),
    [("/home/me/train.py", "train.py:4"), ("/v/site-packages/torchrec/dist_data.py", "torchrec reduce")],
)
def test_a_comprehension_is_a_part_of_the_function_that_runs_it(file: str, name: str) -> None:
    source = "import sys\ndef reduce():\n    return next(\n        sys._getframe() for _ in range(1))\n"
    exec(compile(source.replace("sys._getframe()", "name(sys._getframe())"), file, "exec"), space := {"name": _name_of})
    assert space["reduce"]() == name


def test_what_a_decorator_puts_around_a_functionpasses_on() -> None:
    """Whoever's it is, as of a deprecated function; a function that takes all arguments itself is a place."""
    at: list[FrameType] = []

    def traced(function: Callable[[], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            at.append(sys._getframe())
            function(*args, **kwargs)

        return wrapper

    traced(lambda: at.append(sys._getframe()))()
    assert [passes_on(frame) for frame in at] == [True, False]
    assert not passes_on(_takes_all(1, key=2))


def _takes_all(*_: Any, **__: Any) -> FrameType:
    return sys._getframe()
