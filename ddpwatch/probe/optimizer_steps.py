"""Sees the steps of every optimizer in this process, by torch's global hooks.

These must not change while torch goes through them, and a session may start in one: so there is one pair of hooks, and
who listens may come and go at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._C import DisableTorchFunction
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpwatch.probe.autograd import optimizer_hook

OnStep = Callable[[Any], None]  # takes the optimizer

Listener = tuple[OnStep, OnStep, Callable[[Exception], None]]

_listeners: list[Listener] = []
_handles: list[Any] = []
_running = 0


def see_optimizer_steps(begin: OnStep, end: OnStep, on_error: Callable[[Exception], None]) -> Callable[[], None]:
    """Calls these at the start and the end of each optimizer step. Returns what takes that back.

    A step that torch.compile has compiled is not seen: anything that is would change its graph.

    Args:
        begin: Takes the optimizer that starts.
        end: Takes the optimizer that has stepped.
        on_error: Takes an error of theirs, and raises it if it is the job's.
    """
    listener = begin, end, on_error
    _listeners.append(listener)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(optimizer_hook(partial(_tell, 0))))
        _handles.append(register_optimizer_step_post_hook(optimizer_hook(partial(_tell, 1))))

    def leave() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners and not _running:
            while _handles:
                _handles.pop().remove()

    return leave


def _tell(which: int, optimizer: Any) -> None:
    global _running
    _running += 1
    try:
        told: list[Listener] = []
        while new := [listener for listener in _listeners if listener not in told]:  # one may add another
            told += new
            for listener in new:
                try:
                    with DisableTorchFunction():  # what the job overrides must not see our reads
                        listener[which](optimizer)
                except Exception as error:
                    listener[2](error)
    finally:
        _running -= 1
