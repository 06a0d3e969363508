"""Sees the collectives that a job issues itself, in any process group.

| by                                            | where               | what                                   |
|-----------------------------------------------|---------------------|----------------------------------------|
| the process groups' own hooks                 | torch ≥ 2.14        | every collective, whoever issues it    |
| events of torch.distributed's functions       | else, Python ≥ 3.12 | what is issued by calls of these       |
| the numbers that process groups count with    | anywhere            | how many there were                    |

Nothing of torch's is wrapped: torch.compile would not look through a wrapper. A function that returns no `Work` has
waited for its collective, which its return shows on Python ≥ 3.12. That of Gloo's which it returns is waited for, too,
by a thread of ddpwatch's; when the job waits for it, nobody can see. Nor when any other collective is done.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddpwatch.probe.calls import SeenCalls, can_see_events, innermost
from ddpwatch.probe.collectives import GroupHooks, issued_by, nbytes_of, stayed
from ddpwatch.probe.event_log import EventLog
from ddpwatch.probe.groups import describe
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.record import BucketRecord
from ddpwatch.wire.messages import OWN_COLLECTIVES, TO_ONE, BucketLayout, CollectiveOp, Layout

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
    "isend": ("send", "tensor"),
    "irecv": ("recv", "tensor"),
    "send": ("send", "tensor"),
    "recv": ("recv", "tensor"),
}
# The same by the names that process groups' hooks give them; of which tensors the bytes count
HOOKED: Final[dict[str, tuple[CollectiveOp, str]]] = {
    "ALLREDUCE": ("all_reduce", "input_tensors"),
    "ALLREDUCE_COALESCED": ("all_reduce", "input_tensors"),
    "REDUCE": ("reduce", "input_tensors"),
    "BROADCAST": ("broadcast", "input_tensors"),
    "ALLGATHER": ("all_gather", "output_tensors"),
    "ALLGATHER_BASE": ("all_gather", "output_tensors"),
    "ALLGATHER_COALESCED": ("all_gather", "output_tensors"),
    "ALLGATHER_INTO_TENSOR_COALESCED": ("all_gather", "output_tensors"),
    "REDUCE_SCATTER": ("reduce_scatter", "input_tensors"),
    "REDUCE_SCATTER_BASE": ("reduce_scatter", "input_tensors"),
    "REDUCE_SCATTER_TENSOR_COALESCED": ("reduce_scatter", "input_tensors"),
    "ALLTOALL": ("all_to_all", "input_tensors"),
    "ALLTOALL_BASE": ("all_to_all", "input_tensors"),
    "GATHER": ("gather", "input_tensors"),
    "SCATTER": ("scatter", "output_tensors"),
    "BARRIER": ("barrier", "input_tensors"),
    "SEND": ("send", "input_tensors"),
    "RECV": ("recv", "output_tensors"),
}
MAKERS: Final = ("_new_group_with_tag", "split_group")  # functions that make a group, and have said who is in it
MOST_SITES: Final = 256  # places with a name each; all others are `OTHER_PLACES`
OTHER_PLACES: Final = "other places"
MOST_GROUPS: Final = 256  # that are told apart; what later ones do is not seen
MOST_IN_STEP: Final = 8192  # of more, none is recorded: perhaps no optimizer ever ends the step
_PLUMBING: Final = ("distributed_c10d.py", "c10d_logger.py", "/nn/functional.py", "/function.py")
_OURS: Final = "/ddpwatch/probe/"
_TORCH: Final = torch.__file__.rpartition("/")[0] + "/"
_HOST: Final = torch.device("cpu")  # made once: a mode of the job's would see it being made
_passing: dict[str, bool] = {}  # by file, whether what is called there only passes on


class _OfThread(threading.local):
    """The newest collective that a function of torch.distributed's has issued on this thread: of which call, where."""

    newest: BucketRecord | None = None
    call = 0  # the id of its frame
    known: KnownGroup


