"""Sees a training loop without a wrapper: its optimizers, its backwards, its waits for data, its collectives.

| what                            | found by                                                                       |
|---------------------------------|--------------------------------------------------------------------------------|
| start, end of an optimizer step | torch's global hooks                                                           |
| start, end of a backward        | the calls of ``torch.autograd.backward``, or (Python < 3.12) of its engine;    |
|                                 | of ``torch.autograd.grad``, unless it makes a graph, which is forward          |
| start of the forward            | the first call of a module with gradients (Python ≥ 3.12)                      |
| waits for data                  | the calls of a DataLoader's ``next`` (`ddpwatch.probe.activity`)               |
| collectives                     | process groups' hooks, or events (`ddpwatch.probe.own_collectives`)             |

All of it goes into a log; the sender thread makes steps of that (`ddpwatch.probe.steps_of`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

from ddpwatch.probe.calls import SeenCalls, argument, can_see_events, innermost
from ddpwatch.probe.cpu_clock import CpuClock
from ddpwatch.probe.ddp_collectives import GroupHooks
from ddpwatch.probe.event_log import MOST_EVENTS, Event, EventLog, UpdateEnd
from ddpwatch.probe.forward_inputs import count_inputs
from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.probe.own_collectives import OwnCollectiveProbe
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.steps_of import Start, steps_of
from ddpwatch.run.blackbox import Phase
from ddpwatch.sampling.levels import BARE, FULL, LIGHT, PROFILED
from ddpwatch.sampling.schedule import BARE_PERIOD
from ddpwatch.wire.messages import STACK_SAMPLES, WATCHING, StepStatus

MOST_CALLS: Final = 64  # of modules without gradients, before the first one with
STILL_NS: Final = 1_000_000_000  # since the newest update or phase


class Loop(torch.nn.Module):
    """The model of a loop without a wrapper, as far as is known: nothing."""


class LoopProbe:
    """The hooks on a loop. Those that the job's threads enter only add to the log.

    Args:
        context: Its recorder notes where the training is; the loop makes the steps itself.
        cpu_clock: CPU time of the job in this process, ns.
        since: When a DDP module's forward has started that updates, too; None without DDP.

    Attributes:
        active: Whether the hooks do anything.
        parameters: None: no model is known.
    """

    parameters = 0
    timed = True
    in_eval = False

    def __init__(self, context: ProbeContext, cpu_clock: Callable[[], int], since: int | None = None) -> None:
        self.active = True
        self._recorder, self._guard, self._cpu = context.recorder, context.guard, CpuClock(cpu_clock)
        self._log = EventLog()
        self._rest: list[Event] = []  # of the step under way
        self._start = Start(self._recorder.steps, since or time.monotonic_ns())
        self._of_ddp = since is not None
        self._level: StepStatus = BARE if _on_gpu() else FULL  # of the step under way
        self._moved = self._of_ddp  # whether there was a forward or a backward since the newest update
        self._backwards = 0  # under way
        self._backward_thread = 0
        self._backward_code = innermost(torch.autograd.backward).__code__
        self._grad_code = innermost(torch.autograd.grad).__code__
        self._profiled = False  # the step under way
        self._calls = 0  # of modules without gradients since the newest update
        self._stepped = False  # an optimizer, in the backward under way
        self._ending = UpdateEnd()
        self._updates = self._recorder.steps
        self._updated_ns = self._start.at
        self._own_ns = 0
        self._loader: Callable[[], object] = lambda: None
        self._seen_grads: SeenCalls | None = None
        self._seen_backwards = self._see_backwards()
        self._first_call: SeenCalls | None = None
        self._collectives = OwnCollectiveProbe(context, self._log, self._charge)
        if not _on_gpu() and (not self._of_ddp or GroupHooks.supported(dist.ProcessGroup)):
            self._guard.run("collectives", self._collectives.see)
        self._collectives.meet_groups()
        self._collectives.turn(self._level == FULL)

    def issued_in(self) -> list[tuple[int, int]]:
        """Returns the process groups, and how many collectives each has issued. For any thread."""
        return self._collectives.issued_in(still=time.monotonic_ns() - self._recorder.since > STILL_NS)

    @property
    def unseen(self) -> str:
        """Why this loop's collectives are only counted; empty if they are seen, or there is no process group."""
        if self._collectives.sees or not dist.is_initialized():
            return ""
        if _on_gpu():
            return "on GPUs, they are only counted"
        return "to see DDP's takes torch 2.14" if self._of_ddp else "to see them takes Python 3.12 or torch 2.14"

    def close(self) -> None:
        """Removes the hooks."""
        self.active = False
        self._seen_backwards.close()
        if self._seen_grads is not None:
            self._seen_grads.close()
        self._collectives.close()
        if self._first_call is not None:
            self._first_call.close()

    def _charge(self, own_ns: int) -> None:
        self._own_ns += own_ns

    def _see_backwards(self) -> SeenCalls:
        """Sees backwards. Where that takes a wrapper, it is a layer below: torch.jit and pickles know `backward`."""
        failed = partial(self._guard.failed, feature=WATCHING)
        if can_see_events():
            begin, end, names = self._grad_begin, self._grad_end, ["create_graph"]
            self._seen_grads = SeenCalls([], code=self._grad_code, begin=begin, end=end, names=names, on_error=failed)
            place = torch.autograd, "backward"
            return SeenCalls([place], begin=self._backward_begin, end=self._backward_end, on_error=failed)
        places = [(module, "_engine_run_backward") for module in (torch.autograd.graph, torch.autograd)]
        begin, end = partial(self._of_engine, self._grad_begin), partial(self._of_engine, self._grad_end)
        return SeenCalls(places, begin=begin, end=end, names=["accumulate_grad"], on_error=failed)

    def _of_engine(self, call: Callable[[bool], None], accumulates: bool, *_: Any) -> None:
        """Calls for a run of the engine: ``backward`` accumulates, ``grad`` does not."""
        frame: FrameType | None = None if accumulates else sys._getframe(1)
        while frame is not None and frame.f_code is not self._grad_code:
            frame = frame.f_back
        call(frame is not None and bool(argument(frame, "create_graph")))

    # -- on the threads that train -------------------------------------------------------------------------------

    def _backward_begin(self, *_: Any) -> None:
        at = time.monotonic_ns()
        if not self.active:
            return
        self._forget_raised(at, begun=1)
        self._backwards += 1
        self._backward_thread = threading.get_ident()
        self._moved = True
        self._log.add_event("backward_begin", at)
        if self._level != BARE and self._backwards == 1:
            self._stop_waiting_for_forward()
            self._stand("backward", at)
        self._own_ns += time.monotonic_ns() - at

    def _backward_end(self, *_: Any) -> None:
        at = time.monotonic_ns()
        if not self.active:
            return
        self._backwards = max(0, self._backwards - 1)
        self._log.add_event("backward_end", at)
        if not self._backwards:
            if self._level != BARE:
                self._stand("between", at)
            if self._stepped:
                self._end_update(at)
        self._own_ns += time.monotonic_ns() - at

    def _grad_begin(self, makes_graph: bool) -> None:
        """Notes that gradients are computed which their caller gets: a backward, or, with a graph, a part of a loss."""
        if not makes_graph:
            self._backward_begin()
        elif self.active:
            at = time.monotonic_ns()
            self._moved = True
            self._log.add_event("forward", at)
            self._own_ns += time.monotonic_ns() - at

    def _grad_end(self, makes_graph: bool, *_: Any) -> None:
        if not makes_graph:
            self._backward_end()

    def _forget_raised(self, at: int, begun: int = 0) -> None:
        """Notes that a backward is over that an exception has left: torch says nothing of that.

        Args:
            at: Now.
            begun: How many of this thread's backwards have only just begun.
        """
        if not self._backwards or threading.get_ident() != self._backward_thread:
            return
        under_way = -begun
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and under_way < 1:
            under_way += frame.f_code is self._backward_code or frame.f_code is self._grad_code
            frame = frame.f_back
        while under_way < 1 and self._backwards:
            self._backwards -= 1
            self._log.add_event("backward_end", at)

    def _forward_begin(self) -> None:
        at = time.monotonic_ns()
        if not self.active:
            return
        if not torch.is_grad_enabled():
            self._calls += 1
            if self._calls > MOST_CALLS:  # an evaluation: each call of a module costs
                self._stop_waiting_for_forward()
        else:
            self._forget_raised(at)
            self._stop_waiting_for_forward()
            self._moved = True
            self._log.add_event("forward", at)
            self._stand("forward", at)
            if self._recorder.lease.sampled:
                self._guard.run(STACK_SAMPLES, count_inputs, self._recorder)
        self._own_ns += time.monotonic_ns() - at

    def optimizer_begin(self, optimizer: Any) -> None:
        """Notes that an optimizer starts to step."""
        at = time.monotonic_ns()
        self._forget_raised(at)
        if self._level != BARE:
            self._log.add_event("optimizer_begin", at, id(optimizer))
            if not self._backwards:
                self._stand("optimizer", at)
        self._own_ns += time.monotonic_ns() - at

    def optimizer_end(self, optimizer: Any) -> None:
        """Notes that an optimizer has stepped."""
        at = time.monotonic_ns()
        self._stepped = True
        if not self._backwards:
            self._end_update(at)
        self._log.add_event("optimizer_end", at, (id(optimizer), self._ending))
        self._own_ns += time.monotonic_ns() - at

    def data_wait(self, loader: Callable[[], object], start: int, end: int) -> None:
        """Notes that the loop has waited for a batch."""
        self._loader = loader
        if self._level != BARE:
            self._log.add_event("data", start, end)

    def _end_update(self, at: int) -> None:
        """Chooses how much is recorded from here on. Several optimizers may step for one update."""
        self._stepped = False
        if not self._moved:
            return
        self._moved = False
        sampling, level, own_ns, self._own_ns = self._recorder.sampling, self._level, self._own_ns, 0
        self._updates += 1
        cpu_ns = None
        if sampling is not None:
            if self._collectives.seen:  # light steps would take waits in them for compute
                sampling.use_light(False)
            if not self._profiled:
                sampling.learn(level, own_ns, at - self._updated_ns)
            sampling.follow(self._recorder.lease.budget_ppm(self._updates, at))
            light: StepStatus = LIGHT if sampling.is_light(self._updates) else FULL
            self._level = BARE if sampling.is_bare(self._updates) else light
        profile = self._recorder.profile
        self._profiled = profile is not None and profile.turn(self._updates)
        if self._profiled:
            self._level = FULL
        if _on_gpu():
            self._level = BARE
        if sampling is None or sampling.needs_cpu_time(self._updates):
            cpu_ns = self._cpu.read()
            self._own_ns -= self._cpu.waited_ns  # this call is charged once it is over
        complete = self._collectives.complete and "collectives" not in self._guard.off
        status = PROFILED if self._profiled else self._level
        self._ending = UpdateEnd(status, own_ns, cpu_ns, self._loader() is not None, complete)
        self._updated_ns = at
        self._recorder.begin_update(self._updates, "" if self._level == BARE else "input", at)
        if self._level != BARE or self._updates % BARE_PERIOD == 0:
            self._collectives.meet_groups()
        self._collectives.turn(self._level == FULL and "collectives" not in self._guard.off)
        if self._level != BARE:
            self._calls = 0
            self._wait_for_forward()

    def _stand(self, phase: Phase, at: int) -> None:
        self._recorder.begin_phase(phase, at)

    def _wait_for_forward(self) -> None:
        """Sees the next call of a module, where the interpreter shows calls."""
        if self._first_call is None and self._seen_backwards.by_events:
            failed = partial(self._guard.failed, feature=WATCHING)
            place = torch.nn.Module, "_call_impl"
            self._first_call = SeenCalls([place], begin=self._forward_begin, on_error=failed)

    def _stop_waiting_for_forward(self) -> None:
        first, self._first_call = self._first_call, None
        if first is not None:
            first.close()

    # -- on the sender thread ------------------------------------------------------------------------------------

    def records(self, over: bool = False) -> list[StepRecord]:
        """Returns the steps that have ended since the last call.

        Args:
            over: Whether nothing follows.
        """
        new = self._log.take_events()
        self._rest = sorted([*self._rest, *new], key=attrgetter("at"))
        if not over and not any(event.kind in ("forward", "backward_begin") for event in new):
            self._forget_oldest()
            return []
        found, self._rest, self._start = steps_of(self._rest, self._start, over)
        for record in found:
            record.epoch = self._recorder.epoch
        self._forget_oldest()
        return found

    def _forget_oldest(self) -> None:
        """Keeps the events of the step under way within bounds: perhaps no optimizer ever ends it."""
        if len(self._rest) > MOST_EVENTS:
            lost = len(self._rest) - MOST_EVENTS // 2
            first = self._rest[lost]
            self._log.lost += lost
            self._rest = [Event(first.number, first.at, "lost", lost), *self._rest[lost:]]


def _on_gpu() -> bool:
    """Returns whether the host's stamps may say when work was enqueued, not when it was done."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
