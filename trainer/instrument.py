"""What a strategy tells about a step, and to whom.

The trainer speaks to one small protocol. Unwatched, nobody listens; watched, it is ddpwatch's ``StepRecorder``, so
that every strategy draws its timeline with the same instrument.
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
        """Backward goes on."""

    def hook_fired(self, param: int) -> None:
        """The gradient of parameter ``param`` was accumulated."""

    def bucket_launch(self, module: int, index: int, nbytes: int, ready_ns: int | None = None) -> Any:
        """A bucket leaves now; what is returned identifies it to :meth:`bucket_done`."""

    def bucket_done(self, bucket: Any) -> None:
        """The bucket's result is there. Called from any thread."""

    def warm_up(self) -> None:
        """The step that is going on forms buckets, and shall not count."""


Announce = Callable[[Sequence[str], Sequence[BucketContent]], None]
"""Told the names of all parameters and the buckets, whenever these have been formed anew."""


class Unwatched:
    """Nobody listens."""

    def forward_begin(self) -> None:
        """Ignore it."""

    def forward_end(self) -> None:
        """Ignore it."""

    def backward_begin(self) -> None:
        """Ignore it."""

    def backward_compute_end(self) -> None:
        """Ignore it."""

    def backward_end(self) -> None:
        """Ignore it."""

    def wait_begin(self) -> None:
        """Ignore it."""

    def wait_end(self) -> None:
        """Ignore it."""

    def hook_fired(self, param: int) -> None:
        """Ignore it."""

    def bucket_launch(self, module: int, index: int, nbytes: int, ready_ns: int | None = None) -> None:
        """Ignore it; None stands for a bucket that nobody records."""

    def bucket_done(self, bucket: Any) -> None:
        """Ignore it."""

    def warm_up(self) -> None:
        """Ignore it."""
