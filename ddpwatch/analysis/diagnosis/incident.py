"""What a diagnosis consists of: incidents, and the accounts into which a run's time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "straggler",  # one rank is late in nearly every step
    "intermittent",  # one rank is late now and then
    "pause",  # a single stall, of one rank or of all
    "drift",  # a rank, or all of them, gets slower and slower
    "slow_input",  # the loop waits for data in nearly every step
    "exposed_comm",  # transfers that no compute hides
    "slow_link",  # transfers have become slower
    "slow_device",  # all ranks are slower from a step on, and their devices show why
    "slow_host",  # most ranks of one host are late
    "hang",  # a rank does not go on
    "death",  # a rank ended before it finished
    "not_reduced",  # the comm hook communicates nothing
    "layouts_differ",  # ranks of one group have different buckets
]
Severity = Literal["error", "warning", "info"]
ModuleBucket = tuple[int, int]  # a module's number, and the index of a bucket of it
AccountName = Literal["compute", "waiting", "jitter", "transfer", "exposed", "input", "pause", "startup", "other"]

LOST: tuple[AccountName, ...] = ("waiting", "jitter", "transfer", "exposed", "input", "pause")


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that costs time, or ends a run.

    Attributes:
        ranks: Whose doing it is, all of a host's if it is the host's; empty if it is no single rank's.
        phase: Where the time goes: one of the `ddpwatch.analysis.step.PHASES`, or ``gc``, ``checkpoint``,
            ``validation``, ``compilation``; empty if unknown.
        param: Id of the first parameter whose gradient is late; None outside the backward, or if not seen.
        module, bucket: Number of a module, and index of the bucket of it in question.
        device: A cause outside the job, such as ``host a: 31 % of CPU time stolen``; empty if none was seen.
        since_step, until_step: The first and the last step that it struck; None if it struck between steps.
        steps: How many steps it struck, as far as they were watched.
        struck: The newest of these, ascending, of one that strikes now and then without a period; else empty.
        period: Every how many steps it strikes, where that is regular.
        cost_ns: Rank-time lost to it: what all other ranks waited, or what all ranks spent.
        share: That, as a share of the rank-time of the run so far, with what ranks wait in a hang that lasts.
        gain: By how much a step would be shorter without it, as a share of the mean step while it lasts.
        open: Whether it still lasts, as far as one can see.
        message: One sentence, without the cost.
        evidence: Figures that it rests on, for JSON.
    """

    kind: Kind
    severity: Severity
    message: str
    ranks: tuple[int, ...] = ()
    phase: str = ""
    param: int | None = None
    module: int | None = None
    bucket: int | None = None
    device: str = ""
    since_step: int | None = None
    until_step: int | None = None
    steps: int = 0
    struck: tuple[int, ...] = ()
    period: int | None = None
    cost_ns: int = 0
    share: float | None = None
    gain: float | None = None
    open: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Account:
    """Where rank-time went.

    Attributes:
        name: ``compute``; ``waiting`` for one rank that is to blame, ``jitter`` (waiting for whichever rank was last),
            ``transfer`` (exposed, with all ranks there), ``exposed`` (not known which of these), ``input``, ``pause``,
            ``startup`` (warm-up steps), ``other``.
        rank: Who was waited for; None in all other accounts.
        phase: The phase that it was spent in; for ``waiting``, the phase in which that rank was slow.
    """

    name: AccountName
    rank: int | None
    phase: str
    ns: int


@dataclass(frozen=True, slots=True)
class LostTime:
    """The rank-time of a run, split into accounts without remainder.

    Attributes:
        rank_ns: From each rank's first step to the end of its last one, added up.
        accounts: Largest first; they add up to ``rank_ns``.
        watched: The share of the time that was split by its own stamps. Unwatched steps are split like watched ones.
        ranks: Of how many ranks.
    """

    rank_ns: int = 0
    accounts: tuple[Account, ...] = ()
    watched: float | None = None
    ranks: int = 0