class KnownGroup:
    """A process group of the job's, and what is known of it.

    Attributes:
        id: Its number.
        issued: How many collectives it has issued. Counted where threads issue them: another thread that asks the
            group could be the last that owns it, and would have to end it.
    """

    def __init__(self, group: Any, number: int, by_gloo: bool) -> None:
        self.id = number
        self.issued = issued_by(group) or 0
        self.counts = issued_by(group) is not None
        self.by_gloo = by_gloo
        self.to_one = False  # whether it counts what two ranks do among themselves, too
        self._group = weakref.ref(group)

    def count(self) -> int | None:
        """Counts what it has issued, on a thread that issues; None if it does not count, or has gone."""
        group = self._group()
        count = None if group is None else issued_by(group)
        if count is not None:
            self.issued = count
        return count

    @property
    def has_gone(self) -> bool:
        """Whether it is no more. Ask on a thread that issues."""
        return self._group() is None


class AnyCollective:
    """The collectives of the steps that are recorded in full.

    Args:
        context: Gets each process group, and a layout whose buckets are the places that issue collectives.
        log: Gets each collective.
        charge: Takes what seeing one has cost (ns).

    Attributes:
        on: Whether collectives are recorded now.
        complete: Whether all of the step were so far.
        threads: Those that hooks have run on.
    """

    def __init__(self, context: ProbeContext, log: EventLog, charge: Callable[[int], None]) -> None:
        self._context, self._log, self._charge = context, log, charge
        self.on = self.complete = False
        self._seen = 0
        self._by_hooks = False
        self._calls: list[SeenCalls] = []  # of functions that issue
        self._makers: list[SeenCalls] = []
        self._hooks: list[_Hook] = []
        self._issuing: dict[int, CodeType] = {}  # by id: to hash code takes its time
        self._here = _OfThread()
        self.threads: set[int] = set()
        self._sites: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType | None] = []  # of these places, so that no other code gets their ids
        self._names: dict[int, str] = {}  # of the places
        self._groups: weakref.WeakKeyDictionary[Any, KnownGroup] = weakref.WeakKeyDictionary()
        self._known: list[KnownGroup] = []  # the same, for other threads; replaced, never changed
        self._met = 0

    def see(self) -> None:
        """Starts to see what is issued, where that is possible."""
        self._by_hooks = GroupHooks.supported(dist.ProcessGroup)
        failed = partial(self._context.guard.failed, feature="collectives")
        for name in (*FUNCTIONS, *MAKERS) if can_see_events() else ():
            code = getattr(innermost(getattr(distributed_c10d, name, None)), "__code__", None)
            if code is None:
                continue
            if name in MAKERS:
                self._makers.append(SeenCalls([], code=code, end=self._made, on_error=failed))
                continue
            self._issuing[id(code)] = code
            op, tensors = FUNCTIONS[name]
            names = [tensors, "group"] if tensors in code.co_varnames else ["group"]
            begin: dict[str, Any] = {} if self._by_hooks else {"begin": partial(self._begin, op), "names": names}
            self._calls.append(SeenCalls([], code=code, end=self._end, on_error=failed, **begin))

    @property
    def sees(self) -> bool:
        """Whether collectives are seen, and not only counted."""
        return self._by_hooks or bool(self._calls)

    def turn(self, on: bool) -> None:
        """Records what is issued from here on, or lets it pass."""
        self.on = on and self.sees
        self.complete = self.on or not dist.is_initialized()
        self._seen = 0
        self._pause(not self.on)

    def _pause(self, paused: bool) -> None:
        for calls in self._calls:
            calls.pause(paused)

    def close(self) -> None:
        """Sees nothing more.

        Torch goes through a group's hooks without a lock. So while another thread that has run any is alive, they stay,
        and do nothing, until the interpreter ends.
        """
        self.on = False
        for calls in (*self._calls, *self._makers):
            calls.close()
        others = self.threads & sys._current_frames().keys() - {threading.get_ident()}
        for hook in self._hooks:
            hook.close()
            if others:
                stayed.append(hook.remove)
            else:
                hook.remove()
        self._hooks = []

    def meet_groups(self) -> None:
        """Publishes the process groups that are new, and counts what each has issued."""
        if not dist.is_initialized() or "process groups" in self._context.guard.off:
            return
        named = distributed_c10d._world.pg_group_ranks
        for group in list(distributed_c10d._world.pg_map):
            if (known := self._groups.get(group)) is not None:
                known.count()
            elif self._met < MOST_GROUPS and group in named:  # else a thread is making it
                self._context.guard.run("process groups", self._meet, group)

    def _meet(self, group: Any) -> None:
        self._met += 1
        found = describe(group, _HOST)
        found.kind = role_of(group)
        self._context.publish(found)
        known = self._groups[group] = KnownGroup(group, found.id, found.backend == "gloo")
        self._known = [*(one for one in self._known if not one.has_gone), known]
        if self._by_hooks:
            self._hooks = [*(hooks for hooks in self._hooks if hooks.group() is not None), _Hook(self, group, known)]

    def _made(self, *_: Any) -> None:
        self.meet_groups()

    def issued_in(self) -> list[tuple[int, int]]:
        """Returns the process groups, and how many collectives each has issued. For any thread."""
        return [(known.id, known.issued) for known in self._known if known.counts]

    # -- on the threads that issue -------------------------------------------------------------------------------

    def before(self, known: KnownGroup, args: Any) -> None:
        """Notes what a group's hook says of a collective that it is about to issue."""
        at = time.monotonic_ns()
        named = HOOKED.get(args.name.name)
        if named is not None:  # else it makes a group or a window
            op, tensors = named
            call, _, site = self._site()
            entry = _entry(known, op, site, sum(map(nbytes_of, getattr(args, tensors))), at)
            if call:
                here = self._here
                here.newest, here.call, here.known = entry, call, known
            self._add_collective(known, entry, 1)
        self._charge(time.monotonic_ns() - at)

    def failed(self, error: Exception) -> None:
        """Takes an error of these."""
        self.on = False
        self._context.guard.failed(error, "collectives")

    def _begin(self, op: CollectiveOp, *of_call: Any) -> None:
        """Notes the start of a function, where groups have no hooks."""
        at = time.monotonic_ns()
        group = of_call[-1] or dist.group.WORLD
        known = self._groups.get(group) if group in distributed_c10d._world.pg_map else None
        if not self.on or known is None:
            return
        call, calls, site = self._site()
        if calls == 1:  # else another one calls it
            here = self._here
            here.newest, here.call, here.known = None, call, known
            if group not in distributed_c10d._world.pg_coalesce_state:
                here.newest = _entry(known, op, site, _nbytes(of_call[0]) if len(of_call) > 1 else 0, at)
        self._charge(time.monotonic_ns() - at)

    def _end(self, *of_call: Any) -> None:
        """Notes that a function returns: without a `Work`, it has waited."""
        at, here = time.monotonic_ns(), self._here
        entry = here.newest
        if entry is None or not self.on or self._call_of(sys._getframe(1)) != here.call:
            return
        here.newest, work = None, of_call[-1]
        if not isinstance(work, dist.Work):
            entry.wait_begin, entry.wait_end = entry.launch, at
            entry.done = at
        elif here.known.by_gloo and type(work) is dist.Work and _has_future(work):
            self._context.completions.follow(work, partial(_done, entry))
        if not self._by_hooks:
            self._add_collective(here.known, entry, 0)
        self._charge(time.monotonic_ns() - at)

    def _add_collective(self, known: KnownGroup, entry: BucketRecord, uncounted: int) -> None:
        """Logs a collective, which its group has perhaps not counted yet."""
        known.to_one = known.to_one or entry.op in TO_ONE
        count = known.count()
        known.issued += uncounted
        if count is not None and not known.to_one:
            entry.seq = count + uncounted
        self._log.add_event("collective", entry.launch, entry)
        self._seen += 1
        if self._seen > MOST_IN_STEP:
            self.on = self.complete = False
            self._pause(True)

    # -- places that issue ---------------------------------------------------------------------------------------

    def _call_of(self, frame: FrameType | None) -> int:
        """Returns the id of the frame of the function of torch.distributed's that is under way here; 0 without one."""
        while frame is not None and id(frame.f_code) not in self._issuing:
            frame = frame.f_back if _passes_on(frame) else None
        return 0 if frame is None else id(frame)

    def _site(self) -> tuple[int, int, int]:
        """Returns by what a collective is issued: the outermost function of torch.distributed's, and from where.

        Returns:
            The id of that function's frame, 0 without one; how many such functions call each other; and the number of
            the place: the first call outside what only passes on.
        """
        call, calls = 0, 0
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and _passes_on(frame):
            if id(frame.f_code) in self._issuing:
                call, calls = id(frame), calls + 1
            frame = frame.f_back
        key = (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)
        site = self._sites.get(key)
        return call, calls, self._new_site(key, frame) if site is None else site

    def _new_site(self, key: tuple[int, int], frame: FrameType | None) -> int:
        """Returns its number: it follows from its name, so that all ranks number alike, whatever they issue first."""
        name = _place(frame) if len(self._sites) < MOST_SITES else OTHER_PLACES
        site = crc32(name.encode())
        if name != OTHER_PLACES:
            self._sites[key] = site
            self._codes.append(frame and frame.f_code)
        if site not in self._names:
            self._names[site] = name
            self._announce()
        return site

    def _announce(self) -> None:
        buckets = [BucketLayout(index, 0, [], name) for index, name in self._names.items()]
        epoch = self._context.recorder.epoch
        layout = Layout(rank=0, module=OWN_COLLECTIVES, kind="call", epoch=epoch, params=[], buckets=buckets)
        self._context.publish(layout)


