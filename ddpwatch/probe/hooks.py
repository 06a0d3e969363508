"""Attaches a StepRecorder to one DistributedDataParallel module, by hooks alone.

| what                        | found by                                                                       |
|-----------------------------|--------------------------------------------------------------------------------|
| forward begin, end          | forward (pre-)hook of the DDP module                                           |
| backward begin              | tensor hooks on the forward's outputs                                          |
| end of the backward compute | an engine callback queued at backward begin                                    |
| end of the backward         | a callback queued from that callback: it runs after DDP's own                  |
| bucket launch               | a stamp right before the reducer's all-reduce, or the user's comm hook          |
| bucket done                 | the future's done callback, which runs after those who wait were woken         |
| gradient ready              | DDP's own per-parameter statistics, or a hook per parameter where they miss    |
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import wrapt
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ddpwatch.errors import UsageError
from ddpwatch.messages import BucketLayout, Layout
from ddpwatch.probe.bucket_layout import bucket_layout, reduced_parameters
from ddpwatch.probe.collectives import Callback, GroupHooks, TimedGroup, comm_hook_of, counter, time_later_hook
from ddpwatch.probe.cuda import GpuStamp
from ddpwatch.probe.recorder import BucketRecord, StepRecord, StepRecorder
from ddpwatch.sampling.schedule import is_sampled

_on_graph_end = Variable._execution_engine.queue_callback  # only from within a backward
_OURS = -1  # among a tensor's hooks; handles count from 0
HOOKS_PERIOD = 8  # of the steps whose collectives are not seen, those that tell when every gradient came
LAYOUT_TRIES = 12  # steps; DDP notes its final buckets in its first ten iterations

# What the reducers all-reduce through. Must live as long as a reducer or a built-in comm hook may call it, and no
# longer than the module: it owns the process group.
_groups: weakref.WeakKeyDictionary[DistributedDataParallel, list[TimedGroup]] = weakref.WeakKeyDictionary()


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
        self._host = ddp.device_type == "cpu"
        self._name = type(ddp.module).__name__
        named = reduced_parameters(ddp)
        self._param_names = [name for name, _ in named]
        # Only weak references to the module and what it owns: a watched model, its reducer and its process group die
        # exactly when an unwatched one's would.
        self._ddp = weakref.ref(ddp)
        self._has_stats = hasattr(ddp.reducer, "get_backward_stats")
        self._stats: list[int] | None = None  # DDP's ready times in this backward
        self._forward_end_ns = 0
        self._buckets: list[BucketLayout] = []
        self._layout_tries = LAYOUT_TRIES
        self._lag_ns: dict[int, int] = {}  # by bucket index, from its last gradient to its launch
        self._in_backward = False
        self._will_sync = True
        self._synced_backwards = 0
        self._launched: list[BucketRecord] = []
        self._begin_hook = self._guarded(self._backward_begin)
        self._begin_hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saving an output warns of no hook
        self._compute_end_callback = self._guarded(self._compute_end)
        self._end_callback = self._guarded(self._backward_end)
        self.foreign_hook = comm_hook_of(ddp)
        self._observing = False  # whether the reducer has our group
        self._observed = True  # whether this backward's collectives are seen
        self._group_hooks: GroupHooks | None = None
        if not self.foreign_hook:
            time_later_hook(ddp, self)
            self._observe_group(ddp, True)  # now: a built-in comm hook keeps the group that it finds
        elif GroupHooks.supported(ddp.process_group):
            self._group_hooks = GroupHooks(ddp.process_group, self)
        self._blind = bool(self.foreign_hook) and self._group_hooks is None
        # Gloo reduces on the host also what lies on a GPU, and its threads have no stream that waits for the result.
        self._by_host = not self._host and ddp.process_group._get_backend(ddp.device).name() == "gloo"
        # Whether completions can be stamped: on a GPU the future completes when the collective is enqueued, and its
        # callback runs on a stream that waits for it, where only a GPU clock can stamp.
        self.timed = (self._host or recorder.gpu is not None) and not self._blind
        self._handles = list(self._attach(ddp, [p for _, p in named]))

    @property
    def parameters(self) -> int:
        """Number of parameter tensors with gradients."""
        return len(self._param_names)

    def issue_count(self) -> int | None:
        """How many collectives the module's process group has issued, None where it does not count. For any thread."""
        ddp = self._ddp()
        return None if ddp is None else counter(ddp.process_group)()

    def close(self) -> None:
        """Takes the hooks off. A comm hook cannot be unregistered: the user's stays wrapped, which only passes on."""
        self.active = False
        if (ddp := self._ddp()) is not None:
            self._leave_group(ddp)
        if self._group_hooks is not None:
            self._group_hooks.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, ddp: DistributedDataParallel, params: list[torch.nn.Parameter]) -> Iterator[RemovableHandle]:
        yield ddp.register_forward_pre_hook(_ModuleHook(self._guarded(self._forward_begin, begins=True)))
        yield ddp.register_forward_hook(_ModuleHook(self._guarded(self._forward_end)))
        if self._host and not self._has_stats:
            for position, param in enumerate(params):
                hook = _ModuleHook(self._param_hook(position))
                yield param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _guarded(self, call: Callable[..., Any], begins: bool = False) -> Callable[..., Any]:
        """Wraps a hook: our errors never reach the job, and our time is added to the step's own cost.

        Args:
            call: The hook. Not called in an unwatched step.
            begins: Whether the hook may begin a step; then it is always called.
        """
        clock = time.monotonic_ns  # of cost, whatever the stamps are

        def guarded(*arguments: Any) -> None:
            if not self.active or not (begins or self._recorder.phase):
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

    def _observe_group(self, ddp: DistributedDataParallel, observe: bool) -> None:
        """Has the reducer all-reduce through our view of its process group, or through the group itself."""
        if self.foreign_hook or not (observe or self._observing):
            return
        group, made = ddp.process_group, _groups.setdefault(ddp, [])
        ours = next((known for known in made if known.inner is group), None)
        if ours is None:  # the first, or the module was given another group
            ours = TimedGroup(group, self)
            made.append(ours)
            self._observing = False
        ours.observer = self
        if observe != self._observing:
            self._observing = observe
            ddp.reducer._update_process_group(ours if observe else group)

    def _leave_group(self, ddp: DistributedDataParallel) -> None:
        """Gives the reducer its group back, and lets go of ours where nothing can hold it."""
        for ours in _groups.get(ddp, ()):
            ours.observer = None
        if self._in_backward:  # in a signal handler: the reducer is at work, and locked; ours only passes on
            return
        if self._observing:
            self._observing = False
            ddp.reducer._update_process_group(ddp.process_group)
        if not comm_hook_of(ddp).startswith("Builtin"):  # that keeps the group that it was made with
            _groups.pop(ddp, None)

    # -- forward ---------------------------------------------------------------------------------------------

    def _forward_begin(self, module: Any, arguments: Any) -> None:
        if not torch.is_grad_enabled():
            self._recorder.validation_begin()
            return
        self._in_backward = False
        self._recorder.forward_begin()
        if not self._recorder.phase:
            self._observe_group(module, False)

    def _forward_end(self, module: Any, arguments: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._recorder.validation_end()
            return
        self._recorder.forward_end()
        # DDP's reducer counts its ready times from prepare_for_backward, the last thing its forward does.
        self._forward_end_ns = self._recorder.since
        self._will_sync = module.require_backward_grad_sync
        for tensor in _tensors(output):
            # A leaf among the outputs is a parameter, which would gather a hook with every forward.
            if tensor.grad_fn is not None:
                _register_hook(tensor, self._begin_hook)

    # -- backward --------------------------------------------------------------------------------------------

    def _backward_begin(self, gradient: torch.Tensor) -> None:
        self._recorder.backward_begin()
        if not self._in_backward:
            self._in_backward = True
            self._launched, self._stats = [], None
            self._observed = not self._recorder.shadow
            if (ddp := self._ddp()) is not None:  # nothing of this backward has been launched yet
                self._observe_group(ddp, self._observed)
            _on_graph_end(self._compute_end_callback)

    def _compute_end(self) -> None:
        """On the host, what comes next is waiting: the moment for whatever need not be done at another."""
        self._recorder.backward_compute_end()
        _on_graph_end(self._end_callback)
        if self._host and (self._will_sync or self._launched):
            if self._has_stats and (ddp := self._ddp()) is not None:
                self._stats = ddp.reducer.get_backward_stats()
            self._recorder.lull()

    def _backward_end(self) -> None:
        self._in_backward = False
        launched, self._launched = self._launched, []
        derived = self._blind or not self._observed
        reduced = bool(launched) or (derived and self._will_sync)
        self._recorder.backward_end(reduced)
        record, ddp = self._recorder.current, self._ddp()
        if record is None or ddp is None or not reduced:
            return
        if self._synced_backwards == 0:
            self._recorder.warm_up()
        self._synced_backwards += 1
        if launched or self._blind:
            self._update_layout(ddp, [bucket.nbytes for bucket in sorted(launched, key=lambda bucket: bucket.index)])
        if self._host:
            read = self._derive_launches if derived else partial(self._read_stats, launched)
            record.later.append(partial(read, self._stats, self._forward_end_ns, self._buckets))
        record.untimed = record.untimed or derived or not self.timed

    # -- gradients -------------------------------------------------------------------------------------------

    def _param_hook(self, position: int) -> Callable[..., Any]:
        return self._guarded(lambda param: self._recorder.hook_fired(self._param_base + position))

    # These run on the sender thread.

    def _read_stats(
        self,
        launched: list[BucketRecord],
        stats: list[int] | None,
        forward_end_ns: int,
        buckets: list[BucketLayout],
        record: StepRecord,
    ) -> None:
        """Turns the reducer's ready times, or our hooks', into hook fires and the buckets' ready stamps.

        The reducer's count from a moment shortly before our own stamp of the forward's end. A ready time can not lie
        after its bucket was launched: whatever seems to is that difference, and is taken off.
        """
        offsets = self._ready_offsets(record, stats, forward_end_ns)
        readies = {bucket.index: _last(offsets, bucket) for bucket in buckets}
        ready = [forward_end_ns + at if (at := readies.get(bucket.index, 0)) else 0 for bucket in launched]
        shift = max(0, *(at - bucket.launch for at, bucket in zip(ready, launched, strict=True)))
        latest = 0
        for at, bucket in zip(ready, launched, strict=True):
            bucket.ready = at - shift if at else None
            if at and at - shift >= latest:  # it did not have to wait for the bucket before it
                self._lag_ns[bucket.index] = bucket.launch - at
            latest = bucket.launch
        if stats is not None:
            self._tell_hooks(record, stats, forward_end_ns - shift)
        if newest := max(offsets, default=0):
            self._recorder.last_hook = self._param_base + offsets.index(newest)

    def _derive_launches(
        self, stats: list[int] | None, forward_end_ns: int, buckets: list[BucketLayout], record: StepRecord
    ) -> None:
        """The launches of a step whose collectives were not seen: DDP launches in index order, each once it is ready.

        From the last gradient to the launch it copies that gradient into the bucket; how long that took where it was
        seen last is added. Some of these steps tell every gradient: who is late is asked of the newest sixteen, and
        where in the bucket it begins.
        """
        offsets = self._ready_offsets(record, stats, forward_end_ns)
        readies = [_last(offsets, bucket) for bucket in buckets]
        latest = min(filter(None, readies if any(readies) else offsets), default=0)
        base = forward_end_ns - record.start
        for bucket, ready in zip(buckets, readies, strict=True) if latest else ():
            latest = max(latest, ready + self._lag_ns.get(bucket.index, 0))
            known = base + min(ready, latest) if ready else None
            record.derived.append((base + latest, self._module, bucket.index, bucket.nbytes, known, None))
        if stats is not None and is_sampled(record.step, HOOKS_PERIOD):
            self._tell_hooks(record, stats, forward_end_ns)

    def _tell_hooks(self, record: StepRecord, offsets: list[int], first: int) -> None:
        record.hooks.extend((self._param_base + i, first + at) for i, at in enumerate(offsets) if at)

    def _ready_offsets(self, record: StepRecord, stats: list[int] | None, forward_end_ns: int) -> list[int]:
        """When each parameter's gradient came (ns from the forward's end), 0 where that is not known.

        For parameters that are unused this time, DDP notes the moment at which it counts them as ready.
        """
        if stats is not None:
            return stats
        by_hook = dict(record.hooks)
        return [by_hook.get(self._param_base + i, forward_end_ns) - forward_end_ns for i in range(self.parameters)]

    # -- buckets: the observer of `ddpwatch.probe.collectives` -------------------------------------------------

    def called(self) -> int:
        """A bucket's collective is about to be issued."""
        if not self.active or self._recorder.shadow:
            return 0
        try:
            at = self._recorder.clock()
        except Exception as error:
            self.failed(error)
            return 0
        # While a CUDA graph is captured, stamps are the host's, and a callback would become part of the graph.
        return at if self._host or isinstance(at, GpuStamp) else 0

    def issued(self, index: int | None, nbytes: int, at: int, future: Any) -> BucketRecord | None:
        """It was issued; ``future`` is done when its result is there."""
        entered = time.monotonic_ns()
        try:
            number = len(self._launched) if index is None else index
            entry = self._recorder.bucket_launch(self._module, number, nbytes, launch=at)
            if entry is not None:
                self._launched.append(entry)
                if self.timed:
                    future.add_done_callback(Callback(self._done, entry))
                self._recorder.charge(time.monotonic_ns() - entered)
            return entry
        except Exception as error:
            self.failed(error)
            return None

    def _done(self, entry: BucketRecord) -> None:
        self._recorder.bucket_done(entry, time.monotonic_ns() if self._by_host else None)

    def hooked(self) -> None:
        """A comm hook was registered which runs unwrapped: its collectives are seen on its process group."""
        ddp = self._ddp()
        if self.active and ddp is not None and self._group_hooks is None:
            self._group_hooks = GroupHooks(ddp.process_group, self)

    def failed(self, error: Exception) -> None:
        """Something of ours went wrong: the probe falls silent."""
        self.active = False
        self._on_error(error)

    def _update_layout(self, ddp: DistributedDataParallel, sizes: list[int]) -> None:
        """Publishes what is in which bucket when that has changed, and again when DDP tells more about it.

        Args:
            ddp: The module.
            sizes: Bytes of the buckets that were launched, in index order; empty where they were not seen.
        """
        held = [bucket.nbytes for bucket in self._buckets]
        if sizes and sizes != held:
            self._layout_tries = LAYOUT_TRIES
        elif self._layout_tries == 0 or (sizes and all(bucket.params for bucket in self._buckets)):
            return
        self._layout_tries -= 1
        known = bucket_layout(ddp)
        sizes = sizes or [bucket.nbytes for bucket in known]
        params = [bucket.params for bucket in known] if len(known) == len(sizes) else [[] for _ in sizes]
        if sizes == held and params == [bucket.params for bucket in self._buckets]:
            return
        self._buckets = [BucketLayout(i, *row) for i, row in enumerate(zip(sizes, params, strict=True))]
        self._lag_ns.clear()
        self._recorder.epoch += 1
        self._publish_layout(
            Layout(
                rank=0,  # the sender knows it
                module=self._module,
                module_name=self._name,
                epoch=self._recorder.epoch,
                param_base=self._param_base,
                params=self._param_names,
                buckets=self._buckets,
            )
        )


def _register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
    """`tensor.register_hook` without the handle that takes the hook off: two thirds of its time, in cold caches."""
    add = getattr(tensor.grad_fn, "_register_hook_dict", None)
    if add is None or type(tensor) is not torch.Tensor or tensor._backward_hooks is not None:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    tensor._backward_hooks = OrderedDict({_OURS: hook})  # a later hook of the user's goes there, too
    add(tensor)


def _last(offsets: list[int], bucket: BucketLayout) -> int:
    """When the last gradient of a bucket came, 0 if that is not known."""
    return max(map(offsets.__getitem__, bucket.params), default=0)


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


def _leave_untraced(trace_rules: Any) -> None:
    """Tells torch.compile to run our hooks as they are, at a graph break. DDP's own forward has several anyway."""
    if hasattr(trace_rules, "add"):
        trace_rules.add("ddpwatch")


wrapt.register_post_import_hook(_leave_untraced, "torch._dynamo.trace_rules")


def check_watchable(model: object) -> DistributedDataParallel:
    """The model, if it is something we can attach to.

    Raises:
        UsageError: It is not a DDP module, or its reducer is of a kind that we cannot see.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"watch() got a {type(model).__name__}",
            "wrap the model first: watch(DistributedDataParallel(model))",
        )
    if getattr(model, "_use_python_reducer", False):
        raise UsageError("DDP runs with the Python reducer", "unset torch._dynamo.config.optimize_ddp='python_reducer'")
    return model
