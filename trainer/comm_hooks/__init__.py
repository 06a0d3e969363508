"""DDP communication hooks, by name: what happens to a bucket instead of a plain all-reduce.

Each hook is a free function ``(state, bucket) -> Future``. ``fp16+NAME`` and ``bf16+NAME`` wrap any other.
"""

from trainer.comm_hooks.registry import COMM_HOOKS, CommHook, HookOptions, build_comm_hook, check_comm_hook, in_order

__all__ = ["COMM_HOOKS", "CommHook", "HookOptions", "build_comm_hook", "check_comm_hook", "in_order"]
