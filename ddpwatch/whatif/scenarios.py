"""The changes that can be asked about: what each one does to buckets, wire and ranks, and the code that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from ddpwatch.errors import UsageError
from ddpwatch.whatif.assignment import (
    DEFAULT_CAP_BYTES,
    MIB,
    BucketCaps,
    Buckets,
    Parameter,
    initial,
    limits_of,
    rebuilt,
)
from ddpwatch.whatif.cost import hops_of, ring_bytes
from ddpwatch.whatif.model import Physics
from ddpwatch.whatif.recorded import Recorded

LEAST_COMPRESSION = 2  # PowerSGD leaves a matrix alone that it would not make this much smaller
FLOAT32_BYTES = 4
UNKNOWN_LINK = 0.3  # standard error of the link's share from which on what a slower link costs is a guess
MOST_CAP_MIB = 1 << 20
SWEEP = "measure with torchrun --nproc-per-node=RANKS -m ddpwatch.whatif.sweep -o wire.json, then add --wire wire.json"


@dataclass(frozen=True)
class Change:
    """What would be different. The defaults change nothing.

    Attributes:
        cap_mib, first_mib: The bucket cap, and that of the first bucket.
        hook: ``fp16``, ``bf16`` or ``powersgd-R``.
        link: How many times faster the network is.
        perfect: Collectives take no time.
        without_lateness_of: This rank is as fast as the others.
        no_input: No rank waits for data.
        world: Number of ranks.
        accumulate: Batches per reduction.
        bucket_view, static_graph: DDP's options.
    """

    cap_mib: float | None = None
    first_mib: float | None = None
    hook: str = ""
    link: float = 1.0
    perfect: bool = False
    without_lateness_of: int | None = None
    no_input: bool = False
    world: int | None = None
    accumulate: int = 1
    bucket_view: bool = False
    static_graph: bool = False

    def __or__(self, other: Change) -> Change:
        """Returns both at once."""
        default = Change()
        theirs = {f.name: getattr(other, f.name) for f in fields(self)}
        return replace(self, **{name: value for name, value in theirs.items() if value != getattr(default, name)})

    @property
    def moves_buckets(self) -> bool:
        """Whether gradients travel in other buckets."""
        return self.cap_mib is not None or self.first_mib is not None or self.static_graph

    @property
    def kind(self) -> str:
        """Returns what it changes: code (``cap``, ``hook``, ``option``), a ``fault``, or ``other``; or ``bound``."""
        if self.perfect:
            return "bound"
        if self.link != 1 or self.world is not None or self.accumulate > 1:
            return "other"
        if self.no_input or self.without_lateness_of is not None:
            return "fault"
        if self.hook and not self.moves_buckets:
            return "hook"
        return "option" if self.cap_mib is None and self.first_mib is None else "cap"

    @property
    def powersgd_rank(self) -> int:
        """The rank of PowerSGD, 0 without it."""
        return int(self.hook.removeprefix("powersgd-")) if self.hook.startswith("powersgd-") else 0


class Plan(NamedTuple):
    """A change in numbers.

    Attributes:
        buckets: The units of each bucket, in launch order.
        sizes: Bytes of each bucket in memory.
        works: What its collectives take alone (ns), where the wire is as fast as usual.
        shares: Per bucket, which recorded buckets its bytes come from, and their shares.
        encode: Per bucket, what compute pays before the launch (ns).
        work_of: Per rank, the recorded one whose work it does, and how many steps later that one did it.
        copy: ns to copy a byte back.
        sharing: How fast each of two collectives is beside the other, as a share of its speed alone.
        change: The change itself.
    """

    buckets: Buckets
    sizes: list[int]
    works: list[float]
    shares: list[list[tuple[int, float]]]
    encode: list[float]
    work_of: list[tuple[int, int]]
    copy: float
    sharing: float
    change: Change


class Message(NamedTuple):
    """What a collective has to move, in bytes: over the link, and as gradients, for which the host needs its time."""

    sent: float
    held: float


def recorded_cap(recorded: Recorded) -> int:
    """Returns the job's ``bucket_cap_mb``, in bytes."""
    said = recorded.flags.get("bucket_cap_mb")
    return int(said * MIB) if isinstance(said, (int, float)) and 0 < said < MOST_CAP_MIB else DEFAULT_CAP_BYTES


def recorded_limits(recorded: Recorded) -> BucketCaps | None:
    """Returns the limits from which the recorded buckets follow.

    None if they follow from none that DDP has by itself.
    """
    cap = recorded_cap(recorded)
    for is_default in (True, False) if cap == DEFAULT_CAP_BYTES else (False,):
        limits = limits_of(cap, is_default)
        if recorded.by_parameter and _sorted(_assigned(recorded, limits, False)) == _sorted(recorded.buckets):
            return limits
    return None


def _sorted(buckets: Buckets) -> Buckets:
    return [sorted(bucket) for bucket in buckets]


