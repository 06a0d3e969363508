"""The probe: hooks, stamps and one frame per step, in the training process. The only package that imports torch."""

from ddpwatch.probe.session import RecorderWatch, Watch, mark, watch, watch_recorder

__all__ = ["RecorderWatch", "Watch", "mark", "watch", "watch_recorder"]
