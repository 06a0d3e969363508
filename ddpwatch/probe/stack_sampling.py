"""Samples the training thread's stack for some steps, when a viewer asks: on a thread of its own, which ends by itself.

It reads frames under the GIL, some 100 times a second, fewer where that costs too much, and holds none of them longer:
what a frame owns dies when it would without us. Of locals it reads only ``self`` in torch's own call of a module. Where
the training thread keeps the GIL, in C or in a long instruction, a sample comes late; the time since the one before is
its weight.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from random import Random
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.common.call_sites import is_library
from ddpwatch.common.units import NS_PER_S
from ddpwatch.probe.activity import NOTHING, Doing
from ddpwatch.probe.forward_inputs import MODULE_CALL
from ddpwatch.probe.guard import Guard
from ddpwatch.probe.identity import as_text
from ddpwatch.probe.profiling import Profiling
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.stacks import frames_of_others
from ddpwatch.probe.thread_counters import thread_counters
from ddpwatch.sampling.stack_order import OTHER_ORDER, PARTIAL, RUN_ENDED, TOO_LONG, StackOrder
from ddpwatch.wire.messages import PROFILES, STACK_SAMPLES, SampledLine, StackSamples

PERIOD_S: Final = 0.01  # on average, or longer; at random, or a step could be in step with it
LONGEST_S: Final = 10 * PERIOD_S  # or dear samples tell nothing, and go on for long after the last step
COST: Final = 0.005  # the share of the time that samples may take; they cost the training thread half as much again
MOST_S: Final = 120.0  # from the order on
MOST_LINES: Final = 1024  # more are one line without a name
MOST_CALLS: Final = 256  # of a stack, from the innermost on
MOST_MODULES: Final = 65_536
_TORCH: Final = torch.__file__.rpartition("/")[0] + "/"
_ENGINE: Final = f"{_TORCH}autograd/graph.py"  # where the training thread waits for autograd's threads


class StackSampling:
    """Follows orders, one at a time. Made on the training thread, for the sender thread.

    Args:
        rank: This one.
        recorder: Says where training is, and what is ordered.
        post: Takes the samples.
        guard: Takes errors on the sampling thread.
        doing: What the rank waits for or does outside its steps.

    Attributes:
        profiling: What follows the orders to profile.
    """

    def __init__(
        self,
        rank: int,
        recorder: StepRecorder,
        post: Callable[[StackSamples], object],
        guard: Guard,
        doing: Callable[[], Doing] = lambda: NOTHING,
    ) -> None:
        self._rank = rank
        self._doing = doing
        self._recorder = recorder
        self._post = post
        self._guard = guard
        self.profiling = Profiling(rank, recorder, guard)
        self._thread = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._taken = 0
        self._stopping = threading.Event()
        self._thread_of_order: threading.Thread | None = None

    def follow_order(self) -> None:
        """Starts to sample if that is ordered, in place of what was ordered before."""
        order = self._recorder.lease.order()
        if order is None or order.number == self._taken:
            return
        self._taken = order.number
        self.stop()
        if self._rank in (order.rank, order.peer):
            self._stopping = threading.Event()
            work = PROFILES if order.profiler else STACK_SAMPLES, self._sample, order, self._stopping
            started = threading.Thread(target=self._guard.run, args=work, name="ddpwatch-stacks", daemon=True)
            self._thread_of_order = started
            started.start()

    def stop(self) -> None:
        """Ends what is under way."""
        self._stopping.set()

    def finish(self, most_s: float) -> None:
        """Ends what is under way, and waits until its samples are posted, but for `most_s` at most."""
        self.stop()
        if self._thread_of_order is not None:
            self._thread_of_order.join(most_s)

    def _sample(self, order: StackOrder, stopping: threading.Event) -> None:
        lease, slots = self._recorder.lease, range(order.first_slot, order.first_slot + order.steps)
        self._recorder.input_elements, lease.sampled = {}, slots
        try:
            samples = self.profiling.samples if order.profiler else self._samples
            found = samples(order, slots, stopping, until_s := time.monotonic() + MOST_S)
            found.ordered = max(0, order.steps - PARTIAL)
            if self._recorder.slot < slots.stop:
                found.cut_short = self._why_cut(order, stopping, until_s)
            if elements := self._recorder.input_elements:
                found.input_elements = [elements.get(slot, 0) for slot in found.slots]
            self._post(found)
        finally:
            if lease.sampled is slots:
                lease.sampled = range(0)

    def _why_cut(self, order: StackOrder, stopping: threading.Event, until_s: float) -> str:
        if stopping.is_set():
            return RUN_ENDED if self._taken == order.number else OTHER_ORDER
        return TOO_LONG if time.monotonic() >= until_s else ""

    def _samples(self, order: StackOrder, slots: range, stopping: threading.Event, until_s: float) -> StackSamples:
        recorder, pause = self._recorder, Random()
        while recorder.slot < slots.start and time.monotonic() < until_s and not stopping.is_set():
            time.sleep(PERIOD_S)
        samples, before = SampleCounts(time.monotonic_ns()), thread_counters(self._native_id)
        began_ns = time.thread_time_ns()
        while time.monotonic() < until_s:
            # Which takes half of the CPU time of an event's wait
            cpu_ns, elapsed_ns = time.thread_time_ns() - began_ns, time.monotonic_ns() - samples.start_ns
            time.sleep(period_s(cpu_ns, elapsed_ns) * (0.5 + pause.random()))
            if (slot := recorder.slot) >= slots.stop or stopping.is_set():
                break
            with _NO_COLLECTION:
                if (stack := _stack(self._thread)) is not None:
                    phase = "data" if self._doing()[0] == "data" else recorder.phase
                    samples.add_stack(stack, phase, slot)
                    del stack
        return StackSamples(
            rank=self._rank,
            order=order.number,
            explained=order.rank,
            peer=order.compared_with,
            start_ns=samples.start_ns,
            end_ns=samples.end_ns,
            count=samples.count,
            longest_ns=samples.longest_ns,
            cpu_ns=time.thread_time_ns(),
            slots=list(samples.slots),
            lines=samples.lines(),
            sample_slot=samples.columns[0],
            sample_line=samples.columns[1],
            sample_ns=samples.columns[2],
            **thread_counters(self._native_id).since(before)._asdict(),
        )


def period_s(cpu_ns: int, elapsed_ns: int) -> float:
    """Returns how long after one sample the next one may come, given what all have cost in the time since the start."""
    return min(max(PERIOD_S, (cpu_ns / COST - elapsed_ns) / NS_PER_S), LONGEST_S)


_MAKES_FRAMES: Final = sys.version_info[:2] == (3, 11)


class _NoCollection:
    """Keeps garbage collections away while frames of other threads are read.

    Python 3.11 makes a frame's object when it is asked for, and may collect garbage then: a finalizer lets the other
    thread go on, and the memory that the new object points to holds something else. Older versions have the objects,
    newer ones collect nothing within an instruction.
    """

    def __init__(self) -> None:
        self._collects = False

    def __enter__(self) -> None:
        self._collects = _MAKES_FRAMES and gc.isenabled()
        if self._collects:
            gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()


_NO_COLLECTION: Final = _NoCollection()


# A line, by what identifies it while it is sampled: its phase, the ids of its module and code, its number, and the code
# and line of what it calls innermost. Names come at the end.
_Line = tuple[str, int, int, int, int, int]


class SampleCounts:
    """Samples of a thread's stack, counted by step and line.

    A sample finds caches cold, so that each call and each object that it touches costs microseconds.

    Args:
        start_ns: When the sampling starts.

    Attributes:
        count: How many there are.
        slots: The steps, by number, with their places.
        columns: Those of `StackSamples`.
    """

    def __init__(self, start_ns: int) -> None:
        self.start_ns = self.end_ns = start_ns
        self.count = self.longest_ns = 0
        self.slots: dict[int, int] = {}
        self.columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._lines: dict[_Line, int] = {}
        self._codes: dict[int, tuple[CodeType, bool]] = {}  # by id: to hash code takes its time
        self._models: dict[int, tuple[weakref.ref[Any], str]] = {}  # the outermost modules, with their classes

    def add_stack(self, innermost: FrameType, phase: str, slot: int) -> None:
        """Takes a stack of now."""
        line = self._line(innermost, phase)
        if (place := self._lines.get(line)) is None:
            place = self._new_place(line)
        if (step := self.slots.get(slot)) is None:
            step = self.slots[slot] = len(self.slots)
        slots, lines, times = self.columns
        at = time.monotonic_ns()
        ns, self.end_ns = at - self.end_ns, at
        if lines and lines[-1] == place and slots[-1] == step:
            times[-1] += ns
        else:
            slots.append(step)
            lines.append(place)
            times.append(ns)
        if ns > self.longest_ns:
            self.longest_ns = ns
        self.count += 1

    def _new_place(self, line: _Line) -> int:
        if len(self._lines) >= MOST_LINES:
            line = (line[0], 0, 0, 0, 0, 0)
        return self._lines.setdefault(line, len(self._lines))

    def _line(self, innermost: FrameType, phase: str) -> _Line:
        own: FrameType | None = None
        # The calls of the innermost module, of the one around the user's line, and of the outermost
        inside = around = outside = None
        frame: FrameType | None = innermost
        for _ in range(MOST_CALLS):
            if frame is None:
                break
            code = frame.f_code
            if code is MODULE_CALL:
                outside = frame
                if own is None:
                    inside = inside or frame
                elif around is None:
                    around = frame
            elif own is None and not self._is_library(code):
                own = frame
            frame = frame.f_back
        inner = innermost.f_code
        self._is_library(inner)  # keeps it
        module = 0 if outside is None else self._module(around or inside or outside, outside)
        at = innermost if own is None else own
        return phase, module, id(at.f_code), at.f_lineno, id(inner), innermost.f_lineno

    def _module(self, call: FrameType, outermost: FrameType) -> int:
        """Returns which module is called, and notes the one that is called outermost."""
        model = outermost.f_locals.get("self")
        if model is not None and id(model) not in self._models:
            self._models[id(model)] = weakref.ref(model), type(model).__name__
        module = model if call is outermost else call.f_locals.get("self")
        return 0 if module is None else id(module)

    def _is_library(self, code: CodeType) -> bool:
        known = self._codes.get(id(code))
        if known is None:
            known = self._codes[id(code)] = code, is_library(code.co_filename)
        return known[1]

    def lines(self) -> list[SampledLine]:
        """Returns the lines with their names."""
        modules: dict[int, str] = {}
        for number, (model, name) in self._models.items():
            if number not in modules:
                modules |= {number: name} if (found := model()) is None else module_names(found)
                del found
        return [self._named(line, modules.get(line[1], "")) for line in self._lines]

    def _named(self, line: _Line, module: str) -> SampledLine:
        phase, _, code, number, inner, inner_number = line
        file, function = self._name(code)
        inner_file, inner_function = self._name(inner)
        is_inner = (code, number) == (inner, inner_number)
        return SampledLine(
            phase=phase,
            module=module[:500],
            file=file,
            line=max(0, number or 0),
            function=function,
            inner="" if is_inner or not inner_file else f"{inner_file}:{inner_number} in {inner_function}",
        )

    def _name(self, code: int) -> tuple[str, str]:
        found = self._codes.get(code)
        if found is None:
            return "", ""
        return as_text(found[0].co_filename.rpartition("/")[2], 200), as_text(found[0].co_name, 200)


def _stack(thread: int) -> FrameType | None:
    """Returns the innermost frame of a thread, or of the one of autograd's that it waits for; None if it has ended."""
    frames = frames_of_others()
    own = frames.pop(thread, None)
    if own is not None and own.f_code.co_filename == _ENGINE:
        return next((frame for frame in frames.values() if _is_called_by_torch(frame)), own)
    return own


def _is_called_by_torch(innermost: FrameType) -> bool:
    """Returns whether a thread has its first call from torch's C++, as those that run backwards on GPUs."""
    outermost = innermost
    while outermost.f_back is not None:
        outermost = outermost.f_back
    return outermost.f_code.co_filename.startswith(_TORCH)


def module_names(model: Any) -> dict[int, str]:
    """Returns the names of a model's modules in it, by their ids; that of the model is its class.

    It calls nothing of the model's. What DDP and torch.compile wrap has the names that it has without them.
    """
    found: dict[int, str] = {}
    left = [("", model)]
    while left and len(found) < MOST_MODULES:
        name, module = left.pop()
        if id(module) in found:
            continue
        found[id(module)] = name or type(module).__name__
        wraps = issubclass(type(module), DistributedDataParallel)
        children = object.__getattribute__(module, "__dict__").get("_modules") or {}
        for key, child in list(children.items()):
            if child is not None:
                inner = name if wraps or key == "_orig_mod" else f"{name}.{key}" if name else str(key)
                left.append((inner, child))
    return found
