"""Sees the collectives that a job issues itself, in any process group, by the calls of torch.distributed's functions.

A function that returns nothing has waited for its collective. One that returns a `Work` has not: its future says when
the result is there, and looking up its `wait` says when the job starts to wait. That look-up is seen, not the call, so
that a traceback has no frame of ddpwatch's.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddpwatch.probe.calls import SeenCalls, innermost
from ddpwatch.probe.collectives import issued_by
from ddpwatch.probe.completion import Callback
from ddpwatch.probe.event_log import EventLog
from ddpwatch.probe.groups import describe
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.record import BucketRecord
from ddpwatch.wire.messages import BucketLayout, CollectiveOp, Layout

# Operations by the function that issues them, each with the parameter that holds all that is gathered, scattered or
# reduced. Others call these.
FUNCTIONS: Final[dict[str, tuple[CollectiveOp, str]]] = {
    "all_reduce": ("all_reduce", "tensor"),
    "reduce": ("reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "all_gather": ("all_gather", "tensor_list"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "all_gather_single": ("all_gather", "output_tensor"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "all_to_all": ("all_to_all", "input_tensor_list"),
    "all_to_all_single": ("all_to_all", "input"),
    "gather": ("gather", "tensor"),
    "gather_single": ("gather", "tensor"),
    "scatter": ("scatter", "tensor"),
    "barrier": ("barrier", ""),
    "send": ("send", "tensor"),
    "recv": ("recv", "tensor"),
}
# torch compares what a job gives it with these, so that no wrapper can stand in their place: seen by events, or not
COMPARED: Final[dict[str, tuple[CollectiveOp, str]]] = {"isend": ("send", "tensor"), "irecv": ("recv", "tensor")}
TO_ONE: Final = frozenset({"send", "recv"})  # they take a number of their group on the two ranks only
MOST_SITES: Final = 256  # that have a number each; all others are the last
MOST_WORKS: Final = 4096  # that nobody has waited for
_PLUMBING: Final = ("/ddpwatch/probe/", "distributed_c10d.py", "c10d_logger.py", "/nn/functional.py", "/function.py")
_TORCH: Final = torch.__file__.rpartition("/")[0] + "/"


class AnyCollective:
    """The collectives of the steps that are recorded in full.

    Args:
        context: Gets each process group, and a layout whose buckets are the places that issue collectives.
        log: Gets each collective.
        is_full: Whether the step under way is recorded in full. For any thread.
    """

    def __init__(self, context: ProbeContext, log: EventLog, is_full: Callable[[], bool]) -> None:
        self._context, self._log, self._is_full = context, log, is_full
        self._seen: list[SeenCalls] = []
        self._waits: _SeenWait | None = None
        self._calls: dict[int, list[BucketRecord | None]] = {}  # under way, by thread
        self._works: dict[int, BucketRecord] = {}  # by id, not waited for yet
        self._sites: dict[tuple[int, int], int] = {}
        self._codes: list[Any] = []  # of these places, so that no other code gets their ids
        self._done = partial(context.guard.run, "collectives", _is_done)
        self._names: list[str] = []
        self._ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._to_one: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that count what two ranks do among themselves

    def see(self) -> None:
        """Starts."""
        failed = partial(self._context.guard.failed, feature="collectives")
        for name, (op, tensors) in {**FUNCTIONS, **COMPARED}.items():
            function = getattr(distributed_c10d, name, None)
            if function is None:
                continue
            parameters = innermost(function).__code__.co_varnames
            names = [tensors, "group"] if tensors in parameters else ["group"]
            calls: dict[str, Any] = {
                "begin": partial(self._begin, op), "end": self._end, "failed": self._failed, "names": names,
                "on_error": failed,
            }  # fmt: skip
            if name in COMPARED:
                self._seen.append(SeenCalls([], code=innermost(function).__code__, **calls))
            else:
                self._seen.append(SeenCalls([(distributed_c10d, name), (dist, name)], **calls))
        self._waits = _SeenWait(partial(self._context.guard.run, "collectives", self._waits_for))
        self.meet_groups()

    def close(self) -> None:
        """Sees nothing more."""
        for seen in self._seen:
            seen.close()
        if self._waits is not None:
            self._waits.close()

    def meet_groups(self) -> None:
        """Publishes the process groups that are new."""
        if dist.is_initialized() and "process groups" not in self._context.guard.off:
            for group in list(distributed_c10d._world.pg_map):
                if group not in self._ids:
                    self._context.guard.run("process groups", self._meet, group)

    def _meet(self, group: Any) -> None:
        found = describe(group, torch.device("cpu"))
        found.kind = role_of(group)
        self._ids[group] = found.id
        self._context.publish(found)

    def issued_in(self) -> list[tuple[int, int]]:
        """Returns the process groups, and how many collectives each has issued. For any thread."""
        counts = [(number, issued_by(group)) for group, number in list(self._ids.items())]
        return [(number, count) for number, count in counts if count is not None]

    # -- on the threads that issue -------------------------------------------------------------------------------

    def _begin(self, op: CollectiveOp, *of_call: Any) -> None:
        at = time.monotonic_ns()
        if not self._is_full():
            return
        calls = self._calls.setdefault(threading.get_ident(), [])
        group = of_call[-1] or dist.group.WORLD
        within = bool(calls) or group in distributed_c10d._world.pg_coalesce_state
        if within or group not in distributed_c10d._world.pg_map:
            calls.append(None)
            return
        if group not in self._ids:
            self._meet(group)
        entry = BucketRecord(0, self._site(), _nbytes(of_call[0]) if len(of_call) > 1 else 0, at)
        entry.op, entry.group = op, self._ids[group]
        if op in TO_ONE:
            self._to_one.add(group)
        calls.append(entry)

    def _end(self, *of_call: Any) -> None:
        calls = self._calls.get(threading.get_ident())
        entry = calls.pop() if calls else None
        if entry is None:
            return
        group, work = of_call[-2] or dist.group.WORLD, of_call[-1]
        if entry.op not in TO_ONE and group not in self._to_one:
            entry.seq = issued_by(group)
        if not isinstance(work, dist.Work):  # it has waited
            entry.wait_begin, entry.wait_end = entry.launch, time.monotonic_ns()
            entry.done = entry.wait_end
        else:
            self._follow(entry, work)
        self._log.add_event("collective", entry.launch, entry)

    def _failed(self, *of_call: Any) -> None:
        if calls := self._calls.get(threading.get_ident()):
            calls.pop()

    def _follow(self, entry: BucketRecord, work: Any) -> None:
        if len(self._works) >= MOST_WORKS:
            self._works.clear()
        self._works[id(work)] = entry
        try:
            future = work.get_future()
        except RuntimeError:  # this backend has none for the operation: only whoever waits knows when it is done
            return
        if future.done():  # in a callback that torch runs here, what a signal raises would be lost
            entry.done = time.monotonic_ns()
        else:
            future.add_done_callback(Callback(self._done, entry))

    def _waits_for(self, work: Any) -> None:
        if (entry := self._works.pop(id(work), None)) is not None:
            entry.wait_begin = time.monotonic_ns()

    # -- places that issue ---------------------------------------------------------------------------------------

    def _site(self) -> int:
        """Returns the number of the place that issues: the first call outside what only passes on."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(_PLUMBING[1:]) | (
            _PLUMBING[0] in frame.f_code.co_filename
        ):
            frame = frame.f_back
        key = (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)
        site = self._sites.get(key)
        if site is None:
            site = len(self._sites)
            if site >= MOST_SITES:
                return MOST_SITES - 1
            self._sites[key] = site
            self._codes.append(frame and frame.f_code)
            self._names.append(_place(frame) if site < MOST_SITES - 1 else "other places")
            self._announce()
        return site

    def _announce(self) -> None:
        recorder = self._context.recorder
        recorder.epoch += 1
        buckets = [BucketLayout(index, 0, [], name) for index, name in enumerate(self._names)]
        self._context.publish(Layout(rank=0, kind="call", epoch=recorder.epoch, params=[], buckets=buckets))


