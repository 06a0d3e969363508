"""Attaches a StepRecorder to one module of FSDP2: what ``fully_shard`` or the new ``replicate`` returned.

| what                        | found by                                                                             |
|-----------------------------|--------------------------------------------------------------------------------------|
| start, end of the forward   | forward (pre-)hook of the module, outside FSDP2's own                                |
| the same of other methods   | the calls of FSDP2's own hooks that `register_fsdp_forward_method` makes             |
| start of the backward       | tensor hooks on the forward's outputs, ahead of FSDP2's own                          |
| end of the backward         | a callback that runs after FSDP2's own last one                                      |
| launch, end of a collective | a stamp right before it, and one after it (`ddpwatch.probe.sharded_comm`)            |
| waits for it, on the host   | the call itself, or `wait` of an asynchronous one                                    |
| waits for it, on a GPU      | stamps on the compute stream before FSDP2 lets it wait; it waits until the end       |

A collective that is synchronous is one that the training thread waits for: on the host, all are but the all-gathers of
``unshard(async_op=True)``. The waits are cut out of the forward and the backward (`ddpwatch.probe.record`).
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.utils.hooks import RemovableHandle

from ddpwatch.probe.autograd import on_graph_end
from ddpwatch.probe.group_ids import backend_name, describe
from ddpwatch.probe.guarded import GuardedProbe, PortableHook, ProbeContext
from ddpwatch.probe.identity import Flags, module_name
from ddpwatch.probe.issue_counts import issued_by
from ddpwatch.probe.record import BucketRecord
from ddpwatch.probe.sharded_comm import (
    TimedAllGather,
    TimedComm,
    TimedReduceScatter,
    forget_reduction,
    see_all_reduces,
)
from ddpwatch.wire.messages import DEFAULT_GROUP, BucketLayout, CollectiveOp, Layout

MAX_EARLY = 1024  # collectives between two forwards; of more, only the newest count
_log = logging.getLogger("ddpwatch")
_COMMS = {"_all_gather_comm": TimedAllGather, "_reduce_scatter_comm": TimedReduceScatter}
_GROUPS = {"shard_process_group": "sharding", "replicate_process_group": "replication"}
# What runs in place of a method that the job has registered as a forward
_METHOD = next((code for code in register_fsdp_forward_method.__code__.co_consts if isinstance(code, CodeType)), None)


class FsdpProbe(GuardedProbe):
    """The hooks on one module of FSDP2.

    Args:
        model: The module. Not modified beyond its hooks.
        context: Gets each process group, and the layout of the parameter groups.

    Attributes:
        timed: Whether completions can be stamped.
        parameters: Number of parameter tensors.
    """

    def __init__(self, model: FSDPModule, context: ProbeContext) -> None:
        super().__init__(context)
        self._model = weakref.ref(model)
        self._groups: list[weakref.ref[FSDPParamGroup]] = []
        self._ids: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
        self._early: list[BucketRecord] = []  # issued for the next forward: by `unshard`, outside forward and backward
        self._gathering: dict[int, BucketRecord] = {}  # on a GPU, what nothing has waited for yet
        self._reducing: list[BucketRecord] = []
        self._validating = self._awaits_backward = self._reduced_before = self._stepped_aside = False
        self._methods = methods_under_way() > 0  # whether forwards have been methods other than ``forward``
        self._handles: list[RemovableHandle] = []
        self._see_no_more: Callable[[], object] = lambda: None
        self._done_callback = partial(self.guard.run, "collectives", self._done)
        self.parameters = 0
        try:
            self._set_up(model, context.param_base)
        except BaseException:  # this torch's FSDP2 is another: leave nothing on the model
            self.close()
            raise

    def _set_up(self, model: FSDPModule, param_base: int) -> None:
        named = parameter_groups(model)
        self._groups = [weakref.ref(group) for group in named]
        self._device = device = device_of(model)
        self._host = device.type == "cpu"
        self.timed = self._host or self._recorder.gpu is not None
        self._enter_groups(named)
        # Gloo works on the host even with tensors on a GPU: the call returns with the result.
        self._by_gloo = self._backend(device) == "gloo"
        self._blocking = self._host or self._by_gloo
        self.guard.run("collectives", self._see_collectives)
        if not self._blocking:
            for label, group in enumerate(named):
                self._stamp_waits(label, group)
        self.guard.run("bucket layouts", self._announce, model, named, param_base)
        self._handles.extend(self._attach(model))
        self._stamp_methods(model._get_fsdp_state())
        if model._get_fsdp_state()._training_state == TrainingState.FORWARD:  # found in its first forward
            self._guarded(self._forward_begin, starts_step=True)(model, ())

    def issued_in(self) -> list[tuple[int, int]]:
        """Returns the ids of the module's process groups, each with how many collectives it has issued.

        For any thread.
        """
        counts = [(number, issued_by(group)) for group, number in list(self._ids.items())]
        return [(number, count) for number, count in counts if count is not None]

    @property
    def in_eval(self) -> bool:
        """Whether the model was last put into eval mode. For any thread."""
        model = self._model()
        return model is not None and not model.training  # type: ignore[attr-defined]

    def close(self) -> None:
        """Removes the hooks, and gives FSDP2 its own objects back."""
        self.active = False
        for group in self._live():
            for name in _COMMS:
                comm = getattr(group, name, None)
                if isinstance(comm, TimedComm) and comm._self_observer is self:
                    setattr(group, name, comm.__wrapped__)
            for name in ("wait_for_unshard", "post_backward", "finalize_backward"):
                group.__dict__.pop(name, None)
        if (model := self._model()) is not None:
            for name in ("_pre_forward", "_post_forward"):
                model._get_fsdp_state().__dict__.pop(name, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._see_no_more()

    # -- what is watched ---------------------------------------------------------------------------------------

    def _live(self) -> Iterator[FSDPParamGroup]:
        return (group for ref in self._groups if (group := ref()) is not None)

    def _enter_groups(self, groups: dict[FSDPParamGroup, str]) -> None:
        for group in groups:
            for attribute, kind in _GROUPS.items():
                if (found := getattr(group.mesh_info, attribute, None)) is not None:
                    self._id_of(found, kind)

    def _id_of(self, group: dist.ProcessGroup, kind: str = "sharding") -> int:
        known = self._ids.get(group)
        if known is None:
            found = describe(group, self._device)
            found.kind = kind
            known = self._ids[group] = found.id
            self._publish(found)
        return known

    def _backend(self, device: torch.device) -> str:
        group = next(iter(self._ids), None)
        return "" if group is None else backend_name(group, device)

    def _announce(self, model: FSDPModule, groups: dict[FSDPParamGroup, str], param_base: int) -> None:
        """Publishes the parameter groups, in the order of the model."""
        names = {id(param): name for name, param in model.named_parameters()}  # type: ignore[attr-defined]
        params = [[p.sharded_param for p in group.fsdp_params] for group in groups]
        flat = [param for group in params for param in group]
        self.parameters = len(flat)
        sizes = [[param.numel() * param.element_size() for param in group] for group in params]
        buckets, base = [], 0
        for index, (name, size) in enumerate(zip(groups.values(), sizes, strict=True)):
            buckets.append(BucketLayout(index, sum(size), list(range(base, base + len(size))), name))
            base += len(size)
        self._recorder.epoch += 1
        self._publish(
            Layout(
                rank=0,  # the sender fills it in
                module=self._module,
                module_name=module_name(model),
                kind="group",
                group=next(iter(self._ids.values()), DEFAULT_GROUP),
                epoch=self._recorder.epoch,
                param_base=param_base,
                params=[names.get(id(param), "") for param in flat],
                param_bytes=[size for group in sizes for size in group],
                param_rows=[param.shape[0] if param.dim() > 1 else 0 for param in flat],
                param_kind=[f"{str(param.dtype).removeprefix('torch.')} {param.device}" for param in flat],
                buckets=buckets,
            )
        )

    def _see_collectives(self) -> None:
        self._see_no_more = see_all_reduces(self)
        self._take_comms()

    def _take_comms(self) -> None:
        """Stands in front of FSDP2's own communication objects, also those that it was given since. Not of others."""
        for label, ref in enumerate(self._groups):
            group = ref()
            for name, timed in _COMMS.items() if group is not None else ():
                comm = getattr(group, name)
                if type(comm) is timed:
                    continue
                if type(comm).__module__.startswith("torch.distributed.fsdp."):
                    setattr(group, name, timed(comm, self, label))
                elif not self._stepped_aside:
                    self._stepped_aside = True
                    _log.warning(
                        "ddpwatch does not see collectives of FSDP2 that go through the job's own %s",
                        type(comm).__name__,
                    )

    def _attach(self, model: Any) -> Iterator[RemovableHandle]:
        begin = self._guarded(self._unless_within(self._forward_begin), starts_step=True)
        yield model.register_forward_pre_hook(PortableHook(begin), prepend=True)
        end = self._guarded(self._unless_within(self._forward_end))
        yield model.register_forward_hook(PortableHook(end), prepend=True)

    def _stamp_methods(self, state: Any) -> None:
        """Calls back before FSDP2's own hooks where a registered method calls them: for ``forward``, torch does."""

        def begin(module: Any, arguments: Any, options: Any) -> None:
            self._methods = True
            self._unless_within(self._forward_begin, methods=1)(module, arguments)

        end = self._unless_within(self._forward_end, methods=1)
        state._pre_forward = _preceded(state._pre_forward, self._guarded(begin, starts_step=True))
        state._post_forward = _preceded(state._post_forward, self._guarded(end))

    def _unless_within(self, call: Callable[..., None], methods: int = 0) -> Callable[..., None]:
        """Leaves out a forward that is a part of another: a registered method may call the module, or another method.

        Args:
            call: Takes the forward's start, or its end.
            methods: How many registered methods are the forward itself.
        """

        def outermost(*arguments: Any) -> None:
            if not self._methods or methods_under_way() <= methods:
                call(*arguments)

        return outermost

    # -- forward and backward ----------------------------------------------------------------------------------

    def _syncs(self) -> bool:
        """Returns whether the next reduction is one over all ranks."""
        group = next(self._live(), None)
        if group is None or not group.reduce_grads:
            return False
        return group.all_reduce_grads or not hasattr(group.mesh_info, "replicate_process_group")

    def _forward_begin(self, module: Any, arguments: Any) -> None:
        self.guard.run("collectives", self._take_comms)
        forget_reduction()
        early, self._early = self._early, []
        self._validating = not torch.is_grad_enabled()
        if self._validating:  # what was issued early was issued for this
            self.guard.run("validations", self._recorder.validation_begin, self.in_eval)
            return
        self._in_backward = False
        self._gathering = {entry.index: entry for entry in early}
        self._reducing.clear()
        self._begin_forward(self._syncs())
        record = self._recorder.current
        for entry in early:
            if record is not None and entry.launch >= record.start:
                self._recorder.collective_launch(entry)

    def _forward_end(self, module: Any, arguments: Any, output: Any) -> None:
        if self._validating:
            self._validating = False
            self.guard.run("validations", self._recorder.validation_end)
            return
        self._recorder.forward_end()
        self._awaits_backward = True
        self._expect_backward(output)

    def _backward_begin(self, gradient: torch.Tensor) -> None:
        self._awaits_backward = False
        self._recorder.backward_begin()
        if not self._in_backward:
            self._in_backward = True
            on_graph_end(self._compute_end_callback)

    def _compute_end(self) -> None:
        """Ends the compute. FSDP2's last callback comes next: it reduces what is left, and waits."""
        on_graph_end(self._end_callback)
        self._on_wait()

    def _backward_end(self) -> None:
        self._in_backward = False
        reduced = self._syncs()
        self._recorder.backward_compute_end()
        self._recorder.backward_end(reduced)
        if "collectives" in self.guard.off and self._recorder.current is not None:
            self._recorder.current.buckets.clear()  # which are not all
        if reduced and not self._reduced_before:
            self._reduced_before = True
            self._recorder.warm_up()

    # -- collectives: the observer of `ddpwatch.probe.sharded_comm` ---------------------------------------------

    def stamp(self) -> int | None:
        if not self.active or self._validating or not self._recorder.phase:
            return None
        return self._recorder.clock()

    def launch(
        self, op: CollectiveOp, label: int, tensor: torch.Tensor, group: dist.ProcessGroup, ready: int | None = None
    ) -> BucketRecord | None:
        if not self.active or self._validating or not self._recorder.phase:
            return None
        entered = time.monotonic_ns()
        if op == "all_reduce" and not self._all_reduces_in(group, label):
            return None  # of another model, which is not watched
        entry = BucketRecord(self._module, label, tensor.nbytes, entered)
        entry.op, entry.group, entry.ready = op, self._id_of(group), ready
        issued = issued_by(group)
        entry.seq = None if issued is None else issued + 1
        # The phase is "between" also after a backward, until an optimizer ends the step, if there is one. What is
        # gathered there is for the next forward; what is reduced, as by a pipeline's schedule, is of that backward.
        is_early = op == "all_gather" and self._recorder.phase == "between" and not self._awaits_backward
        if is_early or not self._recorder.collective_launch(entry):
            self._early.append(entry)
            del self._early[:-MAX_EARLY]
        self._recorder.charge(time.monotonic_ns() - entered)
        entry.launch = self._recorder.clock()
        return entry

    def _all_reduces_in(self, group: dist.ProcessGroup, label: int) -> bool:
        found = self._groups[label]()
        return found is not None and getattr(found.mesh_info, "replicate_process_group", None) is group

    def finished(self, entry: BucketRecord) -> None:
        if self._blocking:
            at = time.monotonic_ns()
            entry.wait_begin, entry.wait_end = entry.launch, at
            self._recorder.bucket_done(entry, at)
            self._recorder.charge(time.monotonic_ns() - at)
        else:
            self._recorder.bucket_done(entry)
            self._awaited(entry)

    def failed(self, entry: BucketRecord) -> None:
        record = self._recorder.current
        if record is not None and entry in record.buckets:
            record.buckets.remove(entry)
            self._recorder.box.done(entry.index)

    def follow(self, entry: BucketRecord, work: Any) -> None:
        if self._blocking:
            pending = work if self._host and self._by_gloo else work.get_future()
            self._completions.follow(pending, partial(self._done_callback, entry))
            return
        self._awaited(entry)
        if (future := work.get_future()).done():  # enqueued: it calls back at once, on a stream that waits for it
            future.add_done_callback(partial(self._done_callback, entry))

    def waited(self, entry: BucketRecord, begin: int | None) -> None:
        if self._blocking and begin is not None:
            entry.wait_begin, entry.wait_end = begin, time.monotonic_ns()

    def _done(self, entry: BucketRecord, *_: Any) -> None:
        self._recorder.bucket_done(entry, time.monotonic_ns() if self._blocking else None)

    # -- waits on a GPU ------------------------------------------------------------------------------------------

    def _awaited(self, entry: BucketRecord) -> None:
        if entry.op == "all_gather":
            self._gathering[entry.index] = entry
        else:
            self._reducing.append(entry)

    def _stamp_waits(self, label: int, group: FSDPParamGroup) -> None:
        """Calls back before FSDP2 lets the compute stream of a parameter group wait."""
        before = {
            "wait_for_unshard": lambda *_: self._waits_for(self._gathering.pop(label, None)),
            "post_backward": lambda *_: self._waits_for(*self._reducing[: self._too_many()]),
            "finalize_backward": lambda *_: self._waits_for(*self._reducing),
        }
        for name, call in before.items():
            setattr(group, name, _preceded(getattr(group, name), self._guarded(call)))

    def _too_many(self) -> int:
        """Returns how many reduce-scatters FSDP2 waits for before the next: it keeps the memory of a few only."""
        context = next((group.comm_ctx for group in self._live()), None)
        kept: int = getattr(context, "reduce_scatter_max_input_buffers", 1)  # older torch keeps one
        return 0 if context is None else max(0, len(self._reducing) - kept + 1)

    def _waits_for(self, *entries: BucketRecord | None) -> None:
        """Notes that the compute stream is about to wait for these collectives."""
        if not any(entries):
            return
        at = self._recorder.clock()
        for entry in entries:
            if entry is not None:
                entry.wait_begin = at
        self._reducing = [entry for entry in self._reducing if entry not in entries]


