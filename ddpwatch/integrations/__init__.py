"""Callbacks for the frameworks that people train with. A framework is imported when its class is first used.

    from ddpwatch.integrations import LightningCallback

Each marks steps, epochs and checkpoints on the timeline. At the end, the framework's own loggers get the figures of
``ddpwatch report --json``, and its log one paragraph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["AccelerateTracker", "LightningCallback", "TransformersCallback"]

if TYPE_CHECKING:
    from ddpwatch.integrations.for_accelerate import AccelerateTracker
    from ddpwatch.integrations.for_lightning import LightningCallback
    from ddpwatch.integrations.for_transformers import TransformersCallback


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'ddpwatch.integrations' has no attribute {name!r}")
    framework = name.removesuffix("Callback").removesuffix("Tracker").lower()
    return getattr(import_module(f"ddpwatch.integrations.for_{framework}"), name)