class _Hook:
    """The hook on one process group, which owns it."""

    def __init__(self, seeing: AnyCollective, group: Any, known: KnownGroup) -> None:
        self.group = weakref.ref(group)
        self._seeing: AnyCollective | None = seeing
        self._known = known
        self._id = -id(self)  # others count upwards or take an id(): neither is negative
        group.register_pre_hook(self._id, self._before)

    def _before(self, args: Any) -> None:
        seeing = self._seeing
        if seeing is None:
            return
        seeing.threads.add(threading.get_ident())
        if not seeing.on:
            self._known.issued += 1
            return
        try:
            seeing.before(self._known, args)
        except Exception as error:
            seeing.failed(error)

    def close(self) -> None:
        """Does nothing any more."""
        self._seeing = None

    def remove(self) -> None:
        """Takes the hook from its group. No other thread may be running hooks there."""
        group = self.group()
        if group is not None:
            group.unregister_pre_hook(self._id)


def _entry(known: KnownGroup, op: CollectiveOp, site: int, nbytes: int, at: int) -> BucketRecord:
    entry = BucketRecord(OWN_COLLECTIVES, site, nbytes, at)
    entry.op, entry.group = op, known.id
    return entry


def _has_future(work: dist.Work) -> bool:
    """Returns whether any thread may wait for work of Gloo's: the `wait` of other work does a part of it."""
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


