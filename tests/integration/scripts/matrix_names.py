"""The strategies and comm hooks that ``trainer_matrix.py`` goes through, for the tests to import without torch."""

from __future__ import annotations

EXACT_STRATEGIES = ("manual", "param-hooks", "param-hooks-sync", "bucketed-hooks", "ddp")
EXACT_HOOKS = ("allreduce", "weighted", "gathered", "reduce-scatter")
CAST_HOOKS = ("fp16", "bf16", "fp16+allreduce", "bf16+reduce-scatter", "fp16+gathered", "bf16+weighted")
LOW_RANK_HOOKS = ("powersgd", "batched-powersgd", "fp16+powersgd", "bf16+batched-powersgd")
