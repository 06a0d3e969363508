"""Finds the places that issue collectives: the first call outside of what only passes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import CO_NESTED, CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType
from typing import Final
from zlib import crc32

import torch

from ddpwatch.probe.guarded import ProbeContext
from ddpwatch.wire.messages import OWN_COLLECTIVES, BucketLayout, Layout

MOST_PLACES: Final = 256  # with a name each; all others are `OTHER_PLACES`
OTHER_PLACES: Final = "other places"
_PLUMBING: Final = (
    "torch/_ops.py",
    "_library/autograd.py",
    "_functional_collectives.py",
    "distributed_c10d.py",
    "/nn/functional.py",
    "/function.py",
    "deepspeed/comm/comm.py",
    "deepspeed/comm/torch.py",
)
_OURS: Final = "/ddpwatch/probe/"
_DECORATED: Final = CO_NESTED | CO_VARARGS | CO_VARKEYWORDS
_TORCH: Final = torch.__file__.rpartition("/")[0] + "/"
_WRAPPERS: Final = (  # of what they issue, all but broadcasts of buffers is seen, and these are waits
    f"{_TORCH}nn/parallel/distributed.py", f"{_TORCH}distributed/fsdp/_fully_shard/",
    f"{_TORCH}distributed/algorithms/ddp_comm_hooks/",
)  # fmt: skip
_UNNAMED: Final = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # a part of the function that runs it
_passing: dict[str, bool] = {}  # by file, whether what is called there only passes on


class Places:
    """The places in this process that issue collectives.

    Args:
        context: Gets a layout whose buckets are the places.
        issuing: The functions that issue, by the id of their code: to hash code takes its time.
        beside: Whether what DDP and FSDP2 issue is seen otherwise.
    """

    def __init__(self, context: ProbeContext, issuing: Mapping[int, CodeType], beside: bool = False) -> None:
        self._context, self._issuing, self._beside = context, issuing, beside
        self._numbers: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType | None] = []  # of these places, so that no other code gets their ids
        self._names: dict[int, str] = {}

    def call_under_way(self) -> int:
        """Returns the id of the frame of the innermost function that issues here; 0 without one."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and id(frame.f_code) not in self._issuing:
            frame = frame.f_back if passes_on(frame) else None
        return 0 if frame is None else id(frame)

    def frame_under_way(self) -> FrameType | None:
        """Returns the frame of the place that issues here."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and passes_on(frame):
            frame = frame.f_back
        return frame

    def find(self) -> tuple[int, int, int | None]:
        """Returns by what a collective is issued here: the outermost function that issues, and from where.

        Returns:
            The id of that function's frame, 0 without one; how many such functions call each other; and the number of
            the place, None if that is not looked for.
        """
        call, calls = 0, 0
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and passes_on(frame):
            if id(frame.f_code) in self._issuing:
                call, calls = id(frame), calls + 1
            frame = frame.f_back
        if self._beside and frame is not None and frame.f_code.co_filename.startswith(_WRAPPERS):
            return call, calls, None
        key = (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)
        number = self._numbers.get(key)
        return call, calls, self._add_place(key, frame) if number is None else number

    def _add_place(self, key: tuple[int, int], frame: FrameType | None) -> int:
        """Returns its number: it follows from its name, so that all ranks number alike, whatever they issue first."""
        name = _name_of(frame) if len(self._numbers) < MOST_PLACES else OTHER_PLACES
        number = crc32(name.encode())
        if name != OTHER_PLACES:
            self._numbers[key] = number
            self._codes.append(frame and frame.f_code)
        if number not in self._names:
            self._names[number] = name
            self._publish()
        return number

    def _publish(self) -> None:
        buckets = [BucketLayout(number, 0, [], name) for number, name in self._names.items()]
        epoch = self._context.recorder.epoch
        layout = Layout(rank=0, module=OWN_COLLECTIVES, kind="call", epoch=epoch, params=[], buckets=buckets)
        self._context.publish(layout)


def passes_on(frame: FrameType) -> bool:
    """Returns whether a place only passes on what another one issues: plumbing, or what a decorator puts around it."""
    code = frame.f_code
    if code.co_flags & _DECORATED == _DECORATED and not code.co_argcount:  # def wrapper(*args, **kwargs) in a function
        return True
    name = code.co_filename
    known = _passing.get(name)
    if known is None:
        known = _passing[name] = name.endswith(_PLUMBING) or _OURS in name
    return known


def _name_of(frame: FrameType | None) -> str:
    """Returns a name for a place: file and line, or a function of torch's or another library's."""
    if frame is None:
        return "unknown"
    code, line = frame.f_code, frame.f_lineno
    while frame.f_code.co_name in _UNNAMED and (outer := frame.f_back) and outer.f_code.co_filename == code.co_filename:
        frame = outer
    named = frame.f_code
    *_, function = getattr(named, "co_qualname", named.co_name).rpartition("<locals>.")  # < 3.11: without its class
    if code.co_filename.startswith(f"{_TORCH}autograd/"):
        return "backward"
    if code.co_filename.startswith(_TORCH):
        module = code.co_filename.removeprefix(_TORCH).removesuffix(".py").replace("/", ".")
        return f"{module.removeprefix('distributed.')} {function}"[:200]
    *_, library = code.co_filename.rpartition("-packages/")
    if library != code.co_filename:
        return f"{library.partition('/')[0].removesuffix('.py')} {function}"[:200]
    return f"{code.co_filename.rpartition('/')[2]}:{line}"[:200]
