"""Counts the elements of what a model is called with, in steps of which a viewer asks why a rank is late.

torch's profiler would say the same of each operator (`record_shapes`). But then, to end it takes more than twice as
long, and it asks the job's own tensor classes for their sizes, which are Python that may print or raise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType
from typing import Any, Final

import torch

from ddpwatch.probe.calls import argument
from ddpwatch.probe.recorder import StepRecorder

MODULE_CALL: Final = torch.nn.Module._wrapped_call_impl.__code__
MOST_ITEMS: Final = 10_000  # of a call's arguments
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)


def count_inputs(recorder: StepRecorder) -> None:
    """Counts what the module that is being called gets, if the step's stacks are sampled, or it is profiled."""
    slot = recorder.slot
    if slot not in recorder.lease.sampled:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL:
        frame = frame.f_back
    if frame is not None:
        found = elements((argument(frame, "args"), argument(frame, "kwargs")))
        recorder.input_elements[slot] = recorder.input_elements.get(slot, 0) + found


def elements(arguments: Any) -> int:
    """Returns how many elements the tensors have in tuples, lists and dicts; of torch's own classes alone."""
    return sum(tensor.numel() for tensor in _tensors(arguments))


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """Yields them. It calls no method that the job may have written."""
    left, room = [arguments], MOST_ITEMS
    while left:
        item = left.pop()
        if type(item) in _TENSORS:
            yield item
            continue
        values: Iterable[Any] = ()
        if isinstance(item, dict):
            values = dict.values(item)
        elif isinstance(item, (list, tuple)):
            values = list.__iter__(item) if isinstance(item, list) else tuple.__iter__(item)
        before = len(left)
        left += islice(values, room)
        room -= len(left) - before
