"""Profiles the training thread for some steps, when a viewer asks: torch's operators, and the time that each takes.

The training thread itself starts torch's profiler where a step starts, and ends it where a later one does; the thread
that follows the order sums up what was recorded. A process that exits under torch's profiler crashes, and so may one
that forks: so only the main thread is profiled. It ends the profile before either, before the job's own profiler
starts, and wherever it is once the profile takes too long, or nobody waits for it any more. A job that has ever used
a profiler of its own is left alone: torch would write into its output.

What starts under one profile and ends under another corrupts memory: torch keeps a pointer into the first. So only
operators are recorded, not what the job's ``record_function`` encloses, and a step lies between two profiles. What
calls of Python change inside a backward, autograd takes back: so nothing starts or ends there.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final, TypeVar

import torch
from torch.autograd import DeviceType, kineto_available, profiler

from ddpwatch.probe.calls import SeenCalls
from ddpwatch.probe.guard import CLOSING, Guard
from ddpwatch.probe.operator_times import OperatorTimes, phases_of
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.thread_counters import ThreadCounters, thread_counters
from ddpwatch.sampling.levels import ORDINARY
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.wire.messages import PROFILES, Feature, StackSamples, Step
from ddpwatch.wire.profile_trace import ProfiledEvent, pack

MOST_EVENTS: Final = 200_000  # of a profile: to end it takes 3 µs and 2 KB for each
FEWEST_STEPS: Final = 3  # for which there must be room
TIMES: Final = 3  # as long as usual, and at least so long, its steps may take
LEAST_NS: Final = 1_000_000_000
REPORTED_S: Final = 3.0  # after its end, until the last of its steps is sent
USUAL_STEPS: Final = 16  # before it, by which it is known what it adds
LOOK_S: Final = 0.05
OTHER_S: Final = 5.0  # so long, another thread's profiler waits for the main thread to end this one
OWN_PROFILER: Final = "the job has a profiler of its own"
Result = TypeVar("Result")
_AT_ONCE: Final = 500  # events, before another thread may go on
_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
_FROM_OUTSIDE: Final = frozenset(("KINETO_USE_DAEMON", "NSYS_PROFILING_SESSION_ID"))  # profilers, by the environment
_STARTS: Final = (
    ("profile", "_prepare_trace"),
    ("emit_nvtx", "__enter__"),
    ("emit_itt", "__enter__"),
)


class Profile:
    """A profile of some steps, for the main thread.

    Args:
        slots: The steps. The first one alone shows how many events a step has; what is recorded of it is dropped. The
            second one lies between.
        usual_ns: What a step takes; 0 if that is not known.
        guard: Takes errors.

    Attributes:
        obstacle: Why there is none; empty as long as nothing is in the way.
        starts: The steps' slots, with when each started (ns); the last one only ends the one before.
        begin: When it began (ns).
        end: When it had ended (ns).
        counted: What the operating system counted of the thread in between.
        done: Set once nothing more will come.
    """

    def __init__(self, slots: range, usual_ns: float, guard: Guard) -> None:
        self.obstacle = ""
        self.starts: list[tuple[int, int]] = []
        self.begin = self.end = 0
        self.counted = self._counters = ThreadCounters()
        self.done = threading.Event()
        self._slots, self._usual_ns, self._guard = slots, usual_ns, guard
        self._next, self._steps = slots.start, 1  # the slot from which on so many are recorded
        self._until = 0  # the slot that ends what is under way
        self._late_ns = 0  # when that is overdue
        self._is_on = False
        self._results: Any = None
        self._is_busy = self._is_cancelled = self._is_asked = False
        self._unix_ns = 0  # at the monotonic clock's zero

    def turn(self, slot: int) -> bool:
        """Starts or ends what is due where a step starts; returns whether that step is not as usual then."""
        if self.done.is_set() or (slot < self._slots.start and not self._is_cancelled):
            return False
        is_profiled = self._run(PROFILES, self._turn, slot)
        if is_profiled is None:
            self.obstacle = "torch's profiler has failed"
        if is_profiled is None or self._is_cancelled:
            self.end_here()
        return is_profiled is not False

    def _run(self, feature: Feature, call: Callable[..., Result], *arguments: object) -> Result | None:
        """Calls what a signal's handler, or a call that was pending, must not enter again."""
        self._is_busy = True
        try:
            return self._guard.run(feature, call, *arguments)
        finally:
            self._is_busy = False

    def _turn(self, slot: int) -> bool:
        if _in_backward():
            return self._is_on
        if not self._is_on:
            is_over = self._is_cancelled or slot >= self._slots.stop
            if is_over or (obstacle := _obstacle()):
                self.obstacle = "" if is_over else obstacle
                self.done.set()
                return False
            if slot < self._next:
                return False
            self._start(slot, self._steps)
            return True
        self.starts.append((slot, time.monotonic_ns()))
        if slot < self._until:
            return True
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # as torch does, or its last work is missing
        self._stop()
        if self._next > self._slots.start or (left := self._slots.stop - slot - 1) <= 0:
            self.done.set()
            return True
        self._next, self.starts = slot + 1, []
        events = max(1, len(self._results.events()))
        self._steps = min(left, MOST_EVENTS // events)
        if self._steps < FEWEST_STEPS:
            self.obstacle = f"{events} calls of operators in a step are too many"
            self.done.set()
        return True

    def _start(self, slot: int, steps: int) -> None:
        begin, self._until = time.monotonic_ns(), slot + steps
        if not self.begin:
            self.begin, self._counters = begin, thread_counters(threading.get_native_id())
        from torch._C._profiler import RecordScope

        device = "cuda" if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        about = profiler.profile(use_kineto=True, use_device=device)
        config, activities = about.config(), about.kineto_activities  # type: ignore[no-untyped-call]
        self._is_on = True
        with _silent_kineto():
            profiler._prepare_profiler(config, activities)
        profiler._enable_profiler(config, activities, {RecordScope.FUNCTION, RecordScope.BACKWARD_FUNCTION})  # type: ignore[call-arg]
        self.starts = [(slot, time.monotonic_ns())]
        self._unix_ns = time.time_ns() - time.monotonic_ns()
        self._late_ns = begin + max(LEAST_NS, round(TIMES * self._usual_ns * steps))

    def _stop(self) -> bool:
        """Returns whether nothing is under way any more."""
        if self._is_on:
            if _in_backward():
                return False
            self._results, self._is_on = profiler._disable_profiler(), False
            self.end, counters = time.monotonic_ns(), thread_counters(threading.get_native_id())
            self.counted = counters.since(self._counters)
        return True

    def end_here(self) -> None:
        """Ends it at once, if this is the main thread, outside a backward."""
        self._is_asked = False
        if not _is_main():
            return
        self._is_cancelled = True
        if not self._is_busy and self._run(CLOSING, self._stop) is not False:
            self.done.set()

    def cancel(self) -> None:
        """Asks the main thread to end it as soon as that runs Python; in a backward, once more is needed."""
        self._is_cancelled = True
        if not (self.done.is_set() or self._is_asked):
            function = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
            self._is_asked = ctypes.pythonapi.Py_AddPendingCall(function, ctypes.py_object(_END)) == 0

    def give_way(self) -> None:
        """Ends it before a profiler of the job's starts."""
        if self.done.is_set():
            return
        self.obstacle = OWN_PROFILER
        self.end_here()
        self.cancel()
        if not self.done.wait(0.0 if _is_main() else OTHER_S):  # in a backward, it cannot
            self._is_on = False  # torch takes it away now, and to end it then may crash
            self.done.set()

    @property
    def is_late(self) -> bool:
        """Whether what is under way takes too long: perhaps no step starts any more."""
        return self._is_on and 0 < self._late_ns < time.monotonic_ns()

    def events(self) -> Iterator[ProfiledEvent]:
        """Yields what was recorded, once; now and then, other threads may go on."""
        results, self._results = self._results, None
        for number, event in enumerate([] if results is None or self.obstacle else results.events()):
            if number % _AT_ONCE == 0:
                time.sleep(0)
            thread, on_gpu = event.start_thread_id(), event.device_type() != DeviceType.CPU
            is_call = on_gpu or (thread == event.end_thread_id() and not event.is_async())
            if is_call and not (event.is_hidden_event() or event.is_user_annotation()):
                start = event.start_ns() - self._unix_ns
                lane = event.device_resource_id() if on_gpu else thread
                yield ProfiledEvent(event.name(), start, start + event.duration_ns(), lane, on_gpu)


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _obstacle() -> str:
    if not kineto_available():
        return "its torch has no profiler"
    if not _is_main():
        return "it does not train in its main thread"
    is_on = torch.autograd._profiler_enabled() or profiler._is_profiler_enabled
    return OWN_PROFILER if is_on or _has_own or _FROM_OUTSIDE & os.environ.keys() else ""


# -- what ends a profile in between -----------------------------------------------------------------------------------

_current: Profile | None = None
_has_own = False  # whether the job has used a profiler


def _end_current() -> None:
    if _current is not None:
        _current.end_here()


class _EndOfProfile:
    """Ends the profile where it is asked for its truth: C's function that asks is a call that can be pending.

    Unlike a callback of ctypes', it lets pass what a signal's handler raises meanwhile.
    """

    def __bool__(self) -> bool:
        _end_current()
        return False


_END: Final = _EndOfProfile()
atexit.register(_end_current)
os.register_at_fork(before=_end_current)


def see_own_profilers(guard: Guard) -> Callable[[], None]:
    """Sees the job start profilers of its own, from now on; returns what ends that, and a profile."""
    failed = partial(guard.failed, feature=PROFILES)
    seen = [SeenCalls([(getattr(profiler, kind), name)], begin=_own_begins, on_error=failed) for kind, name in _STARTS]

    def close() -> None:
        _end_current()
        for one in seen:
            one.close()

    return close


def _own_begins() -> None:
    global _has_own
    _has_own = True
    if _current is not None:
        _current.give_way()


@contextmanager
def _silent_kineto() -> Iterator[None]:
    """Keeps kineto's log out of the job's output: it learns once from the environment what to log."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


# -- the thread that follows the order --------------------------------------------------------------------------------


class Profiling:
    """Follows an order to profile, on that order's thread.

    Args:
        rank: This one.
        recorder: Shows the profile to the training thread.
        guard: Takes errors.
    """

    def __init__(self, rank: int, recorder: StepRecorder, guard: Guard) -> None:
        self._rank, self._recorder, self._guard = rank, recorder, guard
        self._usual: deque[int] = deque(maxlen=USUAL_STEPS)
        self._steps: list[Step] | None = None  # of the profile under way

    def add_step(self, step: Step) -> None:
        """Takes a step that is sent."""
        if (steps := self._steps) is not None:
            steps.append(step)
        elif step.status in ORDINARY:
            self._usual.append(step.duration_ns)

    def samples(self, order: StackOrder, slots: range, stopping: threading.Event, until_s: float) -> StackSamples:
        """Profiles the steps, and returns the time of their operators."""
        steps: list[Step] = []
        self._steps = steps
        try:
            profile = self._profile(slots, stopping, until_s)
            if profile.starts:
                self._await_steps(steps, profile.starts[-1][1], stopping)
        finally:
            self._steps = None
        times = OperatorTimes(profile.starts, phases_of(steps))
        events = list(profile.events())
        times.add_events(events)
        lines = times.lines()
        cells = [(slot, at, ns) for at, (_, _, times_ns) in enumerate(lines) for slot, ns in times_ns.items()]
        return StackSamples(
            rank=self._rank,
            order=order.number,
            explained=order.rank,
            peer=order.compared_with,
            start_ns=profile.begin,
            end_ns=profile.end,
            count=times.count,
            longest_ns=0,
            cpu_ns=self._added_ns(profile, 1 + len(times.slots)),
            slots=times.slots,
            lines=[line for line, _, _ in lines],
            sample_slot=[slot for slot, _, _ in cells],
            sample_line=[at for _, at, _ in cells],
            sample_ns=[ns for _, _, ns in cells],
            **profile.counted._asdict(),
            profiler=True,
            calls=[calls for _, calls, _ in lines],
            obstacle=profile.obstacle,
            trace=pack(events, profile.starts),
        )

    def _profile(self, slots: range, stopping: threading.Event, until_s: float) -> Profile:
        """Waits for a profile; the order before may still have one."""
        global _current
        while (before := self._recorder.profile) is not None:
            before.done.wait()
        profile = Profile(slots, self._usual_ns, self._guard)
        _current = self._recorder.profile = profile
        try:
            while not profile.done.wait(LOOK_S):
                if stopping.is_set() or time.monotonic() > until_s or profile.is_late:
                    profile.cancel()
        finally:
            profile.cancel()
            self._recorder.profile = None
        return profile

    @staticmethod
    def _await_steps(steps: Sequence[Step], end_ns: int, stopping: threading.Event) -> None:
        """Waits until the steps have been sent: their phases are known then."""
        until_s = time.monotonic() + REPORTED_S
        while not (steps and steps[-1].start_ns + steps[-1].duration_ns >= end_ns):
            if time.monotonic() > until_s or stopping.wait(LOOK_S):
                break

    def _added_ns(self, profile: Profile, steps: int) -> int | None:
        """Returns what the profile has added to its steps, by those before it; None if none are known."""
        usual_ns = self._usual_ns
        return max(0, round(profile.end - profile.begin - steps * usual_ns)) if usual_ns and profile.end else None

    @property
    def _usual_ns(self) -> float:
        """The median duration of the steps before; 0 if there are none."""
        return median(self._usual) if self._usual else 0
