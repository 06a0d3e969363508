"""A process group of the job's: what is known of it, and the hook on it (torch ≥ 2.14).

Torch goes through a group's hooks without a lock, and a hook that is Python waits for the GIL meanwhile. So a hook is
taken out only where no other thread can be issuing. It is there in full steps alone, as in others it would cost a
microsecond a collective. None is left when the interpreter ends, which a group may outlive: letting go of it would
abort the process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from ddpwatch.probe.ddp_collectives import in_groups
from ddpwatch.probe.issue_counts import issued_by
from ddpwatch.probe.stacks import frames_of_others

_STDLIB: Final = threading.__file__.rpartition("/")[0] + "/"
_WAITING: Final = {"wait", "join", "_wait_for_tstate_lock", "select", "_worker"}  # functions of the standard library's
_THREADING: Final = threading.__file__


class KnownGroup:
    """A process group, and what is known of it.

    Args:
        group: It. Not kept alive.
        number: Its number.
        by_gloo: Whether its backend is Gloo.

    Attributes:
        id: Its number.
        by_gloo: As above.
        counts: Whether it counts its collectives.
        issued: How many those were when they were counted last.
        to_one: Whether it counts what two ranks do among themselves, too.
    """

    def __init__(self, group: Any, number: int, by_gloo: bool) -> None:
        self.id, self.by_gloo = number, by_gloo
        count = issued_by(group)
        self.counts = count is not None
        self.issued = count or 0
        self.to_one = False
        self._group = weakref.ref(group)

    def count(self) -> int | None:
        """Counts what it has issued; None if it does not count, or has gone.

        Call it on a thread that issues, or while the job stands still: whoever asks a group could be the last that owns
        it, and would have to end it.
        """
        group = self._group() if self.counts else None
        count = None if group is None else issued_by(group)
        if count is not None:
            self.issued = count
        return count

    @property
    def has_gone(self) -> bool:
        """Whether it is no more. Ask on a thread that issues."""
        return self._group() is None


class GroupHook:
    """A hook on one process group, called before each of its collectives while it is there.

    Args:
        group: It owns the hook.
        call: Takes torch's `PreHookArgs`. What it raises reaches the job.

    Attributes:
        is_in: Whether the group has it.
    """

    def __init__(self, group: Any, call: Callable[[Any], None]) -> None:
        self._group = weakref.ref(group)
        self._call: Callable[[Any], None] | None = call
        self.is_in = False
        self._id = -id(self)  # others count upwards or take an id(): neither is negative

    def register(self) -> None:
        """Puts it in its group."""
        group = self._group()
        if group is not None and not self.is_in:
            self.is_in = True
            in_groups.add(self.remove)
            group.register_pre_hook(self._id, self._before)

    def remove(self) -> None:
        """Takes it out of its group. No thread may be running hooks there."""
        group = self._group()
        if group is not None:
            group.unregister_pre_hook(self._id)
        in_groups.discard(self.remove)
        self.is_in = False

    def silence(self) -> None:
        """Calls no more, wherever the hook is."""
        self._call = None

    def forgotten(self) -> bool:
        """Returns whether its group has gone, and the hook with it."""
        if gone := self._group() is None:
            in_groups.discard(self.remove)
        return gone

    def _before(self, args: Any) -> None:
        if self._call is not None:
            self._call(args)


def others_rest() -> bool:
    """Returns whether no other thread can be issuing a collective: each waits in Python, or is ddpwatch's."""
    return all(map(_rests, frames_of_others().values()))


def _rests(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name in _WAITING and code.co_filename.startswith(_STDLIB) and "-packages/" not in code.co_filename:
        return True
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename != _THREADING:
        frame, outer = outer, outer.f_back
    return "/ddpwatch/probe/" in frame.f_code.co_filename
