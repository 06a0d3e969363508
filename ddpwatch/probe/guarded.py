"""What the probes on a module have in common: hooks that never let an error of ddpwatch's reach the job."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunction

from ddpwatch.probe.autograd import add_gradient_hook, tensors_in
from ddpwatch.probe.completion import Completions
from ddpwatch.probe.forward_inputs import count_inputs
from ddpwatch.probe.guard import Guard
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.wire.messages import STACK_SAMPLES, WATCHING, Feature, Group, Layout


class PortableHook(partial):  # type: ignore[type-arg]  # calls with no Python of its own
    """A forward hook that copies and pickles as one that does nothing, so that the watched model stays portable."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # A bound method of the standard library that takes anything and returns None: a copy of the model
        # must load where ddpwatch is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


@dataclass(frozen=True)
class ProbeContext:
    """What the probe on a module gets from its session.

    Attributes:
        recorder: Takes the stamps.
        guard: Takes ddpwatch's errors.
        publish: Takes each process group and each layout.
        on_wait: Called when a backward has ended its compute and is about to wait. Must not block.
        module: The module's number in this process.
        param_base: Id of its first parameter in this process.
        completions: Follows collectives until they are done.
        published: The ids of the process groups that were published.
    """

    recorder: StepRecorder
    guard: Guard
    publish: Callable[[Group | Layout], None]
    on_wait: Callable[[], None] = lambda: None
    module: int = 0
    param_base: int = 0
    completions: Completions = field(default_factory=Completions)
    published: Set[int] = frozenset()


class GuardedProbe(ABC):
    """A probe whose hooks are guarded. What follows the forward is stamped from hooks on the graph.

    Attributes:
        active: Whether the hooks do anything.
        guard: Takes the hooks' errors.
    """

    def __init__(self, context: ProbeContext) -> None:
        self.active = True
        self.guard = context.guard
        self._recorder = context.recorder
        self._publish = context.publish
        self._completions = context.completions
        self._on_wait = context.on_wait
        self._module = context.module
        self._in_backward = False
        self._backward_start_hook = self._guarded(self._backward_begin)
        # so that saving an output does not warn of a hook
        self._backward_start_hook.__torch_unserializable__ = True  # type: ignore[attr-defined]
        self._compute_end_callback = self._guarded(self._compute_end)
        self._end_callback = self._guarded(self._backward_end)

    @abstractmethod
    def _backward_begin(self, gradient: torch.Tensor) -> None:
        """Runs when the first gradient of an output is there."""

    @abstractmethod
    def _compute_end(self) -> None:
        """Runs when the graph is done, but for what other callbacks do at its end."""

    @abstractmethod
    def _backward_end(self) -> None:
        """Runs when these are done, too."""

    def _begin_forward(self, syncs: bool) -> None:
        """Starts a forward whose backward will synchronise gradients, or not."""
        self._recorder.forward_begin(syncs)
        if self._recorder.lease.sampled:
            self.guard.run(STACK_SAMPLES, count_inputs, self._recorder)

    def _expect_backward(self, output: Any) -> None:
        """Hooks the outputs of a forward. A leaf among them is a parameter, which would gather a hook each time."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                add_gradient_hook(tensor, self._backward_start_hook)

    def _guarded(
        self, call: Callable[..., Any], starts_step: bool = False, feature: Feature = WATCHING
    ) -> Callable[..., Any]:
        """Wraps a hook: ddpwatch's errors never reach the job, and its time is added to what the step cost.

        Args:
            call: The hook. Not called in a bare step.
            starts_step: Whether the hook may start a step; then it is always called.
            feature: What goes off after an error.
        """
        clock, off = time.monotonic_ns, self.guard.off  # the clock of cost, whatever the stamps are

        def guarded(*arguments: Any) -> None:
            if not self.active or not (starts_step or self._recorder.phase) or feature in off:
                return
            entered = clock()
            try:
                with DisableTorchFunction():
                    call(*arguments)
            except Exception as error:
                self.guard.failed(error, feature)
            record = self._recorder.current
            if record is not None:
                record.own_ns += clock() - entered

        return guarded
