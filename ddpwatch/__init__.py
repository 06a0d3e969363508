"""ddpwatch: a live monitor for PyTorch data-parallel training.

    import ddpwatch
    ddpwatch.watch(ddp_model)

Importing it loads neither torch nor textual. The first use of `watch` or `mark` loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpwatch.version import __version__

__all__ = ["__version__", "mark", "watch"]

if TYPE_CHECKING:
    from ddpwatch.probe import mark, watch


def __getattr__(name: str) -> Any:
    if name in ("mark", "watch"):
        from ddpwatch import probe

        return getattr(probe, name)
    raise AttributeError(f"module 'ddpwatch' has no attribute {name!r}")
