"""What a strategy reports about a step.

The trainer knows one small protocol. In a watched run ddpwatch's ``StepRecorder`` implements it, so that every
strategy's timeline comes from the same instrument; in an unwatched run `NullInstrument` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class BucketContent(NamedTuple):
    """A bucket of a strategy: its size on the wire and the positions of its parameters."""

    nbytes: int
    parameters: Sequence[int]


class Instrument(Protocol):
    """Takes stamps; each method is called at the moment it names."""

    def forward_begin(self) -> None:
        """The model is about to be called."""

    def forward_end(self) -> None:
        """The model has returned."""

    def backward_begin(self) -> Any:
        """Backward is about to start."""

    def backward_compute_end(self) -> None:
        """All gradients are computed; what follows waits for communication."""

    def backward_end(self) -> None:
        """All gradients are synchronised."""

    def wait_begin(self) -> None:
        """Backward stops to wait for a collective."""

    def wait_end(self) -> None:
        """Backward goes on after :meth:`wait_begin`."""

    def hook_fired(self, param: int) -> None:
        """The gradient of parameter ``param`` was accumulated."""

    def bucket_launch(self, module: int, index: int, nbytes: int, ready_ns: int | None = None) -> Any:
        """A bucket's collective is issued; the result identifies the bucket to :meth:`bucket_done`."""

    def bucket_done(self, bucket: Any) -> None:
        """The bucket's result is there. Safe on any thread."""

    def warm_up(self) -> None:
        """The current step forms buckets, and stays out of statistics."""


Announce = Callable[[Sequence[str], Sequence[BucketContent]], None]
"""Takes the names of all parameters and the buckets, when they are formed and whenever they change."""


class NullInstrument:
    """An instrument that records nothing."""

    def _ignore(self, *_: Any, **__: Any) -> None: ...

    forward_begin = forward_end = backward_begin = backward_compute_end = backward_end = _ignore
    wait_begin = wait_end = hook_fired = bucket_launch = bucket_done = warm_up = _ignore
