"""Attaches a StepRecorder to one DistributedDataParallel module, by hooks alone. All of it runs on the training thread.

| what                        | found by                                                                       |
|-----------------------------|--------------------------------------------------------------------------------|
| start, end of the forward   | `ddpwatch.probe.forwards`                                                      |
| end of buffers' broadcast   | the same, on a host clock                                                      |
| start of the backward       | tensor hooks on the forward's outputs                                          |
| end of the backward compute | an engine callback queued when the backward starts                             |
| end of the backward         | a callback queued from that callback: it runs after DDP's own                  |
| bucket launch               | a stamp right before the reducer's all-reduce, or the user's comm hook         |
| bucket done                 | `ddpwatch.probe.completion`; NCCL's by a stamp on a stream that waits for it   |
| gradient ready              | DDP's own per-parameter statistics, or a hook per parameter where they miss    |

What follows from these stamps is left to the sender thread: `ddpwatch.probe.derive`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddpwatch.probe.autograd import on_graph_end
from ddpwatch.probe.bucket_layout import LayoutTracker, parameter_columns, reduced_parameters
from ddpwatch.probe.comm_hooks import comm_hook_of, no_later_hook, pause_hook, time_later_hook
from ddpwatch.probe.completion import waiting_stream
from ddpwatch.probe.cuda import GpuStamp
from ddpwatch.probe.ddp_collectives import GroupHooks
from ddpwatch.probe.ddp_timed_group import ReducerGroup
from ddpwatch.probe.derive import ModuleLayout, derive_launches, derive_ready
from ddpwatch.probe.forwards import SeenForwards
from ddpwatch.probe.group_ids import backend_name, describe
from ddpwatch.probe.guarded import GuardedProbe, PortableHook, ProbeContext
from ddpwatch.probe.issue_counts import issued_by
from ddpwatch.probe.record import BucketRecord
from ddpwatch.wire.messages import Layout

# Comm hooks that let the reducer all-reduce, so they are seen like none: that of DDP's own mixed precision.
THROUGH_REDUCER = frozenset({"_reducer_allreduce_and_upcast_hook"})


class DdpProbe(GuardedProbe):
    """The hooks on one DDP module.

    Args:
        ddp: The module. Not modified beyond its hooks.
        context: Gets a Group whenever the process group changes, and a Layout whenever the buckets do.

    Attributes:
        foreign_hook: Name of a comm hook whose collectives are not seen; empty if none.
        timed: Whether completions can be stamped.
        reducer_group: The switch of the reducer's process group; None beside a comm hook that was there before.
    """

    _newest: Callable[[], DdpProbe | None] = staticmethod(lambda: None)  # whose backward has begun last

    def __init__(self, ddp: DistributedDataParallel, context: ProbeContext) -> None:
        super().__init__(context)
        guard = context.guard
        self._host, self._device = ddp.device_type == "cpu", ddp.device
        self._name = type(ddp.module).__name__
        named = reduced_parameters(ddp)
        columns = guard.run("bucket layouts", parameter_columns, ddp) or {}
        self._param_columns: dict[str, Any] = {"params": [name for name, _ in named], **columns}
        # Only weak references to the module and what it owns: a watched model, its reducer and its process group die
        # exactly when a bare one's would.
        self._ddp = weakref.ref(ddp)
        self._has_stats = hasattr(ddp.reducer, "get_backward_stats")
        self._stats: list[int] | None = None  # DDP's ready times in this backward
        self._forward_end_ns = 0
        self._tracker = guard.run("bucket layouts", LayoutTracker, ddp)
        self._layout = ModuleLayout(context.module, context.param_base, len(named))
        self._group: Callable[[], object | None] = lambda: None
        self._enter_group(ddp.process_group)
        self._issued: int | None = None  # collectives of the group before this backward
        self._before: int | None = None  # the same, also of a group that does not count
        self._reduced_at: int | None = None  # what that was before the newest backward that reduced gradients
        self._will_sync = True
        self._synced_backwards = 0
        self._forwards: SeenForwards | None = None
        self._launched: list[BucketRecord] = []
        self._done_callback = partial(guard.run, "collectives", self._done)
        self._observed = True  # whether this backward's collectives are seen
        self._asked = False  # whether this backward has launched one that is left alone
        self.foreign_hook = _foreign_hook_of(ddp)
        self.reducer_group: ReducerGroup | None = None
        self._group_hooks: GroupHooks | None = None
        self._handles: list[RemovableHandle] = []
        try:
            self._hook(ddp, [p for _, p in named])
        except BaseException:
            self.close()
            raise

    def _hook(self, ddp: DistributedDataParallel, params: list[torch.nn.Parameter]) -> None:
        self.guard.run("collectives", self._observe, ddp)
        # Gloo reduces on the host also what lies on a GPU, and its threads have no stream that waits for the result.
        backend = self.guard.run("process groups", backend_name, ddp.process_group, ddp.device)
        self._by_gloo = backend == "gloo"
        self._waiting_stream = None if self._host or backend != "nccl" else waiting_stream(ddp.device)
        has_clock = self._recorder.gpu is not None and (self._by_gloo or self._waiting_stream is not None)
        self.timed = (self._host or has_clock) and not self.foreign_hook
        self._handles += self._attach(ddp, params)

    @property
    def _blind(self) -> bool:
        """Whether collectives are never seen."""
        return bool(self.foreign_hook) or "collectives" in self.guard.off

    @property
    def parameters(self) -> int:
        """Number of parameter tensors with gradients."""
        return len(self._param_columns["params"])

    def issue_count(self) -> int | None:
        """Returns how many collectives the module's process group has issued, None where it does not count.

        For any thread.
        """
        ddp = self._ddp()
        return None if ddp is None else issued_by(ddp.process_group)

    def issued_in(self) -> list[tuple[int, int]]:
        """Returns the id of the module's process group, and its `issue_count`.

        Empty where it does not count. For any thread.
        """
        count = self.issue_count()
        return [] if count is None else [(self._layout.group, count)]

    @property
    def in_eval(self) -> bool:
        """Whether the model was last put into eval mode. For any thread."""
        ddp = self._ddp()
        return ddp is not None and not ddp.module.training

    def close(self) -> None:
        """Removes the hooks. A comm hook cannot be unregistered: where the user's is wrapped, it is only passed on."""
        self.active = False
        ddp = self._ddp()
        no_later_hook(ddp)
        if ddp is not None and self.reducer_group is not None:
            self.reducer_group.release(ddp, self._in_backward)
        if self._group_hooks is not None:
            self._group_hooks.close(self._in_backward)
        if self._forwards is not None:
            self._forwards.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _observe(self, ddp: DistributedDataParallel) -> None:
        if not self.foreign_hook:
            time_later_hook(ddp, self)
            self.reducer_group = ReducerGroup(self)
            self.reducer_group.switch(ddp, True)  # now: a built-in comm hook keeps the group that it finds
        elif GroupHooks.supported(ddp.process_group):
            self._watch_group(ddp)

    def _attach(self, ddp: DistributedDataParallel, params: list[torch.nn.Parameter]) -> Iterator[RemovableHandle]:
        begin, end = self._guarded(self._forward_begin, starts_step=True), self._guarded(self._forward_end)
        synced = self._guarded(self._recorder.buffers_synced, feature="buffer waits")
        self._forwards = SeenForwards(ddp, begin, synced, end, self.guard)
        if self._host and not self._has_stats:
            for number, param in enumerate(params, self._layout.param_base):
                hook = PortableHook(self._param_hook(number))
                yield param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    # -- the process group -----------------------------------------------------------------------------------

    def _enter_group(self, group: dist.ProcessGroup) -> None:
        """Notes which group the module reduces in."""
        self._group = weakref.ref(group)
        if (found := self.guard.run("process groups", describe, group, self._device)) is not None:
            self._layout = replace(self._layout, group=found.id)
            self._publish(found)

    def _count_issued(self) -> None:
        """Notes before a backward's first launch what the group has issued, and whether it is still the same one."""
        ddp = self._ddp()
        if ddp is not None and ddp.process_group is not self._group():
            self._enter_group(ddp.process_group)
        issued, record = self.issue_count(), self._recorder.current
        self._before = issued
        self._issued = None if issued == self._reduced_at else issued  # a comm hook may issue them in another group
        if record is not None and record.first_seq is None and self._issued is not None:
            record.first_seq = self._issued + 1

    # -- forward ---------------------------------------------------------------------------------------------

    def _forward_begin(self, module: Any, *_: Any) -> None:
        if self._forwards is not None and self._forwards.awaits_buffers:
            self._forwards.forget_buffers()
        if not torch.is_grad_enabled():
            self.guard.run("validations", self._recorder.validation_begin, self.in_eval)
            return
        timed = self.reducer_group is not None and self.reducer_group.timed
        if not timed and self._recorder.forward_goes_by(module.require_backward_grad_sync):
            return
        self._in_backward = False
        if not in_forward():
            self._begin_forward(module.require_backward_grad_sync)
            if self._recorder.phase and self._host and self._forwards is not None:
                self.guard.run("buffer waits", self._forwards.expect_buffers, module)
        if not self._recorder.phase and self.reducer_group is not None:
            self.reducer_group.switch(module, False)
            pause_hook(module, True)

    def _forward_end(self, module: Any, *of_call: Any) -> None:
        if not torch.is_grad_enabled():
            self.guard.run("validations", self._recorder.validation_end)
            return
        # DDP's reducer counts its ready times from prepare_for_backward, the last thing its forward does.
        if in_forward():
            self._forward_end_ns = time.monotonic_ns()
        else:
            self._recorder.forward_end()
            self._forward_end_ns = self._recorder.since
        self._will_sync = module.require_backward_grad_sync
        self._expect_backward(of_call[-1])

    # -- backward --------------------------------------------------------------------------------------------

    def _backward_begin(self, gradient: torch.Tensor) -> None:
        self._recorder.backward_begin()
        if not self._in_backward:
            self._in_backward = True
            DdpProbe._newest = weakref.ref(self)
            self._launched, self._stats, self._asked = [], None, False
            self._count_issued()
            self._observed = not (self._blind or (self._host and not self._recorder.full))
            if self.reducer_group is not None and (ddp := self._ddp()) is not None:
                self.reducer_group.switch(ddp, self._observed)  # nothing of this backward has been launched yet
                pause_hook(ddp, False)
            on_graph_end(self._compute_end_callback)

    def _compute_end(self) -> None:
        """Does all work that was put off: on the host, what comes next is waiting."""
        self._recorder.backward_compute_end()
        self._recorder.issuing = False  # which parameters were used is reduced, too, and is no bucket
        on_graph_end(self._end_callback)
        if self._host and (self._will_sync or self._launched):
            if self._has_stats and (ddp := self._ddp()) is not None:
                self._stats = self.guard.run("ready times", ddp.reducer.get_backward_stats)
            self._on_wait()

    def _backward_end(self) -> None:
        self._in_backward = False
        launched, self._launched = self._launched, []
        record, ddp = self._recorder.current, self._ddp()
        if self._blind and launched and record is not None:  # since this backward
            record.buckets = [bucket for bucket in record.buckets if bucket not in launched]
            launched = []
        derived = self._blind or not self._observed
        issued = self._issued, self.issue_count() if derived else None
        reduced = bool(launched) or (derived and self._will_sync and self._may_have_reduced(*issued))
        self._recorder.backward_end(reduced)
        if reduced:
            self._reduced_at = self._before
        if record is None or ddp is None or not reduced:
            return
        if self._synced_backwards == 0:
            self._recorder.warm_up()
        self._synced_backwards += 1
        if launched or self._blind:
            sizes = [bucket.nbytes for bucket in sorted(launched, key=lambda bucket: bucket.index)]
            self.guard.run("bucket layouts", self._update_layout, ddp, sizes)
            if self._group_hooks is not None and self._tracker is not None:
                for bucket, nbytes in zip(launched, self._tracker.sizes(sizes), strict=True):
                    bucket.nbytes = nbytes
        if self._host:
            derive, known = (derive_launches, issued) if derived else (derive_ready, launched)
            work = derive, self._layout, self._stats, self._forward_end_ns, known
            record.later.append(partial(self.guard.run, "ready times", *work))
        record.untimed = record.untimed or derived or not self.timed or not self._recorder.full

    def _may_have_reduced(self, before: int | None, after: int | None) -> bool:
        """Returns whether a backward whose launches nobody saw has reduced, unlike `torch.autograd.grad`.

        Args:
            before: How many collectives the group had issued before it, None if not known.
            after: How many it has issued now.
        """
        return self._blind or self._asked or before is None or before != after

    def _update_layout(self, ddp: DistributedDataParallel, sizes: list[int]) -> None:
        """Publishes new buckets. What the sender thread learns about them goes into an object of their own."""
        if self._tracker is None or not self._tracker.update(ddp, sizes if self._group_hooks is None else []):
            return
        old, comm_hook = self._layout, _foreign_hook_of(ddp)
        self._layout = ModuleLayout(old.module, old.param_base, old.param_count, self._tracker.buckets, old.group)
        self._recorder.epoch += 1
        self._publish(
            Layout(
                rank=0,  # the sender fills it in
                module=old.module,
                module_name=self._name,
                group=old.group,
                epoch=self._recorder.epoch,
                comm_hook=comm_hook[:1024],
                param_base=old.param_base,
                buckets=self._tracker.buckets,
                **self._param_columns,
            )
        )

    def _param_hook(self, number: int) -> Callable[..., Any]:
        return self._guarded(lambda param: self._recorder.hook_fired(number), feature="ready times")

    # -- buckets: the observer of `ddpwatch.probe.ddp_collectives` -------------------------------------------------

    def before_launch(self) -> int:
        """Returns the stamp of a bucket's launch, 0 where the collective is left alone.

        On a GPU, light steps have it as well: DDP's own ready times are the host's, which say nothing there.
        """
        if not self.active or (not self._recorder.full and (self._host or not self._recorder.phase)):
            self._asked = True
            return 0
        self._recorder.issuing = True
        entered = 0 if self._host else time.monotonic_ns()
        at = self._recorder.clock()
        if entered:  # a GPU's stamp is most of what a bucket costs
            self._recorder.charge(time.monotonic_ns() - entered)
        # While a CUDA graph is captured, stamps are the host's, and a callback would become part of the graph.
        return at if self._host or isinstance(at, GpuStamp) else 0

    def after_launch(self, index: int | None, nbytes: int, at: int, pending: Any) -> BucketRecord | None:
        """Records the bucket, and in a full step stamps it when it is done."""
        self._recorder.issuing = False
        entered = time.monotonic_ns()
        number = len(self._launched) if index is None else index
        entry = self._recorder.bucket_launch(self._module, number, nbytes, launch=at)
        if entry is not None:
            self._launched.append(entry)
            entry.group, entry.seq = self._layout.group, self.issue_count()
            if self.timed and self._recorder.full:
                self._stamp_completion(entry, pending)
            self._recorder.charge(time.monotonic_ns() - entered)
        return entry

    def hook_has_waited(self, at: int) -> None:
        """Takes the call for a wait, on a host: NCCL's futures are finished as soon as it has issued."""
        if self._host:
            self._recorder.has_waited(at)

    def _stamp_completion(self, entry: BucketRecord, pending: Any) -> None:
        """Stamps when the result is there.

        NCCL's future is done when the collective is enqueued, and the stamp goes behind it, on a stream. Of a future
        that some thread completes later, as a comm hook's may be, and of other backends on a GPU, nothing is known.
        """
        if self._host and self._by_gloo and isinstance(pending, dist.Work):
            self._completions.follow(pending, partial(self._done_callback, entry))
            return
        future = pending.get_future() if isinstance(pending, dist.Work) else pending
        if self._host or self._by_gloo:
            self._completions.follow(future, partial(self._done_callback, entry))
        elif self._waiting_stream is not None and future.done():
            with torch.cuda.stream(self._waiting_stream):
                future.wait()  # the stream waits, the host does not
                self._recorder.bucket_done(entry)

    def _done(self, entry: BucketRecord) -> None:
        self._recorder.bucket_done(entry, time.monotonic_ns())

    @property
    def is_reducing(self) -> bool:
        """Whether this module's backward has begun last: what its group all-reduces now is taken to be its own."""
        return self._in_backward and DdpProbe._newest() is self

    def on_comm_hook(self) -> None:
        """Observes the process group of a comm hook that runs unwrapped."""
        ddp = self._ddp()
        if self.active and ddp is not None and self._group_hooks is None:
            self._watch_group(ddp)

    def _watch_group(self, ddp: DistributedDataParallel) -> None:
        """Sees the module's comm hook by its group's hooks. Where that fails, its collectives are not seen."""
        hook = _foreign_hook_of(ddp)
        if not hook:
            return  # it goes through the reducer
        try:
            seen = GroupHooks(ddp.process_group, self) if GroupHooks.supported(ddp.process_group) else None
        except Exception as error:
            seen = None
            self.guard.failed(error, "collectives")
        self._group_hooks, self.foreign_hook = seen, "" if seen is not None else hook
        if seen is None:
            self.timed = False


def in_forward() -> bool:
    """Returns whether a forward of a DDP module is under way: one that starts, or has just ended, is a part of it."""
    return DistributedDataParallel._active_ddp_module is not None


def _foreign_hook_of(ddp: DistributedDataParallel) -> str:
    """Returns DDP's name of the module's comm hook; empty without one, or if that lets the reducer all-reduce."""
    hook = comm_hook_of(ddp)
    return "" if hook in THROUGH_REDUCER else hook
