"""Runs in the training process: hooks, stamps, one frame per step. The only package that imports torch."""

from ddpwatch.probe.session import RecorderWatch, Watch, mark, watch, watch_recorder

__all__ = ["RecorderWatch", "Watch", "mark", "watch", "watch_recorder"]
