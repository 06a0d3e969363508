"""Attaches a StepRecorder to one DistributedDataParallel module, by hooks alone.

| what                        | found by                                                                       |
|-----------------------------|--------------------------------------------------------------------------------|
| forward begin, end          | forward (pre-)hook of the DDP module                                           |
| backward begin              | tensor hooks on the forward's outputs                                          |
| end of the backward compute | an engine callback queued at backward begin                                    |
| end of the backward         | a callback queued from that callback: it runs after DDP's own                  |
| bucket launch               | the comm hook, right before the collective is issued                           |
| bucket done                 | the future's done callback, which runs after those who wait were woken         |
| gradient ready              | DDP's own per-parameter statistics, or a hook per parameter where they miss    |
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddpwatch.errors import UsageError
from ddpwatch.messages import BucketLayout, Layout
from ddpwatch.probe.comm_hook import CommHook
from ddpwatch.probe.recorder import BucketRecord, StepRecord, StepRecorder

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class _ModuleHook:
    """A forward hook that copies and pickles as one that does nothing, so that the watched model stays portable."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # A bound method of the standard library that takes anything and returns None: a copy of the model
        # must load where ddpwatch is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


class DdpProbe:
    """The hooks on one DDP module.

    Args:
        ddp: The module. Not modified beyond its hooks.
        module: Its number in this process.
        param_base: Id of its first parameter in this process.
        recorder: Takes the stamps.
        publish_layout: Takes a Layout whenever the buckets change.
        on_error: Told about an error of our own; after the first, the probe stays silent.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        module: int,
        param_base: int,
        recorder: StepRecorder,
        publish_layout: Callable[[Layout], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.active = True
        self._module = module
        self._param_base = param_base
        self._recorder = recorder
        self._publish_layout = publish_layout
        self._on_error = on_error
        self._timed = ddp.device_type == "cpu" or recorder.gpu is not None
        self._host = ddp.device_type == "cpu"
        self._name = type(ddp.module).__name__
        named = [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad]
        self._param_names = [name for name, _ in named]
        self._param_ids = {id(p): position for position, (_, p) in enumerate(named)}
        # Only weak references to the module and what it owns: a watched model, its reducer and its process group die
        # exactly when an unwatched one's would.
        self._ddp = weakref.ref(ddp)
        self._has_stats = hasattr(ddp.reducer, "get_backward_stats")
        self._previous_stats: list[int] = []
        self._forward_end_ns = 0
        self._buckets: dict[int, BucketLayout] = {}
        self._layout_changed = False
        self._in_backward = False
        self._synced_backwards = 0
        self._launched: list[BucketRecord] = []
        self._begin_hook = self._guarded(self._backward_begin)
        self._compute_end_callback = self._guarded(self._compute_end)
        self._end_callback = self._guarded(self._backward_end)
        comm_hook = CommHook(ddp, self._on_launch, self._recorder.bucket_done, self._recorder.clock, self._timed)
        self._comm_hook = weakref.ref(comm_hook)  # the reducer owns it
        self._handles = list(self._attach(ddp, [p for _, p in named]))

    @property
    def parameters(self) -> int:
        """Number of parameter tensors with gradients."""
        return len(self._param_names)

    def close(self) -> None:
        """Takes the hooks off. DDP cannot unregister a comm hook, so that one stays and only passes through."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, ddp: DistributedDataParallel, params: list[torch.nn.Parameter]) -> Iterator[RemovableHandle]:
        yield ddp.register_forward_pre_hook(_ModuleHook(self._guarded(self._forward_begin)))
        yield ddp.register_forward_hook(_ModuleHook(self._guarded(self._forward_end)))
        if self._host and not self._has_stats:
            for position, param in enumerate(params):
                hook = _ModuleHook(self._param_hook(position))
                yield param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a hook: our errors never reach the job, and our time is added to the step's own cost."""
        clock = time.monotonic_ns  # of cost, whatever the stamps are

        def guarded(*arguments: Any) -> None:
            if not self.active:
                return
            entered = clock()
            try:
                call(*arguments)
            except Exception as error:
                self.active = False
                self._on_error(error)
            record = self._recorder.current
            if record is not None:
                record.own_ns += clock() - entered

        return guarded

    # -- forward ---------------------------------------------------------------------------------------------

    def _forward_begin(self, module: torch.nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._in_backward = False
            self._recorder.forward_begin()

    def _forward_end(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._recorder.forward_end()
        # DDP's reducer counts its ready times from prepare_for_backward, the last thing its forward does.
        self._forward_end_ns = self._recorder.since
        comm_hook = self._comm_hook()
        if comm_hook is not None:
            comm_hook.note_gradients()
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_hook)  # type: ignore[no-untyped-call]

    # -- backward --------------------------------------------------------------------------------------------

    def _backward_begin(self, gradient: torch.Tensor) -> None:
        self._recorder.backward_begin()
        if not self._in_backward:
            self._in_backward = True
            self._launched = []
            self._on_graph_end(self._compute_end_callback)

    def _compute_end(self) -> None:
        self._recorder.backward_compute_end()
        self._on_graph_end(self._end_callback)

    def _backward_end(self) -> None:
        self._in_backward = False
        self._recorder.backward_end()
        record = self._recorder.current
        launched, self._launched = self._launched, []
        if record is None or not launched:
            return
        if self._synced_backwards == 0:
            self._recorder.warm_up()
        self._synced_backwards += 1
        if self._layout_changed:
            self._settle_layout({bucket.index for bucket in launched})
        ddp = self._ddp()
        if self._has_stats and self._host and ddp is not None:
            stats = ddp.reducer.get_backward_stats()
            record.later.append(partial(self._read_stats, stats, self._forward_end_ns, launched, self._buckets))
        record.untimed = not self._timed

    @staticmethod
    def _on_graph_end(call: Callable[..., Any]) -> None:
        Variable._execution_engine.queue_callback(call)

    # -- gradients -------------------------------------------------------------------------------------------

    def _param_hook(self, position: int) -> Callable[..., Any]:
        return self._guarded(lambda param: self._recorder.hook_fired(self._param_base + position))

    def _read_stats(
        self,
        stats: list[int],
        forward_end_ns: int,
        launched: list[BucketRecord],
        buckets: dict[int, BucketLayout],
        record: StepRecord,
    ) -> None:
        """Turns the reducer's ready times into hook fires and the buckets' ready stamps. On the sender thread.

        They count from a moment shortly before our own stamp of the forward's end. A ready time can not lie
        after its bucket reached the comm hook: whatever seems to is that difference, and is taken off.
        """
        previous, self._previous_stats = self._previous_stats, stats
        if len(previous) != len(stats):
            previous = [0] * len(stats)
        # A parameter without a gradient this time keeps its old value, to the nanosecond.
        fired = {i: forward_end_ns + ns for i, ns in enumerate(stats) if ns > 0 and ns != previous[i]}
        ready = [max((fired.get(p, 0) for p in buckets[bucket.index].params), default=0) for bucket in launched]
        shift = max(0, *(at - bucket.called for at, bucket in zip(ready, launched, strict=True)))
        for at, bucket in zip(ready, launched, strict=True):
            bucket.ready = at - shift if at else None
        record.hooks.extend((self._param_base + i, at - shift) for i, at in fired.items())
        if fired:
            self._recorder.last_hook = self._param_base + max(fired, key=fired.__getitem__)

    # -- buckets ---------------------------------------------------------------------------------------------

    def _on_launch(self, bucket: GradBucket, nbytes: int, called: int, launch: int) -> BucketRecord | None:
        """Called by the comm hook once it has issued the collective. Never raises."""
        if not self.active:
            return None
        entered = time.monotonic_ns()
        try:
            index = bucket.index()
            known = self._buckets.get(index)
            if known is None or known.nbytes != nbytes:
                self._learn(bucket, index, nbytes)
            entry = self._recorder.bucket_launch(self._module, index, nbytes, launch=launch, called=called)
            if entry is not None:
                self._launched.append(entry)
                self._recorder.charge(time.monotonic_ns() - entered)
            return entry
        except Exception as error:
            self.active = False
            self._on_error(error)
            return None

    def _learn(self, bucket: GradBucket, index: int, nbytes: int) -> None:
        """Notes what is in a bucket that is new, or another one than before: DDP has rebuilt its buckets."""
        params = [self._param_ids[id(p)] for p in bucket.parameters() if id(p) in self._param_ids]
        self._buckets = {**self._buckets, index: BucketLayout(index, nbytes, params)}  # the sender may hold the old one
        self._layout_changed = True

    def _settle_layout(self, seen: set[int]) -> None:
        self._layout_changed = False
        self._buckets = {index: self._buckets[index] for index in sorted(seen)}
        self._recorder.epoch += 1
        self._publish_layout(
            Layout(
                rank=0,  # the sender knows it
                module=self._module,
                module_name=self._name,
                epoch=self._recorder.epoch,
                param_base=self._param_base,
                params=self._param_names,
                buckets=list(self._buckets.values()),
            )
        )


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in a forward's output, however it is nested."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from _tensors(getattr(output, name))


def check_watchable(model: object) -> DistributedDataParallel:
    """The model, if it is something we can attach to.

    Raises:
        UsageError: It is not a DDP module, or has a comm hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"watch() got a {type(model).__name__}",
            "wrap the model first: watch(DistributedDataParallel(model))",
        )
    if getattr(model, "_use_python_reducer", False):
        raise UsageError("DDP runs with the Python reducer", "unset torch._dynamo.config.optimize_ddp='python_reducer'")
    return model
