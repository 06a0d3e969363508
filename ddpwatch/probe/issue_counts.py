"""Counts the collectives that a process group has issued, as all of its ranks count them.

Gloo also counts what two ranks do among themselves, and `monitored_barrier` is such sends and receives inside, most of
them rank 0's. So ranks' own counts would drift apart. What the calls of these functions add is taken off again, but
for one: `monitored_barrier` counts as the one collective that it is, from where a rank enters it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ddpwatch.probe.calls import SeenCalls, innermost

BARRIER: Final = "monitored_barrier"
# Functions, each with how many collectives a call is. Others call these
_COUNT_AS: Final = {"isend": 0, "irecv": 0, BARRIER: 1}


class _OwnCount:
    """The part of a group's count that is this rank's alone.

    Attributes:
        taken_off: How many of its count are no collectives.
        during: While a call is under way: how many collectives there were with it, and up to which count of the
            group's it can be so. An exception may have ended it.
    """

    __slots__ = ("during", "taken_off")

    def __init__(self) -> None:
        self.taken_off = 0
        self.during: tuple[int, int] | None = None

    def collectives(self, counted: int) -> int:
        """Returns how many of what the group has counted are collectives."""
        during = self.during
        return during[0] if during is not None and counted <= during[1] else counted - self.taken_off


_own_counts: weakref.WeakKeyDictionary[Any, _OwnCount] = weakref.WeakKeyDictionary()
_seen: list[SeenCalls] = []


def issued_by(group: Any) -> int | None:
    """Returns how many collectives a process group has issued on this rank; None where it does not count."""
    counted = _counted_by(group)
    own = _own_counts.get(group) if counted is not None and _own_counts else None
    return counted if counted is None or own is None else own.collectives(counted)


def _counted_by(group: Any) -> int | None:
    try:
        count: int = group._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):  # another kind of group, or a backend that does not count
        return None
    return count


def see_own_counts(c10d: Any, on_error: Callable[[Exception], None]) -> Callable[[], None]:
    """Sees from here on what a rank counts alone, if it is not seen yet. Returns what ends that.

    A wrapper of `isend` or `irecv` would be no operation for `P2POp`, so Python < 3.12 shows `monitored_barrier` alone.

    Args:
        c10d: The module ``torch.distributed.distributed_c10d``.
        on_error: Takes an error of this, and raises it if it is the job's.
    """
    if _seen:
        return lambda: None
    for name, collectives in _COUNT_AS.items():
        function = getattr(c10d, name, None)
        code = getattr(innermost(function), "__code__", None)
        if code is None:
            continue
        places = [(c10d, name), (sys.modules.get("torch.distributed"), name)] if name == BARRIER else []
        begin, end = partial(_begin, c10d, collectives), partial(_end, c10d)
        _seen.append(SeenCalls(places, begin=begin, end=end, names=["group"], on_error=on_error, code=code))
    return _see_no_more


def _see_no_more() -> None:
    while _seen:
        _seen.pop().close()


def _begin(c10d: Any, collectives: int, given: Any) -> None:
    group = _group_of(c10d, given)
    counted = None if group is None else _counted_by(group)
    if counted is None:
        return
    own = _own_counts.setdefault(group, _OwnCount())
    most = 2 * group.size() if collectives else 1
    own.during = own.collectives(counted) + collectives, counted + most


def _end(c10d: Any, given: Any, result: object) -> None:
    group = _group_of(c10d, given)
    own = None if group is None else _own_counts.get(group)
    if own is not None and own.during is not None:
        own.taken_off = (_counted_by(group) or 0) - own.during[0]
        own.during = None


def _group_of(c10d: Any, given: Any) -> Any:
    """Returns the group that a call is in; None if this process is not in it."""
    group = c10d.GroupMember.WORLD if given is None else given
    return group if isinstance(group, c10d.ProcessGroup) else None