def _assigned(recorded: Recorded, limits: BucketCaps, static_graph: bool) -> Buckets:
    """Returns DDP's buckets under these limits, as units."""
    if recorded.flag("find_unused_parameters") and not (static_graph or recorded.flag("static_graph")):
        registered = [recorded.units[unit] for unit in recorded.registered]
        return [[recorded.registered[i] for i in bucket] for bucket in initial(registered, limits)]
    return rebuilt(recorded.units, limits, range(len(recorded.units)))


def _buckets(recorded: Recorded, change: Change) -> Buckets:
    if not change.moves_buckets:
        return recorded.buckets
    if change.cap_mib is None:  # static_graph alone
        limits = recorded_limits(recorded) or BucketCaps(DEFAULT_CAP_BYTES, DEFAULT_CAP_BYTES)
    else:
        first = None if change.first_mib is None else int(change.first_mib * MIB)
        limits = limits_of(int(change.cap_mib * MIB), False, first)
    return _assigned(recorded, limits, change.static_graph)


def completed(recorded: Recorded, change: Change) -> Change:
    """Returns the change with the cap of all buckets, where it only gives that of the first: the job's own."""
    if change.first_mib is None or change.cap_mib is not None:
        return change
    return replace(change, cap_mib=recorded_cap(recorded) / MIB)


def plan(recorded: Recorded, physics: Physics, change: Change) -> Plan:
    """Returns what the change means for the recorded run."""
    change = completed(recorded, change)
    buckets = _buckets(recorded, change)
    sizes = [sum(recorded.units[unit].nbytes for unit in bucket) for bucket in buckets]
    collective = _collective(recorded, physics, change)
    encode, decode = _casts(recorded, physics, change)
    messages = [_messages([recorded.units[unit] for unit in bucket], change) for bucket in buckets]
    works = [
        0.0 if change.perfect else sum(map(collective, sent)) + decode * nbytes
        for sent, nbytes in zip(messages, sizes, strict=True)
    ]
    return Plan(
        buckets,
        sizes,
        works,
        _shares(recorded, buckets),
        [encode * nbytes for nbytes in sizes],
        _work_of(recorded, change),
        0.0 if change.bucket_view else physics.copy,
        _sharing(physics, change.link),
        change,
    )


def _sharing(physics: Physics, faster: float) -> float:
    """Returns how fast each of two collectives is beside the other on another link.

    Two share the link, but not all of what the hosts do: alone, one takes l + h, and two at once take 2 l + (1 + q) h.
    How far hosts do one after the other (q) follows from the recorded sharing.
    """
    link, sharing = physics.link.value, physics.sharing.value
    if faster == 1 or physics.workers == 1 or link >= 1:
        return sharing
    serial = min(1.0, max(0.0, (1 / sharing - 1 - link) / (1 - link)))
    share = link / faster / (link / faster + 1 - link)
    return 1 / (1 + share + (1 - share) * serial)


def _collective(recorded: Recorded, physics: Physics, change: Change) -> Callable[[Message], float]:
    """Returns what one collective takes, under another link and world size."""
    curve, n = physics.curve, len(recorded.ranks)
    link = physics.link.value if change.link < 1 else min(1.0, physics.link.value)
    world = change.world or n
    hops = hops_of(world, recorded.backend) / hops_of(n, recorded.backend)
    ring = ring_bytes(world) / ring_bytes(n)

    def time_of(message: Message) -> float:
        sent, held = (curve.work(nbytes) for nbytes in message)
        latency = min(sent, curve.hop_latency)
        hosts = sent if link > 1 else held  # collectives that seem faster than the link: hosts add nothing
        moved = (sent - latency) * link
        hidden = max(0.0, min(sent, physics.link_rate * message.sent) - moved)  # what seems to be latency or the host's
        return (
            latency * hops
            + (moved / change.link + (hosts - latency) * (1 - link)) * ring
            + hidden * (1 / change.link - 1)
        )

    return time_of


def _messages(units: Sequence[Parameter], change: Change) -> list[Message]:
    """Returns the collectives that a bucket needs."""
    nbytes = float(sum(unit.nbytes for unit in units))
    if change.powersgd_rank:
        return [Message(sent, sent) for sent in _power_sgd(units, change.powersgd_rank)]
    if change.hook:
        return [Message(float(sum(unit.nbytes * min(1.0, 2 / _item_bytes(unit)) for unit in units)), nbytes)]
    return [Message(nbytes, nbytes)]


def _item_bytes(unit: Parameter) -> int:
    digits = "".join(c for c in unit.kind.split(" ")[0].split("_")[0] if c.isdigit())
    return int(digits) // 8 if digits else FLOAT32_BYTES


def _power_sgd(units: Sequence[Parameter], rank: int) -> list[float]:
    """Returns what is sent: vectors and small matrices whole, then both factors of all others."""
    whole = left = right = 0.0
    for unit in units:
        elements = unit.nbytes / _item_bytes(unit)
        columns = elements / unit.rows if unit.rows else 0.0
        r = min(rank, unit.rows, columns)
        if not unit.rows or (unit.rows + columns) * r * LEAST_COMPRESSION >= elements:
            whole += unit.nbytes
        else:
            left += unit.rows * r * _item_bytes(unit)
            right += columns * r * _item_bytes(unit)
    return [nbytes for nbytes in (whole, left, right) if nbytes]