def methods_under_way() -> int:
    """Returns how many methods that the job has registered as forwards have called what runs now."""
    frame, count = sys._getframe(), 0
    while (before := frame.f_back) is not None:
        frame = before
        count += frame.f_code is _METHOD
    return count


def _preceded(method: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
    @wraps(method)
    def preceded(*arguments: Any, **options: Any) -> Any:
        before(*arguments)
        return method(*arguments, **options)

    return preceded


def parameter_groups(model: Any) -> dict[FSDPParamGroup, str]:
    """Returns the parameter groups of a model, each with the name of its module, or of its modules."""
    found: dict[FSDPParamGroup, list[str]] = {}
    for name, module in model.named_modules():
        for group in _groups_of(_get_module_fsdp_state(module)):
            found.setdefault(group, []).append(name or module_name(model))
    return {group: ", ".join(names)[:1024] for group, names in found.items()}


def _groups_of(state: Any) -> list[FSDPParamGroup]:
    """Returns the parameter groups of one module, if it has a state; in older torch it has one group at most."""
    if state is None or hasattr(state, "_fsdp_param_groups"):
        return [] if state is None else list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def device_of(model: FSDPModule) -> torch.device:
    """Returns the device that a model computes on; with offloading, its parameters are elsewhere."""
    return model._get_fsdp_state()._device


def backend_of(model: FSDPModule) -> str:
    """Returns the backend of a model's collectives."""
    for group in parameter_groups(model):
        for attribute in _GROUPS:
            if (found := getattr(group.mesh_info, attribute, None)) is not None:
                return backend_name(found, device_of(model))
    return ""


def fsdp_flags(model: FSDPModule) -> Flags:
    """Returns what decides a model's timeline."""
    groups = list(parameter_groups(model))
    kinds = {kind for group in groups for name, kind in _GROUPS.items() if hasattr(group.mesh_info, name)}
    strategies = {("replication",): "replicate", ("replication", "sharding"): "hsdp"}
    return {
        "strategy": strategies.get(tuple(sorted(kinds)), "fsdp2"),
        "parameter_groups": len(groups),
        "reshard_after_forward": any(group.post_forward_mesh_info is not None for group in groups),
    }
