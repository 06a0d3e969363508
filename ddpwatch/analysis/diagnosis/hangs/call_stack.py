"""A rank's stack as faulthandler writes it, and the place in the user's code that it leads to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath

from ddpwatch.analysis.diagnosis.incident import StackGroup
from ddpwatch.common.call_sites import is_library
from ddpwatch.wire.messages import Stack

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$')
_FUNCTIONAL = re.compile(r"/torch/distributed/_functional_collectives\.py$")  # which waits for whatever is in flight
_C10D = re.compile(r"/torch/distributed/distributed_c10d\.py$")
_OTHER = re.compile("send|recv|group")  # a send meets a receive; to make a group takes its time


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
        collective: Which one, by its name, if that is known: the one that was called from outside.
    """

    at_ns: int
    frames: tuple[str, ...]
    inner: str
    in_collective: bool
    collective: str
    calls: tuple[str, ...]

    @property
    def site(self) -> str:
        """The innermost of its `calls`."""
        return self.calls[-1]

    def differs(self, other: CallStack) -> bool:
        """Returns whether they are at different sites, or in different collectives."""
        return (self.site, self.collective) != (other.site, other.collective)


def shared_site(stacks: Sequence[tuple[str, ...]]) -> str:
    """Returns the innermost call that some stacks have in common; empty if that is only the one that all starts with.

    Args:
        stacks: The `calls` of each.
    """
    shared = [calls[0] for calls in takewhile(lambda calls: len(set(calls)) == 1, zip(*stacks, strict=False))]
    is_vague = len(shared) == 1 and any(len(calls) > 1 for calls in stacks)
    return "" if is_vague or not shared else shared[-1]


def told_apart(stacks: Mapping[int, CallStack]) -> dict[int, str]:
    """Returns the sites of two ranks; with the collective that each is in, if that is all in which they differ."""
    sites = {rank: stack.site for rank, stack in stacks.items()}
    if len({stack.collective for stack in stacks.values()} - {""}) < 2 or len(set(sites.values())) > 1:
        return sites
    return {rank: f"{site} ({stacks[rank].collective})" for rank, site in sites.items()}


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
    within = list(takewhile(lambda frame: frame is not own[0], found))
    return CallStack(
        at_ns=stack.at_ns,
        frames=tuple(f"{file}:{line} in {function}" for file, line, function in found[:32]),
        inner="" if own[0] is found[0] else found[0][2],
        in_collective=any(pattern.search(found[0][0]) for pattern in (_C10D, _FUNCTIONAL)),
        collective=_collective(within),
        calls=tuple(f"{PurePath(file).name}:{line} in {function}" for file, line, function in reversed(own)),
    )


def _collective(frames: Sequence[tuple[str, str, str]]) -> str:
    """Returns the collective that the user's code called, or a library's; "" if these frames are in none."""
    called = [function for file, _, function in frames if _C10D.search(file)]
    is_one = called and _C10D.search(frames[0][0]) and not _OTHER.search(called[-1])
    return called[-1] if is_one else ""
