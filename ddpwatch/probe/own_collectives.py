"""Sees the collectives that a job issues itself, in any process group, also beside those of DDP or FSDP2.

| by                                            | where               | what                                   |
|-----------------------------------------------|---------------------|----------------------------------------|
| the process groups' own hooks                 | torch ≥ 2.14        | every collective, whoever issues it    |
| events of torch.distributed's functions       | else, Python ≥ 3.12 | what is issued by calls of these       |
| the numbers that process groups count with    | anywhere            | how many there were                    |

Nothing of torch's is wrapped: torch.compile would not look through a wrapper. A function that returns no `Work` has
waited for its collective, which its return shows on Python ≥ 3.12. That of Gloo's which it returns is waited for, too,
by a thread of ddpwatch's; `ddpwatch.probe.work_waits` sees when the job waits for it. Of functional ones, `wait_tensor`
is a function. Only what Gloo does on the host is timed: elsewhere, nobody can see when a collective is done.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch.distributed import _functional_collectives, distributed_c10d

from ddpwatch.probe.calls import GROUP_MAKER, SeenCalls, can_see_events, innermost
from ddpwatch.probe.ddp_collectives import GroupHooks, nbytes_of
from ddpwatch.probe.event_log import EventLog
from ddpwatch.probe.group_ids import describe
from ddpwatch.probe.group_roles import OWN, has_maker, note_maker, notes, role_of
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.known_group import GroupHook, KnownGroup, others_rest
from ddpwatch.probe.places import Places
from ddpwatch.probe.record import BucketRecord
from ddpwatch.probe.role_makers import see_all_roles
from ddpwatch.probe.work_waits import WorkWaits
from ddpwatch.wire.messages import OWN_COLLECTIVES, TO_ONE, CollectiveOp, Feature, Group

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
MAKERS: Final = (GROUP_MAKER, "split_group")  # functions that make a group, and have said who is in it
LOOKS: Final = 8  # where steps start, for the name of a group that its maker has not kept yet
MOST_GROUPS: Final = 256  # that are known; what later ones do is not seen
MOST_UNWAITED: Final = 64  # results of functional collectives, per thread
MOST_IN_STEP: Final = 8192  # of more, none is recorded: perhaps no optimizer ever ends the step
_HOST: Final = torch.device("cpu")  # made once: a mode of the job's would see it being made


class _OfThread(threading.local):
    """The newest collective that a function of torch.distributed's has issued on this thread: of which call, where.

    And those of functional collectives' operators.
    """

    newest: BucketRecord | None = None
    call = 0  # the id of its frame
    on_host = False  # whether it moves a CPU's tensors
    known: KnownGroup
    waiting: BucketRecord | None = None  # the functional one that it waits for

    def __init__(self) -> None:
        self.functional: dict[int, BucketRecord] = {}  # not waited for yet, by the address of the result


class OwnCollectiveProbe:
    """The collectives of the steps that are recorded in full.

    Args:
        context: Gets each process group, and a layout whose buckets are the places that issue collectives.
        log: Gets each collective.
        charge: Takes what seeing one has cost (ns).
        beside: Whether DDP or FSDP2 issues collectives, too, which are seen otherwise.

    Attributes:
        on: Whether collectives are recorded now.
        complete: Whether all of the step were so far.
        seen: How many that were.
        feature: What goes off after an error.
    """

    def __init__(
        self, context: ProbeContext, log: EventLog, charge: Callable[[int], None], beside: bool = False
    ) -> None:
        self._context, self._log, self._charge, self._beside = context, log, charge, beside
        self.feature: Feature = "own collectives" if beside else "collectives"
        self.on = self.complete = False
        self.seen = 0
        self._by_hooks = False
        self._calls: list[SeenCalls] = []  # of functions that issue
        self._makers: list[SeenCalls] = []
        self._paused = False
        self._hooks: list[GroupHook] = []
        self._in_hook = False
        self._issuing: dict[int, CodeType] = {}  # by id
        self._places = Places(context, self._issuing, beside)
        self._here = _OfThread()
        self._waits = WorkWaits(charge, partial(context.guard.failed, feature=self.feature))
        self._groups: weakref.WeakKeyDictionary[Any, KnownGroup] = weakref.WeakKeyDictionary()
        self._said: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()  # of those that others do not
        self._unnamed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how often more to look
        self._notes = 0
        self._known: list[KnownGroup] = []  # the same, for other threads; replaced, never changed
        self._met = 0
        self._meeting = threading.Lock()  # nobody ever waits for it
        see_all_roles()

    def see(self) -> None:
        """Starts to see what is issued, where that is possible."""
        self._by_hooks = GroupHooks.supported(dist.ProcessGroup)
        failed = partial(self._context.guard.failed, feature=self.feature)
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
        if self._by_hooks and can_see_events():
            code, names = _functional_collectives.wait_tensor.__code__, ["tensor"]
            seen = SeenCalls([], code=code, begin=self._wait_begin, end=self._wait_end, names=names, on_error=failed)
            self._calls.append(seen)

    @property
    def sees(self) -> bool:
        """Whether collectives are seen, and not only counted."""
        return self._by_hooks or bool(self._calls)

    def turn(self, on: bool) -> None:
        """Records what is issued from here on, or lets it pass."""
        self.on = on and self.sees
        self.complete = self.on or not dist.is_initialized()
        self.seen = 0
        for known in self._known if self.on else ():
            known.count()
        self._pause(not self.on)
        self._put_hooks()

    def _put_hooks(self) -> None:
        """Puts hooks in groups while collectives are recorded, and takes them out if no thread may be running one."""
        if self.on:
            for hook in self._hooks:
                hook.register()
        elif (there := [hook for hook in self._hooks if hook.is_in]) and not self._in_hook and others_rest():
            for hook in there:
                hook.remove()

    def _pause(self, paused: bool) -> None:
        if paused is not self._paused:
            self._paused = paused
            for calls in self._calls:
                calls.pause(paused)
            self._waits.pause(paused)

    def close(self) -> None:
        """Sees nothing more. Hooks that cannot be taken out now do nothing, until the interpreter ends."""
        self.on = False
        for calls in (*self._calls, *self._makers):
            calls.close()
        self._waits.close()
        for hook in self._hooks:
            hook.silence()
        self._put_hooks()

    def meet_groups(self) -> None:
        """Publishes the process groups that are new, and what others are for. Call it where a step starts."""
        self._publish_groups(look_again=True)

    def _publish_groups(self, look_again: bool) -> None:
        if not dist.is_initialized() or "process groups" in self._context.guard.off:
            return
        if not self._meeting.acquire(blocking=False):  # another thread is at it
            return
        try:
            named = distributed_c10d._world.pg_group_ranks
            for group in list(distributed_c10d._world.pg_map):
                if group not in self._groups and self._met < MOST_GROUPS and group in named:  # else it is being made
                    self._context.guard.run("process groups", self._meet, group)
            for group in self._to_look_at() if look_again else ():
                self._context.guard.run("process groups", self._look_again, group)
        finally:
            self._meeting.release()

    def _meet(self, group: Any) -> None:
        self._met += 1
        found = describe(group, _HOST)
        if found.id not in self._context.published:  # DDP and FSDP2 know what theirs are for
            found.kind = role_of(group)
            self._context.publish(found)
            self._said[group] = found
            if found.kind == OWN and has_maker(group):
                self._unnamed[group] = LOOKS
        known = self._groups[group] = KnownGroup(group, found.id, found.backend == "gloo")
        self._known = [*(one for one in self._known if not one.has_gone), known]
        if self._by_hooks:
            self._hooks = [
                *(hook for hook in self._hooks if not hook.forgotten()),
                GroupHook(group, partial(self._before, known)),
            ]
            self._put_hooks()

    def _to_look_at(self) -> list[Any]:
        """Returns the groups that may be known by another role since they were looked at: all, if one was noted."""
        before, self._notes = self._notes, notes()
        return list(self._unnamed if self._notes == before else self._said)

    def _look_again(self, group: Any) -> None:
        """Publishes what a group is for, once its maker has kept it under a name, or a pipeline's stage talks in it."""
        found, looks = self._said[group], self._unnamed.pop(group, 0)
        if (kind := role_of(group)) != found.kind:
            found.kind = kind
            self._context.publish(found)
        elif looks:
            self._unnamed[group] = looks - 1

    def _made(self, group: Any) -> None:
        note_maker(group)
        self._publish_groups(look_again=False)  # others' makers have not kept theirs yet, either

    def issued_in(self, still: bool) -> list[tuple[int, int]]:
        """Returns the process groups, and how many collectives each has issued; none while nobody counts.

        For any thread.

        Args:
            still: Whether the job seems to stand still: then they are counted now.
        """
        if not (still or self.on):  # since they were counted last, there may have been more
            return []
        for known in self._known if still else ():
            known.count()
        return [(known.id, known.issued) for known in self._known if known.counts]

    # -- on the threads that issue -------------------------------------------------------------------------------

    def _before(self, known: KnownGroup, args: Any) -> None:
        """Runs as a group's hook."""
        if not self.on:
            return
        self._in_hook = True  # in case that a signal handler goes on with the loop, or closes
        try:
            self._note_issue(known, args)
        except Exception as error:
            self.on = False
            self._context.guard.failed(error, self.feature)
        finally:
            self._in_hook = False

    def _note_issue(self, known: KnownGroup, args: Any) -> None:
        """Notes what a group's hook says of a collective that it is about to issue."""
        at = time.monotonic_ns()
        named = HOOKED.get(args.name.name)
        call, _, place = (0, 0, None) if named is None or self._passes() else self._places.find()
        if named is not None and place is not None:  # else it makes a group or a window, or DDP or FSDP2 issues it
            op, tensors = named
            moved = getattr(args, tensors)
            entry = _entry(known, op, place, sum(map(nbytes_of, moved)), at)
            here, on_host = self._here, known.by_gloo and _on_cpu(moved)
            if call:
                here.newest, here.call, here.known, here.on_host = entry, call, known, on_host
            elif on_host and len(here.functional) < MOST_UNWAITED:
                here.functional.update(dict.fromkeys(map(_address, args.output_tensors or args.input_tensors), entry))
            self._add_collective(known, entry, 1)
        self._charge(time.monotonic_ns() - at)

    def _begin(self, op: CollectiveOp, *of_call: Any) -> None:
        """Notes the start of a function, where groups have no hooks."""
        at = time.monotonic_ns()
        group = dist.group.WORLD if of_call[-1] is None else of_call[-1]
        known = self._groups.get(group) if isinstance(group, dist.ProcessGroup) else None
        if not self.on or known is None or self._passes():
            return
        call, calls, place = self._places.find()
        if calls == 1 and place is not None:  # else another one calls it, or FSDP2
            here = self._here
            here.newest, here.call, here.known = None, call, known
            if group not in distributed_c10d._world.pg_coalesce_state:
                moved = _tensors(of_call[0]) if len(of_call) > 1 else []
                here.newest = _entry(known, op, place, sum(map(nbytes_of, moved)), at)
                here.on_host = known.by_gloo and _on_cpu(moved)
        self._charge(time.monotonic_ns() - at)

    def _wait_begin(self, tensor: Any) -> None:
        """Notes that the result of a functional collective is waited for."""
        at, here = time.monotonic_ns(), self._here
        here.waiting = here.functional.pop(_address(tensor), None) if self.on and here.functional else None
        if here.waiting is not None:
            here.waiting.wait_begin = at
            self._charge(time.monotonic_ns() - at)

    def _wait_end(self, *_: Any) -> None:
        at, here = time.monotonic_ns(), self._here
        if (entry := here.waiting) is not None:
            here.waiting, entry.wait_end, entry.done = None, at, at

    def _passes(self) -> bool:
        """Returns whether what is issued now is a bucket of DDP's."""
        return self._beside and self._context.recorder.issuing

    def _end(self, *of_call: Any) -> None:
        """Notes that a function returns: without a `Work`, it has waited."""
        at, here = time.monotonic_ns(), self._here
        entry = here.newest
        if entry is None or not self.on or self._places.call_under_way() != here.call:
            return
        here.newest, work = None, of_call[-1]
        if not isinstance(work, dist.Work):
            if here.on_host or entry.op == "barrier":
                entry.wait_begin, entry.wait_end = entry.launch, at
                entry.done = at
        elif here.on_host and type(work) is dist.Work:
            self._waits.follow(work, entry, self._places.frame_under_way())
            if entry.op not in TO_ONE:
                self._context.completions.follow(work, partial(_done, entry))
        if not self._by_hooks:
            self._add_collective(here.known, entry, 0)
        self._charge(time.monotonic_ns() - at)

    def _add_collective(self, known: KnownGroup, entry: BucketRecord, uncounted: int) -> None:
        """Logs a collective, which its group has perhaps not counted yet."""
        known.to_one = known.to_one or entry.op in TO_ONE
        count = known.count()
        known.issued += 0 if entry.op in TO_ONE else uncounted  # which `issued_by` takes off
        if count is not None and not known.to_one:
            entry.seq = count + uncounted
        self._log.add_event("collective", entry.launch, entry)
        self.seen += 1
        if self.seen > MOST_IN_STEP:
            self.on = self.complete = False
            self._pause(True)


def _entry(known: KnownGroup, op: CollectiveOp, place: int, nbytes: int, at: int) -> BucketRecord:
    entry = BucketRecord(OWN_COLLECTIVES, place, nbytes, at)
    entry.op, entry.group = op, known.id
    return entry


def _done(entry: BucketRecord) -> None:
    if entry.done is None:  # else the job has waited for it
        entry.done = time.monotonic_ns()


def _address(tensor: Any) -> int:
    """Returns where a tensor's values are; 0 of what has none."""
    with DisableTorchFunction():
        return int(tensor.data_ptr()) if type(tensor) is torch.Tensor else 0


def _tensors(given: Any) -> list[torch.Tensor]:
    """Returns a tensor, or those of a list; of what else is given, torch is about to complain."""
    tensors = given if isinstance(given, (list, tuple)) else (given,)
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _on_cpu(tensors: list[torch.Tensor]) -> bool:
    """Returns whether a CPU has them; also where there are none."""
    with DisableTorchFunction():
        return all(tensor.is_cpu for tensor in tensors)