def _done(entry: BucketRecord) -> None:
    entry.done = time.monotonic_ns()


def _passes_on(frame: FrameType) -> bool:
    """Returns whether a place only passes on what another one issues."""
    name = frame.f_code.co_filename
    known = _passing.get(name)
    if known is None:
        known = _passing[name] = name.endswith(_PLUMBING) or _OURS in name
    return known


def _nbytes(tensors: torch.Tensor | Sequence[torch.Tensor] | None) -> int:
    if isinstance(tensors, torch.Tensor):
        return nbytes_of(tensors)
    return sum(map(nbytes_of, tensors or ()))


def _place(frame: FrameType | None) -> str:
    """Returns a name for a place: file and line, or a function of torch's."""
    if frame is None:
        return "unknown"
    code = frame.f_code
    if code.co_filename.startswith(f"{_TORCH}autograd/"):
        return "backward"
    if code.co_filename.startswith(_TORCH):
        module = code.co_filename.removeprefix(_TORCH).removesuffix(".py").replace("/", ".")
        return f"{module.removeprefix('distributed.')} {code.co_name}"[:200]
    return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"[:200]


def role_of(group: Any) -> str:
    """Returns what a group is for: the dimension of a mesh, or what the job has described it as."""
    if group is dist.group.WORLD:
        return "all ranks"
    described = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
    return described if described not in ("", "undefined") else "own"
