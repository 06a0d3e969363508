"""A tracker for Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.tracking import GeneralTracker  # type: ignore[import-untyped]

import ddpwatch
from ddpwatch.integrations.closing import closing


class AccelerateTracker(GeneralTracker):  # type: ignore[misc]
    """Marks steps, epochs and checkpoints, and gives other trackers the run's figures at the end.

        tracker = AccelerateTracker()
        accelerator = Accelerator(log_with=[tracker, "tensorboard"])
        accelerator.init_trackers("project")
        tracker.attach(accelerator)

    Put it first, as trackers end in that order. ``ddpwatch run`` or ``ddpwatch.watch(model)`` watches the job.

    Args:
        every: Mark every so many steps that are logged; 0 for none.
    """

    name = "ddpwatch"
    requires_logging_directory = False

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every = every
        self._accelerator: Accelerator | None = None
        self._epoch: object = None
        self._step: int | None = None

    @property
    def tracker(self) -> AccelerateTracker:
        """Itself: there is no other."""
        return self

    def attach(self, accelerator: Accelerator) -> None:
        """Marks the checkpoints of an accelerator, and gives its other trackers the figures."""
        self._accelerator = accelerator
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: ddpwatch.mark("checkpoint"))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Marks the step, and the epoch where the values name one."""
        epoch = values.get("epoch")
        if epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            ddpwatch.mark(f"epoch {epoch}")
        if step is not None and self.every and step % self.every == 0:
            ddpwatch.mark(f"step {step}")
        self._step = step if step is not None else self._step

    def finish(self) -> None:
        """Logs the figures."""
        found = closing() if self._accelerator is not None else None
        if found is None or self._accelerator is None:
            return
        for tracker in self._accelerator.trackers:
            if tracker is not self:
                tracker.log(dict(found.metrics), step=self._step)
        self._accelerator.print(found.text)
