"""A rank's stack as faulthandler writes it, and the place in the user's code that it leads to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath

from ddpwatch.analysis.diagnosis.incident import StackGroup
from ddpwatch.common.call_sites import is_library
from ddpwatch.wire.messages import Stack

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$')
_COLLECTIVE = re.compile(r"/torch/distributed/(?:distributed_c10d|_functional_collectives)\.py$")


@dataclass(frozen=True, slots=True)
class CallStack:
    """Where a rank's training thread was.

    Attributes:
        at_ns: When, on the rank's clock.
        frames: ``file:line in function``, innermost first.
        inner: The function of the innermost frame, if that is not the `site`.
        calls: The frames that are neither torch's nor ddpwatch's nor the standard library's, with their files' names
            only, outermost first; the innermost of all, if there is no such frame.
        in_collective: Whether it waits inside a collective of ``torch.distributed``.
    """

    at_ns: int
    frames: tuple[str, ...]
    inner: str
    in_collective: bool
    calls: tuple[str, ...]

    @property
    def site(self) -> str:
        """The innermost of its `calls`."""
        return self.calls[-1]


def shared_site(stacks: Sequence[tuple[str, ...]]) -> str:
    """Returns the innermost call that some stacks have in common; empty if that is only the one that all starts with.

    Args:
        stacks: The `calls` of each.
    """
    shared = [calls[0] for calls in takewhile(lambda calls: len(set(calls)) == 1, zip(*stacks, strict=False))]
    is_vague = len(shared) == 1 and any(len(calls) > 1 for calls in stacks)
    return "" if is_vague or not shared else shared[-1]


def grouped(stacks: Iterable[tuple[int, CallStack]], blamed: Set[int]) -> list[StackGroup]:
    """Groups ranks by equal stacks, apart from those that are to blame. These come first, then the largest groups."""
    groups: dict[tuple[bool, tuple[str, ...]], tuple[CallStack, list[int]]] = {}
    for rank, stack in stacks:
        groups.setdefault((rank not in blamed, stack.frames), (stack, []))[1].append(rank)
    found = sorted((waits, -len(ranks), sorted(ranks), stack) for (waits, _), (stack, ranks) in groups.items())
    return [StackGroup(ranks, stack.site, stack.inner, stack.frames) for _, _, ranks, stack in found]


def call_stack(stack: Stack) -> CallStack | None:
    """Returns the training thread's calls; None if there are none in the text."""
    found: list[tuple[str, str, str]] = []
    for line in stack.text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            found.append((frame[1], frame[2], frame[3]))
        elif found:
            break  # the next thread
    if not found:
        return None
    own = [frame for frame in found if not is_library(frame[0])] or found[:1]
    return CallStack(
        at_ns=stack.at_ns,
        frames=tuple(f"{file}:{line} in {function}" for file, line, function in found[:32]),
        inner="" if own[0] is found[0] else found[0][2],
        in_collective=_COLLECTIVE.search(found[0][0]) is not None,
        calls=tuple(f"{PurePath(file).name}:{line} in {function}" for file, line, function in reversed(own)),
    )
