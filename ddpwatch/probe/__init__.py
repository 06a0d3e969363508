"""Runs in the training process: hooks, stamps, one frame per step. The only package that imports torch."""

from ddpwatch.probe.session import Watch, mark, watch

__all__ = ["Watch", "mark", "watch"]
