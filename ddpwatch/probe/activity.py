"""What a rank does outside its steps, found without the script's help: waiting for data, saving, compiling.

A few functions get a stamp at their start and end: the DataLoader's next batch, ``torch.save`` and what else saves, and
a compilation. They run about once a step at most, so the cost of the stamps is too small to measure.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal

import torch
import wrapt
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from ddpwatch.probe.calls import Place, SeenCalls, innermost
from ddpwatch.probe.guard import Guard, is_the_jobs
from ddpwatch.wire.messages import BATCH_WAIT, WORKERS_START, Feature, Mark

MIN_WAIT_NS = 5_000_000  # for a mark
OnWait = Callable[["weakref.ref[Any]", int, int, bool], None]
Activity = Literal["data", "save", "compile"]
Doing = tuple[str, int]  # an activity, and since when (ns)
NOTHING: Final[Doing] = ("", 0)
FEATURES: Final[dict[Activity, Feature]] = {"data": "data waits", "save": "saves", "compile": "compilations"}
# What saves besides torch.save: modules, and the names there by which it is called. They are not imported for that.
SAVERS: Final = (
    ("torch.distributed.checkpoint", "save"),
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)


class ActivityMonitor:
    """Reports each wait for data, and posts a mark for each save, compilation, and wait of at least 5 ms.

    Args:
        rank: Put into the marks.
        post: Takes a mark; must not block.
        on_save: Called when something has been saved, as no other step takes as long.
        on_wait: Takes each wait of the training thread for data: the DataLoader's iterator, start and end (ns), and
            whether a batch came: not while workers start, nor at the end of an epoch.
        guard: Takes ddpwatch's errors.

    Attributes:
        doing: What the training thread is doing right now; read by the sender thread.
        thread: That thread: the one that has made this, or where an optimizer has stepped last.
    """

    def __init__(
        self, rank: int, post: Callable[[Mark], None], on_save: Callable[[], None], on_wait: OnWait, guard: Guard
    ) -> None:
        self.active = True
        self.guard = guard
        self.doing = NOTHING
        self._rank = rank
        self._post = post
        self._on_save = on_save
        self._on_wait = on_wait
        self.thread = threading.get_ident()
        self._compiling_since = 0
        self._compilations: Any = None
        self._on_compile_start = partial(guard.run, "compilations", self._compile_start)
        self._on_compile_end = partial(guard.run, "compilations", self._compile_end)
        # Calls on this thread: since when, what it did before, and whether what it waits for was there by then
        self._under_way: list[tuple[int, Doing, bool]] = []
        self._seen: dict[Callable[..., Any], SeenCalls] = {}
        try:
            self._see_all()
        except BaseException:
            self.close()
            raise

    def _see_all(self) -> None:
        self._see("data", BATCH_WAIT, (_BaseDataLoaderIter, "__next__"), names=["self"])
        self._see("data", WORKERS_START, (_MultiProcessingDataLoaderIter, "__init__"), names=["self"])
        self._see("data", "stopping workers", (_MultiProcessingDataLoaderIter, "_shutdown_workers"), names=["self"])
        self._see("save", "torch.save", (torch.serialization, "save"), (torch, "save"))
        for module, name in SAVERS:
            _when_imported(module, "saves", weakref.WeakMethod(self._time_saver), name)
        _when_imported("torch._dynamo.callback", "compilations", weakref.WeakMethod(self._attach_to_compiler))

    def close(self) -> None:
        """Removes the stamps, except where other code has wrapped them since."""
        self.active = False
        if self._compilations is not None:
            with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed them
                self._compilations.remove_start_callback(self._on_compile_start)
                self._compilations.remove_end_callback(self._on_compile_end)
            self._compilations = None
        for seen in self._seen.values():
            seen.close()

    def _see(self, activity: Activity, name: str, *places: Place, names: Sequence[str] = ()) -> None:
        """Stamps a function that is found in these places. Libraries import it from each other, under several names."""

        def begin(*of_call: Any) -> None:
            if threading.get_ident() == self.thread:
                start, before = time.monotonic_ns(), self.doing
                self._under_way.append((start, before, False))
                self.doing = (activity, start)
                if activity == "data" and _has_ready(of_call[0]):
                    self._under_way[-1] = start, before, True

        def end(*of_call: Any) -> None:
            if threading.get_ident() == self.thread and self._under_way:
                self._report(activity, name, *self._under_way.pop(), *of_call)

        function = innermost(getattr(*places[0]))
        if function in self._seen:
            self._seen[function].also_in(places)
        else:
            failed = partial(self.guard.failed, feature=FEATURES[activity])
            seen = SeenCalls(places, begin=begin, end=end, failed=end, names=names, on_error=failed)
            self._seen[function] = seen

    def _report(self, activity: Activity, name: str, start: int, before: Doing, ready: bool, *of_call: Any) -> None:
        end = time.monotonic_ns()
        if threading.get_ident() != self.thread:
            return
        self.doing = before
        if not self.active or before[0] == activity or (activity == "data" and before != NOTHING):
            return  # what saves calls what saves; a loader may be dropped meanwhile
        if activity == "save":
            self._on_save()
        elif activity == "data":
            came = of_call[-1] is not None and not isinstance(of_call[-1], BaseException)
            self._on_wait(weakref.ref(of_call[0]), start, end, came)
        if activity != "data" or end - start >= MIN_WAIT_NS:
            mark = Mark(rank=self._rank, kind=activity, name=name, start_ns=start, end_ns=end)
            if activity == "data":
                mark.workers = getattr(of_call[0], "_num_workers", None)
                mark.persistent = bool(getattr(of_call[0], "_persistent_workers", False))
                mark.ready = ready
            self._post(mark)

    def _time_saver(self, module: Any, name: str) -> None:
        """Stamps a function that saves, under this name and under that by which pickle looks it up."""
        if not self.active or not hasattr(module, name):
            return
        original: Callable[..., Any] = getattr(module, name)
        home = sys.modules.get(getattr(original, "__module__", ""), module)
        self._see("save", f"{module.__name__}.{name}", (module, name), (home, getattr(original, "__qualname__", name)))

    def _attach_to_compiler(self, callback: Any) -> None:
        handler = getattr(callback, "callback_handler", None)
        if self.active and handler is not None:
            self._compilations = handler
            handler.register_start_callback(self._on_compile_start)
            handler.register_end_callback(self._on_compile_end)

    def _compile_start(self, *_: Any) -> None:
        self._compiling_since = time.monotonic_ns()
        if threading.get_ident() == self.thread:
            self.doing = ("compile", self._compiling_since)

    def _compile_end(self, *_: Any) -> None:
        self._report("compile", "torch.compile", self._compiling_since, NOTHING, False)


def _has_ready(batches: Any) -> bool:
    """Returns whether a DataLoader's workers have made all that they were asked for. No system call, on Linux."""
    try:
        if len(batches._task_info.get(batches._rcvd_idx, ())) > 1:  # it came before others
            return True
        made, taken = batches._worker_result_queue, batches._data_queue  # these differ if a thread pins memory
        count = made.qsize() + (0 if taken is made else len(taken.queue))
        return bool(0 < batches._tasks_outstanding <= count)
    except Exception as error:  # no workers, another torch or system, or a queue that is closed
        if is_the_jobs(error):
            raise
        return False


def _when_imported(
    module: str, feature: Feature, attach: weakref.WeakMethod[Callable[..., None]], *arguments: str
) -> None:
    """Calls a method with the module once it is imported, or now; not for an object that is gone by then."""

    def hook(imported: Any) -> None:
        method: Any = attach()
        if method is not None:  # an error would make the job's import fail
            method.__self__.guard.run(feature, method, imported, *arguments)

    wrapt.register_post_import_hook(hook, module)
