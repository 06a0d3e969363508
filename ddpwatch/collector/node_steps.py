"""Collects the steps of a node's ranks until all have sent the same one, and packs them. No socket, no clock.

Ranks send about twice a second, each at its own moment, so a step waits for its last rank. It does not wait for long: a
rank that has not sent it after `HOLD_NS` is not waited for until it sends again, and what it sends late goes up by
itself. Every rank's steps keep their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ddpwatch.sampling.levels import FULL
from ddpwatch.wire.messages import FrameError, NodeStep, Step
from ddpwatch.wire.node_step import pack

HOLD_NS = 750_000_000  # a rank's sender wakes twice a second
HOLD_STEPS = 256
WHOLE_STEPS = 32  # the first full one of so many goes up with all hook fires
Packed = NodeStep | Step  # of a single rank, a step that is too large when packed: it fitted into a frame as it was


class NodeStepPacker:
    """Takes the steps of a node's ranks, and gives them back packed.

    Args:
        node: The node's number.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._open: dict[int, dict[int, Step]] = {}  # by number and rank
        self._since: dict[int, int] = {}  # when `flush` first saw an open step
        self._newest: dict[int, int] = {}  # per rank, its newest open step
        self._waits_for: set[int] = set()
        self._packed = -1  # the newest step that has gone up
        self._whole = -1  # the newest block of steps of which one has gone up with all hook fires

    def take_step(self, step: Step) -> list[Packed]:
        """Takes a rank's next step. Returns what can go up now, oldest first."""
        self._waits_for.add(step.rank)
        found: list[Packed] = []
        if step.step <= self._newest.get(step.rank, -1):  # it counts from the start again
            found = self.rest()
            self._packed = -1
        if step.step <= self._packed:  # too late to wait for others
            return [*found, *_packed(self._node, [step], None)]
        ranks = self._open.setdefault(step.step, {})
        ranks[step.rank] = step
        self._newest[step.rank] = step.step
        if ranks.keys() >= self._waits_for:
            return found + self._up_to(step.step)
        if len(self._open) > HOLD_STEPS:
            found += self._up_to(min(self._open))
        return found

    def leave(self, rank: int) -> list[Packed]:
        """Takes a rank's end: nothing waits for it any longer."""
        self._waits_for.discard(rank)
        return self._complete()

    def flush(self, now_ns: int) -> list[Packed]:
        """Returns what has waited for long enough, oldest first. To be called several times a second.

        Args:
            now_ns: Of any clock that does not go back.
        """
        waited = [number for number in self._open if now_ns - self._since.setdefault(number, now_ns) >= HOLD_NS]
        if not waited:
            return []
        self._waits_for &= self._open[max(waited)].keys()
        return self._up_to(max(waited)) + self._complete()

    def rest(self) -> list[Packed]:
        """Returns all steps that are held, packed, oldest first."""
        return self._up_to(max(self._open, default=-1))

    # -- inside ----------------------------------------------------------------------------------------------

    def _complete(self) -> list[Packed]:
        complete = (number for number, ranks in self._open.items() if ranks.keys() >= self._waits_for)
        return self._up_to(max(complete, default=-1))

    def _up_to(self, newest: int) -> list[Packed]:
        """Packs the open steps up to this one. A rank that has sent it will send none before it."""
        found: list[Packed] = []
        for number in sorted(number for number in self._open if number <= newest):
            ranks = self._open.pop(number)
            self._since.pop(number, None)
            self._packed = max(self._packed, number)
            steps = [ranks[rank] for rank in sorted(ranks)]
            found += _packed(self._node, steps, self._hook_ranks(steps))
        self._newest = {rank: number for rank, number in self._newest.items() if number in self._open}
        return found

    def _hook_ranks(self, steps: Sequence[Step]) -> set[int] | None:
        """Returns the ranks whose hook fires go up; None for all.

        Of most steps, the one that launched its last bucket last: others wait for it. Of one full step in so many,
        all: the same one on every node, as the choice depends on numbers alone.
        """
        block = steps[0].step // WHOLE_STEPS
        if steps[0].status == FULL and block != self._whole:
            self._whole = block
            return None
        return {max(steps, key=lambda step: step.start_ns + max(step.comm_launch, default=0)).rank}


def _packed(node: int, steps: Sequence[Step], hooks: Collection[int] | None) -> Iterator[Packed]:
    """Yields one message; halves of it, if the ranks are too large for one."""
    try:
        yield pack(node, steps, hooks)
    except FrameError:
        if len(steps) == 1:
            yield steps[0]
            return
        for half in (steps[: len(steps) // 2], steps[len(steps) // 2 :]):
            yield from _packed(node, half, hooks)
