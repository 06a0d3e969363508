"""What a diagnosis consists of: incidents, and the accounts into which a run's time goes."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from ddpwatch.analysis.diagnosis.kinds import Kind
from ddpwatch.wire.messages import INTERRUPTED_LAUNCHER, BusyProcess, Bye

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")  # worst first
ModuleBucket = tuple[int, int]  # a module's number, and the index of a bucket of it
AccountName = Literal["compute", "waiting", "jitter", "transfer", "exposed", "input", "pause", "startup", "other"]

_EXIT_BY_SIGINT = f"exited with code {128 + signal.SIGINT}"  # as a shell reports it, and what handles it mostly does
_EXIT_BY_SIGTERM = f"exited with code {128 + signal.SIGTERM}"
_FAILED_COLLECTIVE = re.compile(  # what Gloo, NCCL and torch's watchdog say
    "timed? ?out|closed by peer|reset by peer|broken pipe|socket closed|communicator was aborted", re.IGNORECASE
)
LOST: tuple[AccountName, ...] = ("waiting", "jitter", "transfer", "exposed", "input", "pause")


class End(msgspec.Struct, frozen=True):
    """How a rank ended, as in its `Bye`."""

    reason: str
    detail: str
    signal: int | None
    step: int | None
    phase: str
    in_flight: Sequence[int]
    at_ns: int


def end_of(bye: Bye) -> End:
    """Returns what a rank's goodbye says."""
    return End(bye.reason, bye.detail, bye.signal, bye.step, bye.phase, list(bye.in_flight), bye.at_ns)


def is_by_ctrl_c(end: End | Bye) -> bool:
    """Returns whether somebody ended a rank by Ctrl-C (SIGINT), as far as that shows."""
    by_exception = end.reason == "exception" and end.detail.startswith(KeyboardInterrupt.__name__)
    by_signal = end.signal == signal.SIGINT or end.detail.endswith(INTERRUPTED_LAUNCHER)
    return by_exception or by_signal or end.detail.startswith(_EXIT_BY_SIGINT)


def is_by_launcher(end: End | Bye | None) -> bool:
    """Returns whether torchrun probably ended a rank by itself: once one has failed, it terminates the others.

    A rank that handles SIGTERM usually exits with the code by which a shell reports that signal.
    """
    if end is None or end.detail.endswith(INTERRUPTED_LAUNCHER):
        return False
    return end.signal == signal.SIGTERM or end.detail.startswith(_EXIT_BY_SIGTERM)


def collective_failed(end: End | Bye | None) -> bool:
    """Returns whether a rank probably ended because another one did, or did not come."""
    return end is not None and end.reason == "exception" and _FAILED_COLLECTIVE.search(end.detail) is not None


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a device did meanwhile, as far as that is the cause.

    Attributes:
        cause: Name of the signal (``ddpwatch.analysis.diagnosis.causes.device_signals``).
        host: Which one; empty if all are meant.
        value, before, peers: The signal meanwhile, before, and with the peers; None if that is not known.
        figures: All samples of the device, as means.
        process: Those of the rank's process.
        also: Other causes, as text.
        rank: The rank whose device it is, if only one of those in question has it.
        busy: The processes of the host that used most CPU time meanwhile, where cores are short.
    """

    cause: str
    host: str
    value: float
    before: float | None
    peers: float | None
    figures: Mapping[str, float]
    process: Mapping[str, float] | None = None
    also: Sequence[str] | None = None
    rank: int | None = None
    busy: Sequence[BusyProcess] | None = None


class DeniedTime(msgspec.Struct, frozen=True):
    """For how long a machine did not let the job run."""

    denied_ms: float


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks of a hang that are at the same place.

    Attributes:
        ranks: Ascending.
        site: The innermost call in the user's code.
        inner: The innermost function of all, if that is another; else empty.
        frames: The calls, innermost first.
    """

    ranks: Sequence[int]
    site: str
    inner: str
    frames: Sequence[str]