def _casts(recorded: Recorded, physics: Physics, change: Change) -> tuple[float, float]:
    """Returns the ns per byte that a hook costs compute before the launch, and the wire's thread after it.

    Of PowerSGD's products, compute pays for those before the first all-reduce, and for the others as far as they want
    the cores that it has.
    """
    if not change.hook:
        return 0.0, 0.0
    if change.powersgd_rank:
        cost = physics.thin.value * (physics.rank_one if change.powersgd_rank == 1 else 1.0)
        beside = cost * (1 - physics.thin_launch) * (1 - physics.contended)
        return cost - beside, beside
    cost = physics.cast.value * (physics.bf16 if change.hook == "bf16" else 1.0)
    return cost / 2, cost / 2


def _shares(recorded: Recorded, buckets: Buckets) -> list[list[tuple[int, float]]]:
    home = {unit: number for number, bucket in enumerate(recorded.buckets) for unit in bucket}
    found = []
    for bucket in buckets:
        held: dict[int, float] = {}
        for unit in bucket:
            held[home[unit]] = held.get(home[unit], 0.0) + recorded.units[unit].nbytes
        whole = sum(held.values()) or 1.0
        found.append([(number, nbytes / whole) for number, nbytes in held.items()])
    return found


def _work_of(recorded: Recorded, change: Change) -> list[tuple[int, int]]:
    """Takes further ranks for recorded ones in later steps, and a rank without its lateness for a usual one.

    The steps are as close as may be: on a machine that drifts, ranks of far apart steps would be unlike each other.
    """
    n = len(recorded.ranks)
    found = [(position % n, position // n) for position in range(change.world or n)]
    unused = found[-1][1] + 1
    if change.without_lateness_of is not None:
        replaced, donor = (
            recorded.ranks.index(change.without_lateness_of),
            usual_rank(recorded, change.without_lateness_of),
        )
        found = [(donor, later + unused) if rank == replaced else (rank, later) for rank, later in found]
    return found


def own_time(recorded: Recorded) -> dict[int, float]:
    """Returns per rank the mean of what it does itself in a step (ns): all but the wait for buckets."""
    return {
        number: sum(
            row.computed - row.start + row.end - row.synced for row in (step[position] for step in recorded.steps)
        )
        / len(recorded.steps)
        for position, number in enumerate(recorded.ranks)
    }


def usual_rank(recorded: Recorded, but: int) -> int:
    """Returns the position of the rank that is in the middle of the others."""
    own = {number: ns for number, ns in own_time(recorded).items() if number != but}
    return recorded.ranks.index(sorted(own, key=own.__getitem__)[(len(own) - 1) // 2])


def parse_hook(text: str) -> str:
    """Reads ``fp16``, ``bf16``, ``powersgd`` or ``powersgd-4`` as `Change.hook`.

    Raises:
        UsageError: The text is something else.
    """
    name, _, rank = text.strip().lower().partition("-")
    if name in ("fp16", "bf16") and not rank:
        return name
    if name == "powersgd" and (not rank or (rank.isdecimal() and 1 <= int(rank) <= 1024)):
        return f"powersgd-{int(rank or 1)}"
    raise UsageError(f"{text!r} is not a comm hook that what-if supports", "give fp16, bf16 or powersgd-2")


def refusal(recorded: Recorded, physics: Physics, change: Change) -> str:
    """Returns why the recording does not carry a prediction of this change; empty if it does."""
    if (change.moves_buckets or change.powersgd_rank) and not recorded.by_parameter:
        return recorded.why_not
    resized = change.moves_buckets or change.hook or change.link != 1 or change.world not in (None, len(recorded.ranks))
    if resized and recorded.comm_hook:
        return f"the job has a comm hook ({recorded.comm_hook}), and what that sends is not known"
    if resized and not physics.curve.bends:
        return f"only one bucket size was seen: latency and rate do not show; {SWEEP}"
    if change.link < 1 and physics.link.error > UNKNOWN_LINK:
        return f"how much of their time collectives spend on the link does not show; {SWEEP}"
    if change.static_graph and (not recorded.flag("find_unused_parameters") or recorded.flag("static_graph")):
        return "static_graph changes the buckets only beside find_unused_parameters=True"
    if change.static_graph and change.cap_mib is None and recorded_limits(recorded) is None:
        return "the buckets follow from no bucket_cap_mb, so those with static_graph are not known; give --cap as well"
    if change.bucket_view and recorded.flag("gradient_as_bucket_view"):
        return "gradient_as_bucket_view is set already"
    if change.no_input and any(rank.data is None for step in recorded.steps for rank in step):
        return "the wait for data is not known: no DataLoader was seen"
    if change.accumulate > 1 and recorded.micro_steps > 1:
        return f"the job accumulates over {recorded.micro_steps} batches already"
    if change.without_lateness_of is not None and change.without_lateness_of not in recorded.ranks:
        return f"there is no rank {change.without_lateness_of}"
    return ""
