"""Which files are the user's."""

from __future__ import annotations

import pytest

from ddpwatch.common import statistics
from ddpwatch.common.call_sites import is_library
from ddpwatch.job import auto
from ddpwatch.probe import stack_sampling
from ddpwatch.sampling import schedule


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (statistics.__file__, True),
        (auto.__file__, True),
        (schedule.__file__, True),
        (stack_sampling.__file__, True),
        (pytest.__file__, False),
        (__file__, False),
        ("/home/me/ddpwatch/train.py", False),  # a directory of that name may be the user's
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        ("/venv/lib/python3.11/site-packages/ddpwatch/report/text.py", True),
        ("/usr/lib/python3.11/threading.py", True),
        ("<frozen importlib._bootstrap>", True),
    ],
)
def test_a_user_s_line_is_neither_torch_s_nor_ours_nor_the_standard_library_s(file: str, library: bool) -> None:
    assert is_library(file) is library
