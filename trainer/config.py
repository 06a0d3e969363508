"""The configuration of a training run, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from trainer.comm_hooks.registry import HookOptions


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: what is trained, on what, and how its gradients are synchronised."""

    model: str = "gpt"
    """Name of the model, with options: ``gpt:width=128,layers=2``."""

    data: str = "text"
    """Name of the data, with options: ``text:block_size=128``."""

    text: Path | None = None
    """File or directory to read as text; None for the standard library's own sources."""

    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto`` for CUDA where there is a GPU. Ranks share GPUs if there are fewer."""

    strategy: str = "ddp"
    """How gradients are synchronised."""

    comm_hook: str | None = None
    """Comm hook for DDP; None for its built-in all-reduce."""

    hook_options: HookOptions = field(default_factory=HookOptions)
    """Options of the comm hook."""

    module_hooks: tuple[str, ...] = ()
    """Hooks on layers, such as ``clip:layer=head,norm=1``."""

    inject: tuple[str, ...] = ()
    """Faults, such as ``slow-backward:rank=1,ms=200``."""

    bucket_cap_mb: float | None = None
    """Largest bucket in MiB; None for 25, the first bucket 1."""

    find_unused_parameters: bool = False
    """Let DDP look for parameters that a forward did not use (``bucketed-hooks`` always can)."""

    steps: int = 100
    """Optimizer steps to take."""

    batch_sizes: tuple[int, ...] = (2,)
    """Samples per micro-batch: one number for all ranks, or one per rank."""

    accumulate: int = 1
    """Micro-batches per optimizer step."""

    accumulate_wrong: bool = False
    """Synchronise after every micro-batch: the common mistake, same result and many times the traffic."""

    seed: int = 0
    """Seed of the initial parameters and of the order of the samples."""

    optimizer: str = "adamw"
    """``adamw``, or ``sgd`` (momentum 0.9)."""

    lr: float = 1e-3
    """Peak learning rate."""

    schedule: str = "constant"
    """``constant``, ``linear`` or ``cosine``: how the learning rate falls to zero after warm-up."""

    warmup_steps: int = 0
    """Steps in which the learning rate rises from zero."""

    amp: bool = False
    """Compute forward in bfloat16 where that is safe."""

    evaluate: bool = False
    """Measure loss and accuracy on the test data at the end."""

    checkpoint: Path | None = None
    """Directory of checkpoints."""

    checkpoint_every: int | None = None
    """Steps between checkpoints; None for one at the end."""

    resume: bool = False
    """Continue from the newest checkpoint, if there is one. A restart by torchrun always does."""

    save_params: Path | None = None
    """Where rank 0 writes the final parameters."""

    log_every: int = 10
    """Steps between two lines of progress."""

    def batch_size(self, rank: int) -> int:
        """Return the samples per micro-batch of one rank."""
        return self.batch_sizes[rank if len(self.batch_sizes) > 1 else 0]