class _SeenWait:
    """Stands in the place of `Work.wait`: calls back when it is looked up, and gives the method itself."""

    def __init__(self, waits: Callable[[Any], None]) -> None:
        self._original = dist.Work.__dict__["wait"]
        self._call: Callable[[Any], None] | None = waits
        dist.Work.wait = self  # type: ignore[method-assign, assignment]

    def __get__(self, work: Any, owner: type | None = None) -> Any:
        if work is not None and self._call is not None:
            self._call(work)
        return self._original.__get__(work, owner)

    def close(self) -> None:
        """Sees nothing more, and leaves nothing behind, unless somebody else has taken the place."""
        self._call = None
        if dist.Work.__dict__["wait"] is self:
            dist.Work.wait = self._original  # type: ignore[method-assign]


def _is_done(entry: BucketRecord) -> None:
    entry.done = time.monotonic_ns()


def _nbytes(tensors: torch.Tensor | Sequence[torch.Tensor] | None) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(tensor.nbytes for tensor in tensors or ())


def _place(frame: FrameType | None) -> str:
    """Returns a name for a place: file and line, or a function of torch's."""
    if frame is None:
        return "unknown"
    code = frame.f_code
    if code.co_filename.startswith(_TORCH):
        module = code.co_filename.removeprefix(_TORCH).removesuffix(".py").replace("/", ".")
        return f"{module.removeprefix('distributed.')} {code.co_name}"[:200]
    return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"[:200]


def role_of(group: Any) -> str:
    """Returns what a group is for: the dimension of a mesh, where torch has named the group by that."""
    if group is dist.group.WORLD:
        return "all ranks"
    described = str(getattr(group, "group_desc", ""))
    return described.removeprefix("mesh_") if described.startswith("mesh_") else "own"
