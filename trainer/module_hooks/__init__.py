"""Hooks on single layers, composable with every strategy."""

from trainer.module_hooks.activations import Chunk
from trainer.module_hooks.gradients import Clip, Scale, Transform
from trainer.module_hooks.registry import MODULE_HOOKS, attach_module_hooks

__all__ = ["MODULE_HOOKS", "Chunk", "Clip", "Scale", "Transform", "attach_module_hooks"]
