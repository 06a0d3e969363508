"""Seeing a DDP module's collectives: when each was issued, and when its result was there.

Without a comm hook the reducer all-reduces through its process group: `ddpwatch.probe.process_group` puts a group in
front of that one, for this reducer only. What is reduced, and how, stays DDP's own C++ path. Where process groups have
hooks (torch 2.14), a comm hook of the user's is left alone and seen through them: `GroupHooks`. Elsewhere
`ddpwatch.probe.comm_hooks` wraps it when it is registered; one that was registered before stays as it is, and its
completion is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ddpwatch.probe.record import BucketRecord


class DdpObserver(Protocol):
    """Sees the collectives of one module. No method raises."""

    def before_launch(self) -> int:
        """The stamp of a collective that is about to be issued, or 0 to leave it unobserved."""

    def after_launch(self, index: int | None, nbytes: int, at: int, future: Callable[[], Any]) -> BucketRecord | None:
        """Records a collective that was issued.

        Args:
            index: The bucket's index, None for the next one.
            nbytes: Its size.
            at: What `before_launch` returned.
            future: Gives what completes when the result is there; making it takes time.

        Returns:
            The bucket's record, None if it is not recorded.
        """

    def on_error(self, error: Exception) -> None:
        """Takes an error of ddpwatch's."""

    def on_comm_hook(self) -> None:
        """The module was given a comm hook that was not wrapped, since its process group has hooks."""


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a bucket's values, also of a sparse one."""
    return tensor.nbytes if tensor.layout is torch.strided else tensor._values().nbytes


def issued_by(group: Any) -> int | None:
    """How many collectives a process group has issued on this rank; None where it does not count."""
    try:
        count: int = group._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):  # another kind of group, or a backend that does not count
        return None
    return count


MAX_UNISSUED = 64  # collectives that were seen before their launch and not after it: each has failed


class GroupHooks:
    """Sees what a comm hook issues on its process group, on torch ≥ 2.14. The user's hook runs as it is.

    One call of it may issue several collectives, and they do not say which bucket they are for. So the figures are
    right only for a hook that issues one all-reduce for each bucket; any other shows a number of buckets that does not
    fit the layout.

    Args:
        group: The process group; see `supported`.
        observer: Sees every all-reduce on it.
    """

    def __init__(self, group: Any, observer: DdpObserver) -> None:
        self._observer = observer
        self._unissued: dict[int, tuple[int, int]] = {}
        self._handles = [group.register_pre_hook(self._before), group.register_post_hook(self._after)]

    @staticmethod
    def supported(group: object) -> bool:
        """Whether this torch's process groups have such hooks."""
        return hasattr(group, "register_pre_hook") and hasattr(group, "register_post_hook")

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, args: Any) -> None:
        try:
            tensors = _reduced_by(args)
            at = self._observer.before_launch() if tensors else 0
            if at:
                if len(self._unissued) > MAX_UNISSUED:
                    self._unissued.clear()
                self._unissued[args.op_id] = (sum(map(nbytes_of, tensors)), at)
        except Exception as error:
            self._observer.on_error(error)

    def _after(self, args: Any) -> None:
        try:
            nbytes, at = self._unissued.pop(args.op_id, (0, 0))
            if at:
                self._observer.after_launch(None, nbytes, at, args.work.get_future)
        except Exception as error:
            self._observer.on_error(error)


def _reduced_by(args: Any) -> list[torch.Tensor]:
    """The gradients that an all-reduce takes; nothing for other collectives (these hooks see all of a group's)."""
    if "allreduce" not in str(args.name).lower().replace("_", ""):
        return []
    return [tensor for tensor in args.input_tensors if tensor.dtype is not torch.int32]
