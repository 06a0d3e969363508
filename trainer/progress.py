"""Progress on rank 0: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys

from torch import Tensor
from tqdm import tqdm


class Progress:
    """Shows how far the training is. Lines go to stdout, the bar to stderr."""

    def __init__(self, steps: int, done: int, every: int, shown: bool) -> None:
        """Start after ``done`` of ``steps`` steps; ``shown`` on one rank only."""
        self.steps, self.every, self.shown = steps, every, shown
        self.bar = tqdm(total=steps, initial=done, unit="step") if shown and sys.stderr.isatty() else None
        self.first = done + 1

    def update(self, step: int, loss: Tensor) -> None:
        """Report a step. Reading the loss waits for the device, so that happens only where it is shown."""
        if self.bar is not None:
            self.bar.update()
        if self.shown and (step % self.every == 0 or step in (self.first, self.steps)):
            self._show(step, loss.item())

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self.bar is not None:
            self.bar.close()

    def _show(self, step: int, loss: float) -> None:
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{loss:.4f}")
        else:
            print(f"step {step}/{self.steps} loss {loss:.4f}", flush=True)
