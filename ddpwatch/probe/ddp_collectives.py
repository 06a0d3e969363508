"""Seeing a DDP module's collectives: when each was issued, and when its result was there.

Without a comm hook the reducer all-reduces through its process group: `ddpwatch.probe.ddp_timed_group` puts a group in
front of that one, for this reducer only. What is reduced, and how, stays DDP's own C++ path. A comm hook of the user's
is seen from its registration on by `ddpwatch.probe.comm_hooks`. One that was registered before is seen where process
groups have hooks (torch 2.14): `GroupHooks`. Elsewhere its completion is unknown.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction

from ddpwatch.probe.issue_counts import issued_by

if TYPE_CHECKING:
    from ddpwatch.probe.guard import Guard
    from ddpwatch.probe.record import BucketRecord


class DdpObserver(Protocol):
    """Sees the collectives of one module. Its methods are called through the guard."""

    guard: Guard

    @property
    def is_reducing(self) -> bool:
        """Whether a collective on its group that names no module is taken to be this one's."""

    def before_launch(self) -> int:
        """Returns the stamp of a collective that is about to be issued, or 0 to leave it unobserved."""

    def after_launch(self, index: int | None, nbytes: int, at: int, pending: Any) -> BucketRecord | None:
        """Records a collective that was issued.

        Args:
            index: The bucket's index, None for the next one.
            nbytes: Its size.
            at: What `before_launch` returned.
            pending: Its work, or a future that completes when the result is there.

        Returns:
            The bucket's record, None if it is not recorded.
        """

    def hook_has_waited(self, at: int) -> None:
        """Notes that a comm hook returns what has been communicated since ``at`` (what `before_launch` returned)."""

    def on_comm_hook(self) -> None:
        """Notes that the module was given a comm hook that was not wrapped, since its process group has hooks."""


def nbytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's values, also of a sparse one.

    No backend takes any other layout, nor sizes that are symbols: 0 of these.
    """
    with DisableTorchFunction():
        if tensor.layout is torch.sparse_coo:
            with torch._C._DisableTorchDispatch():
                tensor = tensor._values()
        nbytes = tensor.nbytes if tensor.layout is torch.strided else 0
        return nbytes if type(nbytes) is int else 0


def issued_anywhere() -> int | None:
    """Returns how many collectives this process has issued in all its groups; None where one does not count."""
    counts = [issued_by(group) for group in list(dist.distributed_c10d._world.pg_map)]
    return None if None in counts else sum(filter(None, counts))


class GroupHooks:
    """Sees what a comm hook issues on its process group, on torch ≥ 2.14. The user's hook runs as it is.

    One call of it may issue several collectives, and they do not say which bucket they are for. So the figures are
    right only for a hook that issues one all-reduce for each bucket; any other shows a number of buckets that does not
    fit the layout. Sizes are those of what is all-reduced, which the hook has perhaps compressed.

    Args:
        group: The process group; see `supported`. It owns the hooks, which own neither it nor the observer.
        observer: Sees the all-reduces on it while its module reduces.
    """

    def __init__(self, group: Any, observer: DdpObserver) -> None:
        self._group = weakref.ref(group)
        self._observer: Callable[[], DdpObserver | None] = weakref.ref(observer)
        self._unissued: dict[int, tuple[int, int]] = {}
        self._running = False
        # A second hook with an id replaces the first. Users count upwards or take an id(): neither is negative.
        self._id = -id(self)
        on_group = _registered.setdefault(group, [])
        for hooks in [hooks for hooks in on_group if hooks._observer() is None]:
            hooks.close()  # of a module that has died
        on_group.append(self)
        try:
            group.register_pre_hook(self._id, partial(self._guarded, self._before))
            group.register_post_hook(self._id, partial(self._guarded, self._after))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def supported(group: object) -> bool:
        """Returns whether this torch's process groups have such hooks."""
        return hasattr(group, "register_pre_hook") and hasattr(group, "unregister_pre_hook")

    def close(self, busy: bool = False) -> None:
        """Removes the hooks. Safe to call more than once.

        Args:
            busy: Whether the group may be running hooks, on any thread. Torch goes through its list of them without a
                lock, so they stay, and do nothing, until the interpreter ends.
        """
        group = self._group()
        self._observer = _nobody
        if group is None or self not in (on_group := _registered.get(group, [])):
            return
        if busy or self._running:
            in_groups.add(self.close)
            return
        on_group.remove(self)
        group.unregister_pre_hook(self._id)
        group.unregister_post_hook(self._id)

    def _guarded(self, see: Callable[[DdpObserver, Any], None], args: Any) -> None:
        observer = self._observer()
        if observer is None:
            return
        self._running = True  # in case that a signal handler closes
        try:
            observer.guard.run("collectives", see, observer, args)
        finally:
            self._running = False

    def _before(self, observer: DdpObserver, args: Any) -> None:
        tensors = _reduced_by(args) if observer.is_reducing else []
        at = observer.before_launch() if tensors else 0
        if at:
            # Collectives that were seen before their launch and not after it: each has failed
            if len(self._unissued) > 64:
                self._unissued.clear()
            self._unissued[args.op_id] = (sum(map(nbytes_of, tensors)), at)

    def _after(self, observer: DdpObserver, args: Any) -> None:
        nbytes, at = self._unissued.pop(args.op_id, (0, 0))
        if at:
            observer.after_launch(None, nbytes, at, args.work)


def _nobody() -> None:
    """Returns None, as a reference to an observer that has gone."""


_registered: weakref.WeakKeyDictionary[Any, list[GroupHooks]] = weakref.WeakKeyDictionary()


in_groups: set[Callable[[], object]] = set()  # what takes hooks out of groups that may have them at the end


@atexit.register  # before sessions register, so it runs after they have closed
def _take_hooks_out() -> None:
    """Leaves no hook in a group, which may outlive the interpreter: letting go of it then aborts the process."""
    while in_groups:
        in_groups.pop()()


def _reduced_by(args: Any) -> list[torch.Tensor]:
    """Returns the gradients that an all-reduce takes.

    There are none for other collectives (these hooks see all of a group's).
    """
    if args.name.name not in ("ALLREDUCE", "ALLREDUCE_COALESCED"):
        return []
    return [tensor for tensor in args.input_tensors if tensor.dtype is not torch.int32]
