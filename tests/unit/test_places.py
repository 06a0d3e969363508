"""The names of places that issue collectives."""

import pytest

from ddpwatch.probe.places import _name_of

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