class MemoryFigures(msgspec.Struct, frozen=True):
    """The growth of a rank's memory.

    Attributes:
        of: ``host`` or ``gpu``.
        used_bytes: By the rank, at the end.
        step_bytes: By how much that grows in a step.
        left_bytes: What is left before the cgroup, the host or the GPU is full.
        steps_left: For how many steps that lasts, if it goes on; other ranks that grow there take their part.
    """

    of: str
    used_bytes: int
    step_bytes: float
    left_bytes: int
    steps_left: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures that an incident rests on, in the order of the JSON; None, and not there, what its kind does not rest on.

    Attributes:
        host: Of a slow host, and in ``late_ranks`` which of its ranks are late.
        late_ms: By how much the rank is late in a step; in ``excess_ms`` how much longer its phase takes.
        parts_ms: Of several phases that are longer, by how much each is.
        throughout: True if the backward is longer everywhere, and not from some parameter on.
        rest_after: After which phase the rest comes that makes it late.
        watched_steps: In how many steps that would have shown.
        step_ms: What a typical step took when it was found.
        group: The ranks that it is compared with.
        own_stage: True if these have other stages of its pipeline: then it may have more to do, and is no slow machine.
        why: Why ranks are blamed for a hang (`ddpwatch.analysis.diagnosis.hangs.blame.Why`), or ``mismatch``.
        issued: How many collectives ranks have issued.
        call_sites: Where in the user's code ranks are.
        stacks: Their calls, a group for ranks with the same; in ``no_stack`` why a rank has none.
        longest_ms: The longest pause.
        ranks: How many ranks the run has.
        unwatched: True if the pauses were in bare steps.
        beyond_tail: Whether the pause is longer than pauses of the run usually are.
        denied: Whether the machine did not let the job run for most of it.
        ends: How ranks ended, also those of a hang that Ctrl-C ended; in ``hung`` the ranks that held up the others
            before.
        steps: In how many steps nothing was reduced.
        share_of_step: What it takes of a step.
        bucket_place: Of the bucket that is exposed most: ``first``, ``middle``, ``last`` or ``only``.
        reductions: How often gradients are reduced per update.
        growth: By how much a step has become longer, as a share of the first ones.
        longer: By how much a step is longer, as a share of those before.
        stayed: True if steps stayed as long as that: it is usual from then on.
        slower: How many times as long transfers take.
        busbw_gbps: Their bus bandwidth, before and since; of exposed communication, only that of its bucket.
        memory: What of the memory grows, and how soon it is full.
        device: The cause outside the job.
    """

    host: str | None = None
    late_ranks: Sequence[int] | None = None
    late_ms: float | None = None
    excess_ms: float | None = None
    parts_ms: Mapping[str, float] | None = None
    throughout: bool | None = None
    rest_after: str | None = None
    watched_steps: int | None = None
    step_ms: float | None = None
    group: Sequence[int] | None = None
    own_stage: bool | None = None
    why: str | None = None
    issued: Mapping[int, int] | None = None
    call_sites: Mapping[int, str] | None = None
    stacks: Sequence[StackGroup] | None = None
    no_stack: Mapping[int, str] | None = None
    longest_ms: float | None = None
    ranks: int | None = None
    unwatched: bool | None = None
    beyond_tail: bool | None = None
    denied: bool | None = None
    ends: Mapping[int, End] | None = None
    hung: Sequence[int] | None = None
    steps: int | None = None
    share_of_step: float | None = None
    bucket_place: str | None = None
    reductions: int | None = None
    growth: float | None = None
    longer: float | None = None
    stayed: bool | None = None
    slower: float | None = None
    busbw_gbps: Sequence[float] | None = None
    memory: MemoryFigures | None = None
    device: DeviceFigures | DeniedTime | None = None

    def __or__(self, other: Evidence) -> Evidence:
        """Returns these figures and the other's, which win."""
        return msgspec.structs.replace(self, **other.known())

    def known(self) -> dict[str, object]:
        """Returns the figures that there are, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


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
        in_steps: Whether that is a part of steps; False of a hang whose step never ended, and of a death.
        found_ns: When a hang or a death showed (receive time in ns since the Unix epoch); None of all else.
        stuck_ns: Rank-time of a hang's own ranks, which are in no step either.
        share: That, as a share of the rank-time of the run so far, with what is in no step.
        gain: By how much a step would be shorter without it, as a share of the mean step while it lasts.
        open: Whether it still lasts, as far as one can see, or is `resting`.
        resting: Whether it is away at the moment, but has come back before, and not been away for long enough since.
        spells: First and last steps of each time that it came, if it came back.
        counts: Whether it lasts, or did a few steps ago, and costs enough to be the verdict
            (`ddpwatch.analysis.diagnosis.standing`); in ``foremost`` whether it is what the verdict was about.
        message: One sentence, without the cost.
        lasting: The same of one that lasts; empty if one that is over needs no other sentence for that.
        next_step: What to do about it.
        evidence: Figures that it rests on.
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
    in_steps: bool = True
    found_ns: int | None = None
    stuck_ns: int = 0
    share: float | None = None
    gain: float | None = None
    open: bool = False
    resting: bool = False
    spells: tuple[tuple[int, int], ...] = ()
    counts: bool = False
    foremost: bool = False
    lasting: str = ""
    next_step: str = ""
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def spells_or_one(self) -> tuple[tuple[int, int], ...]:
        """The same, also of one that came once; empty if it struck between steps."""
        if self.spells or self.since_step is None:
            return self.spells
        return ((self.since_step, self.since_step if self.until_step is None else self.until_step),)

    @property
    def occurrences(self) -> int:
        """How many times it came."""
        return max(len(self.spells), 1)


@dataclass(frozen=True, slots=True)
class Account:
    """Where rank-time went.

    Attributes:
        name: ``compute``; ``waiting`` for one rank that is to blame, ``jitter`` (waiting for a varying last rank),
            ``transfer`` (exposed, with all ranks there), ``exposed`` (not known which of these), ``input``, ``pause``,
            ``startup`` (warm-up steps), ``other``.
        rank: Who was waited for; None in all other accounts.
        phase: The phase that it was spent in; for ``waiting``, the phase in which that rank was slow, or ``pause``.
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
        between_steps_ns: What lies between steps and is no pause that a mark explains; a part of "other".
        watched: The share of the time that was split by its own stamps. Bare steps are split like watched ones.
        ranks: Of how many ranks.
        costly: Whether so much is lost that it is worth a word.
        much: Whether that word is a warning.
        next_step: What to do about most of it.
    """

    rank_ns: int = 0
    accounts: tuple[Account, ...] = ()
    between_steps_ns: int = 0
    watched: float | None = None
    ranks: int = 0
    costly: bool = False
    much: bool = False
    next_step: str = ""

    @property
    def share(self) -> float | None:
        """What the accounts of lost time add up to; None before the first step."""
        lost = sum(account.ns for account in self.accounts if account.name in LOST)
        return lost / self.rank_ns if self.rank_ns else None
