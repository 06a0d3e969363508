"""The process groups of a run: which ranks are in them, and what else they do than to reduce gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import NamedTuple

from ddpwatch.sampling.levels import is_counted
from ddpwatch.wire.messages import DEFAULT_GROUP, OWN_COLLECTIVES, SAME_SAMPLES, Group, Hello, Message, Step

Members = Callable[[int], "tuple[int, ...] | None"]  # of a group, in ascending order; None if they are not known
KEEP_GROUPS = 65_536  # a job of 1,024 ranks has some thousands
# What groups are called in short, by `Group.kind`: those of DDP and FSDP2, and the group of all ranks
_SHORT = {"data parallel": "dp", "sharding": "shard", "replication": "replicate", "all ranks": "world"}
_PLAIN = ("world", "own")  # they say nothing of what is parallel
_OUTERMOST = ("pp", "replicate", "dp", "shard", "cp", "ep", "tp")  # as meshes mostly have them


class Role(NamedTuple):
    """What a process group is for, and how many ranks it has: groups that do the same on other ranks share it.

    Attributes:
        name: "dp", "shard", "replicate", "world", the name of a mesh's dimension ("tp", "pp", "ep", …), or what the job
            calls it; "own" where it does not; empty if nothing is known.
        size: 0 if that is not known.
    """

    name: str = ""
    size: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.size}" if self.name and self.size else self.name


RoleOf = Callable[[int], Role]
NO_ROLE = Role()


def no_role(group: int) -> Role:
    """Returns the role of a group, where no rank has said any."""
    return NO_ROLE


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
        self._roles: dict[int, Role] = {}

    def apply_message(self, message: Message) -> None:
        """Takes a hello or a group; ignores all else."""
        if isinstance(message, Hello):
            if message.world_size > self.world_size:
                self.world_size = message.world_size
                self._members.pop(DEFAULT_GROUP, None)
                self._roles.pop(DEFAULT_GROUP, None)
        elif isinstance(message, Group):
            if message.id in self._known or len(self._known) < KEEP_GROUPS:
                self._known[message.id] = message
                self._members.pop(message.id, None)
                self._roles.pop(message.id, None)
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

    def role(self, group: int) -> Role:
        """Returns what a group is for."""
        found = self._roles.get(group)
        if found is None:
            known = self._known.get(group)
            kind = "" if known is None else known.kind
            found = self._roles[group] = Role(_SHORT.get(kind, kind), len(self.members(group) or ()))
        return found

    def parallelism(self) -> str:
        """Says how the job is parallel: "dp 2 × tp 2", as far as its groups say so; empty where they say nothing."""
        roles = {role for group in self._known.values() if (role := self.role(group.id)).size > 1}
        named: list[Role] = []
        for role in sorted((role for role in roles if role.name not in _PLAIN), key=outermost):
            if role.name in _OUTERMOST or not self._is_made_of(role, named):
                named.append(role)
        if not named:
            several = {tuple(group.ranks) for group in self._known.values() if len(group.ranks) > 1}
            return f"{len(several)} groups" if len(several) > 1 else ""
        if len(named) == 1 and named[0].size == self.world_size and named[0].name in _SHORT.values():
            return ""  # plain DDP or FSDP2
        return (" × " if prod(role.size for role in named) == self.world_size else ", ").join(map(str, named))

    def _is_made_of(self, role: Role, others: Iterable[Role]) -> bool:
        """Returns whether others say all that a role does: a mesh has "dp_cp" beside its dimensions "dp" and "cp"."""
        by_role: dict[Role, list[frozenset[int]]] = {}
        for group in self._known.values():
            by_role.setdefault(self.role(group.id), []).append(frozenset(group.ranks))
        whole = by_role[role][0]
        return prod(other.size for other in others if any(part <= whole for part in by_role[other])) == len(whole)

    def replicas(self, ranks: Iterable[int]) -> dict[int, int]:
        """Returns the lowest of the ranks that train on the same samples, for each rank."""
        lowest = {rank: rank for rank in ranks}
        parts = [group.ranks for group in self._known.values() if self.role(group.id).name in SAME_SAMPLES]
        for _ in SAME_SAMPLES:
            for members in parts:
                first = min(lowest.get(rank, rank) for rank in members)
                lowest |= {rank: min(lowest[rank], first) for rank in members if rank in lowest}
        return lowest

    def with_stage_of(self, rank: int) -> set[int]:
        """Returns the ranks that have the same stage of a pipeline, and the rank; empty if it has none."""
        known = (group for group in self._known.values() if self.role(group.id).name == "pp")
        pipelines = [list(group.ranks) for group in known if len(group.ranks) > 1]
        place = next((ranks.index(rank) for ranks in pipelines if rank in ranks), None)
        return set() if place is None else {ranks[place] for ranks in pipelines if place < len(ranks)}

    def known(self) -> list[Group]:
        """Returns the groups that were reported, by id."""
        return [group for _, group in sorted(self._known.items())]


def outermost(role: Role) -> tuple[int, Role]:
    """Returns what sorts roles as a mesh has its dimensions: those between hosts first."""
    place = _OUTERMOST.index(role.name) if role.name in _OUTERMOST else len(_OUTERMOST)
    return place, role


def numbered_groups(step: Step) -> list[int]:
    """Returns the group of each collective by whose numbers steps are matched.

    These are DDP's or FSDP2's; where there is none, the job's own.
    """
    groups = step.comm_group or [DEFAULT_GROUP] * len(step.comm_module)
    if OWN_COLLECTIVES not in step.comm_module:
        return groups
    rows = zip(groups, step.comm_module, strict=True)
    return [group for group, module in rows if module != OWN_COLLECTIVES] or groups


class OtherCollectives:
    """Counts the collectives on watched groups that are not the modules' own: sequence numbers that nobody reported.

    These are SyncBatchNorm's, broadcasts of buffers, metrics, or which parameters were used. They are not timed.
    """

    def __init__(self) -> None:
        # Of each rank's newest step, if it counts and is known to have one: number, first collective, groups of all
        self._newest: dict[int, tuple[int, int, list[int]]] = {}
        self._counts: dict[int, list[int]] = {}  # others and steps, by group

    def add_step(self, step: Step) -> None:
        """Takes one rank's next step. Pairs of successive steps count that have collectives in one group only."""
        before, first = self._newest.pop(step.rank, None), step.comm_first_seq
        if first is None:
            return
        groups = numbered_groups(step)
        if is_counted(step.status):
            self._newest[step.rank] = step.step, first, groups
        if before is None:
            return
        number, first_before, known = before
        if step.step != number + 1 or len(every := {*known, *groups}) > 1:
            return
        others = first - first_before - len(known)
        counts = self._counts.setdefault(next(iter(every), DEFAULT_GROUP), [0, 0])
        counts[0] += max(0, others)
        counts[1] += 1

    def per_step(self, group: int) -> float | None:
        """Returns how many there were per step, on average; None if that is not known."""
        others, steps = self._counts.get(group, (0, 0))
        return others / steps if steps else None
