"""ddpwatch: a live monitor for PyTorch data-parallel training.

    import ddpwatch
    ddpwatch.watch(ddp_model)

    for step in ddpwatch.open_recording("run.mcap").steps(): ...

Importing it loads neither torch nor textual. The first use of `watch`, `count` or `mark` loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddpwatch.version import __version__

__all__ = ["__version__", "count", "mark", "open_recording", "watch"]

if TYPE_CHECKING:
    from ddpwatch.library import open_recording
    from ddpwatch.probe.watch import count, mark, watch

_HOMES = {
    **dict.fromkeys(("count", "mark", "watch"), "ddpwatch.probe.watch"),
    "open_recording": "ddpwatch.library",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ddpwatch' has no attribute {name!r}")
