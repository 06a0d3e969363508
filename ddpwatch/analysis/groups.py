"""The process groups of a run: which ranks are in them, and what else they do than to reduce gradients."""

from __future__ import annotations

from collections.abc import Callable

from ddpwatch.sampling.levels import is_counted
from ddpwatch.wire.messages import DEFAULT_GROUP, Group, Hello, Message, Step

Members = Callable[[int], "tuple[int, ...] | None"]  # of a group, in ascending order; None if they are not known
KEEP_GROUPS = 65_536  # a job of 1,024 ranks has some thousands


class Groups:
    """What ranks have said about their process groups.

    Attributes:
        world_size: Ranks of the job; 0 while unknown.
    """

    def __init__(self) -> None:
        self.world_size = 0
        self._members: dict[int, tuple[int, ...]] = {}  # as `members` returned them last
        self._known: dict[int, Group] = {}
        self._of_rank: dict[int, tuple[int, ...]] = {}

    def apply_message(self, message: Message) -> None:
        """Takes a hello or a group; ignores all else."""
        if isinstance(message, Hello):
            if message.world_size > self.world_size:
                self.world_size = message.world_size
                self._members.pop(DEFAULT_GROUP, None)
        elif isinstance(message, Group):
            if message.id in self._known or len(self._known) < KEEP_GROUPS:
                self._known[message.id] = message
                self._members.pop(message.id, None)
            own = self._of_rank.get(message.rank, ())
            if message.id not in own and len(own) < KEEP_GROUPS:
                self._of_rank[message.rank] = tuple(sorted({*own, message.id}))

    def members(self, group: int) -> tuple[int, ...] | None:
        """Returns the global ranks of a group, in ascending order; None if they are not known."""
        found = self._members.get(group)
        if found is None:
            known = self._known.get(group)
            if known is not None and known.ranks:
                found = self._members[group] = tuple(known.ranks)
            elif group == DEFAULT_GROUP and self.world_size:
                found = self._members[group] = tuple(range(self.world_size))
        return found

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Returns the ids of the groups that a rank has reported, in ascending order; the default group without any."""
        return self._of_rank.get(rank, (DEFAULT_GROUP,))

    def known(self) -> list[Group]:
        """Returns the groups that were reported, by id."""
        return [group for _, group in sorted(self._known.items())]


class OtherCollectives:
    """Counts the collectives on watched groups that are not the modules' own: sequence numbers that nobody reported.

    These are SyncBatchNorm's, broadcasts of buffers, metrics, or which parameters were used. They are not timed.
    """

    def __init__(self) -> None:
        self._newest: dict[int, Step] = {}
        self._counts: dict[int, list[int]] = {}  # others and steps, by group

    def add_step(self, step: Step) -> None:
        """Takes one rank's next step. Pairs of successive steps count that have collectives in one group only."""
        before = self._newest.get(step.rank)
        self._newest[step.rank] = step
        if before is None or step.step != before.step + 1 or before.comm_first_seq is None:
            return
        groups = {*before.comm_group, *step.comm_group}
        if step.comm_first_seq is None or len(groups) > 1 or not is_counted(before.status):
            return
        others = step.comm_first_seq - before.comm_first_seq - len(before.comm_label)
        counts = self._counts.setdefault(next(iter(groups), DEFAULT_GROUP), [0, 0])
        counts[0] += max(0, others)
        counts[1] += 1

    def per_step(self, group: int) -> float | None:
        """Returns how many there were per step, on average; None if that is not known."""
        others, steps = self._counts.get(group, (0, 0))
        return others / steps if steps else None
