"""Which calls on a stack are the user's."""

from __future__ import annotations

import re

_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?:torch|ddpwatch)/|/torch/(?:autograd|distributed|nn|optim|utils)/"
    r"|/ddpwatch/(?:common|job|probe|sampling)/|/lib/python3[^/]*/(?!(?:site|dist)-packages/)|^<"
)


def is_library(file: str) -> bool:
    """Returns whether the file is torch's, ddpwatch's or the standard library's, by its path."""
    return _LIBRARY.search(file) is not None
