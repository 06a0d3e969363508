"""What the collector knows and keeps. No socket, no clock, no process: the service feeds it.

All that is kept counts against one limit, `KEEP_BYTES`. Ranks share it evenly: when it is reached, only ranks that use
more than their share lose frames, the oldest first. So a hostile sender costs nobody but the rank that it claims to be.
A node's steps stay packed. They count against a share of the node's own, as large as those of its ranks together.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import cast

from msgspec.structs import replace

from ddpwatch.analysis.device_samples import DeviceSamples
from ddpwatch.analysis.retention import KEEP_MARKS, KEEP_SAMPLES, KEEP_STEPS
from ddpwatch.analysis.step import STALL_NS
from ddpwatch.collector.nodes import not_its_to_send
from ddpwatch.wire.messages import (
    RANK_MESSAGES,
    Beat,
    Bye,
    ClockExchange,
    Device,
    EndReason,
    FrameError,
    Group,
    Hello,
    Layout,
    Mark,
    Message,
    Node,
    NodeStep,
    RankSample,
    Stack,
    Status,
    Step,
    decode,
)  # fmt: skip
from ddpwatch.wire.transport import RESTART_BITS, Envelope, Frame

KEEP_RANK_MARKS = 16  # per rank at least
KEEP_ALL_SAMPLES = 16_384  # of all ranks
KEEP_EXCHANGES = 128  # per node: up to two every 2 s, for the two minutes over which offsets are fitted
KEEP_STILL = 16  # heartbeats and stacks per rank of steps that stood still: they show for whom the others waited
KEEP_LAYOUTS = 4  # per rank and module
KEEP_RANK_LAYOUTS = 256  # per rank
KEEP_BYTES = 64 * 1024 * 1024
KEEP_DEVICE_BYTES = 20 * 1024 * 1024  # of samples of devices: two each of the GPUs and hosts of 8,192 ranks
OVERHEAD_BYTES = 200  # of an envelope and its frame, as Python objects
_RANK = b"\xa4rank"  # a msgpack key; the sizes of the numbers that follow it, by their first byte
_INT_SIZES = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}


@dataclass(slots=True)
class SharedBody:
    """A layout's frame from behind the rank on, and how many ranks keep it."""

    content: bytes
    users: int = 0


@dataclass(frozen=True, slots=True)
class KeptLayout:
    """One rank's layout of a module: the frame's head up to the rank, and the body that it shares with equal ones."""

    module: int
    seq: int
    received_ns: int
    head: bytes
    key: bytes
    body: SharedBody

    def envelope(self) -> Envelope:
        """Returns the frame as it was sent."""
        return Envelope(self.seq, self.received_ns, self.head + self.body.content)


@dataclass(slots=True)
class RankEntry:
    """One rank as the collector sees it. Of a node: its steps, its clock exchanges among the samples, and its `Node`.

    Attributes:
        newest: Its newest hello, heartbeat and goodbye, and each of its groups, by type and the group's id.
        layouts: Its newest layouts.
        still: Older stacks; older heartbeats of a step that took long, or had several; and the one before the newest.
        step: That of its newest heartbeat.
        stood: Whether the one before was of the same step, or this step took long.
        passing: The heartbeat before the newest, with its step, if nothing shows yet that this took long.
        ended: When (by this host's wall clock) and why it ended.
        seen_ns: Receive time of its newest frame (ns since the Unix epoch).
        nbytes: Size of all but the layouts' bodies.
        shares: How many ranks' share of the memory it has.
    """

    newest: dict[tuple[type[Message], int], Envelope] = field(default_factory=dict)
    steps: deque[Envelope] = field(default_factory=deque)
    marks: deque[Envelope] = field(default_factory=deque)
    samples: deque[Envelope] = field(default_factory=deque)
    layouts: deque[KeptLayout] = field(default_factory=deque)
    still: deque[Envelope] = field(default_factory=deque)
    step: int | None = None
    stood: bool = False
    passing: tuple[int | None, Envelope] | None = None
    ended: tuple[int, EndReason] | None = None
    seen_ns: int = 0
    nbytes: int = 0
    shares: int = 0

    @property
    def last_beat(self) -> Beat | None:
        """Its newest heartbeat; None without one."""
        envelope = self.newest.get((Beat, 0))
        return None if envelope is None else cast("Beat", decode(envelope.frame))


class Hub:
    """Validates, numbers and keeps frames; supplies the snapshot for a viewer that attaches late.

    Args:
        world_size: How many ranks the job has; frames of others are refused. None: any.
        restarts: How many collectors of this run have died.
        clock: Boot id and time namespace of this collector, which other nodes' clocks are measured against.

    Attributes:
        ranks: Every rank that has sent a frame.
        refused: Count of refused frames by reason.
        frames, bytes: Accepted from ranks so far.
    """

    def __init__(self, world_size: int | None = None, restarts: int = 0, clock: tuple[str, str] = ("root", "")) -> None:
        self.ranks: dict[int, RankEntry] = {}
        self.refused: Counter[str] = Counter()
        self.frames = 0
        self.bytes = 0
        self._world_size = world_size
        self._clock = clock
        self._seq = restarts << RESTART_BITS
        self._kept_bytes = 0
        self._own_bytes = 0  # of that, the collector's own messages
        self._devices: DeviceSamples[Envelope] = DeviceSamples(KEEP_DEVICE_BYTES, size_of)
        self._bodies: dict[bytes, SharedBody] = {}  # of layouts
        self._own: dict[type[Message], Envelope] = {}  # the newest status, and the run's end
        self._nodes: dict[int, RankEntry] = {}
        self._shares = 0  # of all ranks and nodes

    def accept(self, parts: list[bytes], now_ns: int) -> Frame | None:
        """Validates and keeps what a rank sent; None if it was refused, which is counted."""
        if len(parts) != 1:
            self.refused["multipart"] += 1
            return None
        try:
            message = decode(parts[0])
        except FrameError as error:
            self.refused[error.reason] += 1
            return None
        if not isinstance(message, RANK_MESSAGES) or (isinstance(message, Bye) and message.by != "rank"):
            self.refused["not a rank's to send"] += 1
            return None
        if self._world_size is not None and message.rank is not None and message.rank >= self._world_size:
            self.refused["foreign rank"] += 1
            return None
        self.frames += 1
        self.bytes += len(parts[0])
        return message, self.keep(message, parts[0], now_ns)

    def accept_from_node(self, frame: bytes, node: int, ranks: Collection[int], now_ns: int) -> Frame | None:
        """Does as `accept`, for a frame from a node's agent. Refuses what is about other nodes, ranks or clocks."""
        try:
            message = decode(frame)
        except FrameError as error:
            self.refused[error.reason] += 1
            return None
        reason = not_its_to_send(message, node, ranks)
        if not reason and isinstance(message, ClockExchange) and not self._is_of_own_clock(message, ranks):
            reason = "foreign clock"
        if reason:
            self.refused[reason] += 1
            return None
        self.frames += 1
        self.bytes += len(frame)
        return message, self.keep(message, frame, now_ns)

    def keep(self, message: Message, frame: bytes, now_ns: int) -> Envelope:
        """Numbers a frame and keeps it as long as the limits allow."""
        self._seq += 1
        envelope = Envelope(self._seq, now_ns, frame)
        if isinstance(message, Device):
            self._keep_device(message, envelope)
        elif isinstance(message, (NodeStep, ClockExchange, Node)):
            entry = self._keep_node(message, envelope)
            self._make_room(entry)
        elif isinstance(message, Status) or message.rank is None:
            self._count_own(size_of(envelope) - size_of(self._own.get(type(message))))
            self._own[type(message)] = envelope
        else:
            entry = self._rank(message.rank)
            if isinstance(message, RankSample):
                self._keep_sample(entry, envelope, min(KEEP_SAMPLES, KEEP_ALL_SAMPLES // len(self.ranks)))
            else:
                self._keep_rank(entry, message, envelope)
            self._make_room(entry)
        return envelope

    def placed(self, sample: RankSample) -> RankSample:
        """Returns a rank's sample with what its newest heartbeat says of that time."""
        entry = self.ranks.get(sample.rank)
        beat = None if entry is None else entry.last_beat
        return sample if beat is None else replace(sample, step=beat.step, memory_reserved=beat.memory_reserved)

    def snapshot(self) -> Iterator[Envelope]:
        """Yields everything kept, oldest first."""
        kept: list[Envelope | KeptLayout] = [*chain.from_iterable(self._devices.by_device.values())]
        for entry in (*self.ranks.values(), *self._nodes.values()):
            kept += [*entry.layouts, *entry.marks, *entry.samples, *entry.steps, *entry.still, *entry.newest.values()]
        kept += self._own.values()
        for each in sorted(kept, key=attrgetter("seq")):
            yield each if isinstance(each, Envelope) else each.envelope()

    @property
    def newest(self) -> int:
        """Sequence number of the newest frame."""
        return self._seq

    def silent_ranks(self, now_ns: int, silent_ns: int) -> list[int]:
        """Returns the ranks that have not ended and sent nothing for that long; the longest silence first."""
        silent = {rank: entry.seen_ns for rank, entry in self.ranks.items() if entry.ended is None}
        return sorted((rank for rank, seen in silent.items() if now_ns - seen > silent_ns), key=silent.__getitem__)

    @property
    def all_ended(self) -> bool:
        """Whether every known rank has ended."""
        return all(entry.ended is not None for entry in self.ranks.values())

    def end_reason(self) -> EndReason:
        """Returns why the run ended.

        The reason of the first rank that did not finish, since the others follow from it.
        """
        ends = [entry.ended for entry in self.ranks.values() if entry.ended is not None]
        if not ends:
            return "lost"
        failures = [end for end in ends if end[1] != "finished"]
        return min(failures)[1] if failures else "finished"

    def _is_of_own_clock(self, exchange: ClockExchange, ranks: Collection[int]) -> bool:
        """Returns whether it bounds a clock that a rank of the node has named in its hello, against the root's."""
        hellos = [self.ranks[rank].newest.get((Hello, 0)) for rank in ranks if rank in self.ranks]
        named = [cast("Hello", decode(hello.frame)) for hello in hellos if hello is not None]
        own = (exchange.node_boot_id, exchange.node_time_ns) in {(hello.boot_id, hello.time_ns) for hello in named}
        return own and (exchange.root_boot_id, exchange.root_time_ns) == self._clock

    # -- keeping ---------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> RankEntry:
        if (entry := self.ranks.get(rank)) is None:
            entry = self.ranks[rank] = RankEntry()
            self._give_shares(entry, 1)
        return entry

    def _give_shares(self, entry: RankEntry, shares: int) -> None:
        self._shares += shares - entry.shares
        entry.shares = shares

    def _count_own(self, nbytes: int) -> None:
        self._own_bytes += nbytes
        self._kept_bytes += nbytes

    def _count(self, entry: RankEntry, nbytes: int) -> None:
        entry.nbytes += nbytes
        self._kept_bytes += nbytes

    def _keep_device(self, device: Device, envelope: Envelope) -> None:
        before = self._devices.size
        self._devices.add_sample(device.key, envelope, envelope.received_ns)
        self._count_own(self._devices.size - before)

    def _keep_sample(self, entry: RankEntry, envelope: Envelope, limit: int) -> None:
        """Keeps a sample. It comes from a collector, so it is no sign of life."""
        entry.samples.append(envelope)
        self._count(entry, size_of(envelope))
        while len(entry.samples) > limit:
            self._count(entry, -size_of(entry.samples.popleft()))

    def _keep_step(self, entry: RankEntry, envelope: Envelope) -> None:
        entry.steps.append(envelope)
        self._count(entry, size_of(envelope))
        if len(entry.steps) > KEEP_STEPS:
            self._count(entry, -size_of(entry.steps.popleft()))

    def _keep_node(self, message: NodeStep | ClockExchange | Node, envelope: Envelope) -> RankEntry:
        entry = self._nodes.setdefault(message.node, RankEntry())
        if not entry.shares:
            self._give_shares(entry, 1)
        if isinstance(message, NodeStep):
            self._keep_step(entry, envelope)
            for rank in message.ranks:
                self._rank(rank).seen_ns = envelope.received_ns
                _note_length(self._rank(rank), message.step, message.longest_ns)
            if len(message.ranks) > entry.shares:
                self._give_shares(entry, len(message.ranks))
        elif isinstance(message, ClockExchange):
            self._keep_sample(entry, envelope, KEEP_EXCHANGES)
        else:
            self._keep_newest(entry, (Node, 0), envelope)
        return entry

    def _keep_newest(self, entry: RankEntry, key: tuple[type[Message], int], envelope: Envelope) -> None:
        self._count(entry, size_of(envelope) - size_of(entry.newest.get(key)))
        entry.newest[key] = envelope

    def _keep_rank(self, entry: RankEntry, message: Message, envelope: Envelope) -> None:
        entry.seen_ns = envelope.received_ns
        if isinstance(message, Layout):
            self._keep_layout(entry, message.module, envelope)
            return
        if isinstance(message, Step):
            self._keep_step(entry, envelope)
            _note_length(entry, message.step, message.duration_ns)
        elif isinstance(message, Mark):
            entry.marks.append(envelope)
            self._count(entry, size_of(envelope))
            while len(entry.marks) > max(KEEP_MARKS // len(self.ranks), KEEP_RANK_MARKS):
                self._count(entry, -size_of(entry.marks.popleft()))
        else:
            if isinstance(message, Beat):
                self._keep_beat(entry, message)
            elif isinstance(message, Stack):
                self._keep_still(entry, entry.newest.get((Stack, 0)))
            self._keep_newest(entry, (type(message), message.id if isinstance(message, Group) else 0), envelope)
            if isinstance(message, Bye):
                entry.ended = _ended_ns(entry, message, envelope), message.reason
            elif isinstance(message, Hello):
                entry.ended = None

    def _keep_beat(self, entry: RankEntry, beat: Beat) -> None:
        """Keeps the heartbeat before one of the same step, and the last of that step, or of one that took long.

        The one before the newest is kept until the next, as a node's steps come after the heartbeats that follow them.
        """
        if entry.passing is not None and (before := entry.passing[1]) in entry.still:
            entry.still.remove(before)
            self._count(entry, -size_of(before))
        older, stands = entry.newest.get((Beat, 0)), beat.step == entry.step
        self._keep_still(entry, older)
        entry.passing = None if older is None or stands or entry.stood else (entry.step, older)
        entry.step, entry.stood = beat.step, stands

    def _keep_still(self, entry: RankEntry, older: Envelope | None) -> None:
        if older is None:
            return
        entry.still.append(older)
        self._count(entry, size_of(older))
        if len(entry.still) > KEEP_STILL:
            self._count(entry, -size_of(entry.still.popleft()))

    def _keep_layout(self, entry: RankEntry, module: int, envelope: Envelope) -> None:
        """Keeps a layout; ranks of a job mostly have equal ones, which then share a body."""
        head, content = _split(envelope.frame)
        key = hashlib.blake2b(content, digest_size=16).digest()
        if key not in self._bodies:
            self._bodies[key] = SharedBody(content)
            self._kept_bytes += len(content)
        body = self._bodies[key]
        body.users += 1
        entry.layouts.append(KeptLayout(module, envelope.seq, envelope.received_ns, head, key, body))
        self._count(entry, len(head) + OVERHEAD_BYTES)
        of_module = [layout for layout in entry.layouts if layout.module == module]
        if len(of_module) > KEEP_LAYOUTS or len(entry.layouts) > KEEP_RANK_LAYOUTS:
            self._drop_layout(entry, of_module[0] if len(of_module) > KEEP_LAYOUTS else entry.layouts[0])

    def _drop_layout(self, entry: RankEntry, layout: KeptLayout) -> None:
        entry.layouts.remove(layout)
        self._count(entry, -len(layout.head) - OVERHEAD_BYTES)
        layout.body.users -= 1
        if not layout.body.users:
            self._kept_bytes -= len(layout.body.content)
            del self._bodies[layout.key]

    # -- limits ----------------------------------------------------------------------------------------------

    def _make_room(self, sender: RankEntry) -> None:
        """Drops frames of the sender if it uses more than its share, else of every rank that does."""
        if self._kept_bytes <= KEEP_BYTES:
            return
        share = max(KEEP_BYTES - self._own_bytes, 0) // max(self._shares, 1)
        while self._kept_bytes > KEEP_BYTES and self._used(sender) > share * sender.shares:
            self._drop(sender)
        if self._kept_bytes > KEEP_BYTES:  # rare: what this frees lasts for a while
            for entry in (*self.ranks.values(), *self._nodes.values()):
                while self._used(entry) > share * entry.shares:
                    self._drop(entry)

    def _used(self, entry: RankEntry) -> int:
        """Returns what a rank uses, with its part of the layouts that it shares."""
        bodies = (layout.body for layout in entry.layouts)
        return entry.nbytes + sum(-(-len(body.content) // body.users) for body in bodies)

    def _drop(self, entry: RankEntry) -> None:
        """Drops a rank's oldest step; without any, what is next in importance."""
        if entry.steps:
            self._count(entry, -size_of(entry.steps.popleft()))
        elif entry.marks:
            self._count(entry, -size_of(entry.marks.popleft()))
        elif entry.samples:
            self._count(entry, -size_of(entry.samples.popleft()))
        elif entry.still:
            self._count(entry, -size_of(entry.still.popleft()))
        elif entry.layouts:
            self._drop_layout(entry, entry.layouts[0])
        else:
            self._count(entry, -size_of(entry.newest.pop(next(iter(entry.newest)))))


def _note_length(entry: RankEntry, step: int, duration_ns: int) -> None:
    """Takes how long a step took: of one that took long, heartbeats show for whom the others waited."""
    if duration_ns >= STALL_NS:
        entry.stood = entry.stood or step == entry.step
        if entry.passing is not None and step == entry.passing[0]:
            entry.passing = None


def _ended_ns(entry: RankEntry, bye: Bye, envelope: Envelope) -> int:
    """Returns when a rank ended, by this host's wall clock: its newest heartbeat maps its own, maybe another host's.

    The receive time alone would put what follows from a death first: a death is sent some time after it was noticed.
    """
    beat, sent = entry.last_beat, entry.newest.get((Beat, 0))
    if beat is None or sent is None:
        return envelope.received_ns
    return min(sent.received_ns + bye.at_ns - beat.at_ns, envelope.received_ns)


def size_of(envelope: Envelope | None) -> int:
    """Returns what an envelope and its frame take in memory, in bytes."""
    return 0 if envelope is None else len(envelope.frame) + OVERHEAD_BYTES


def _split(frame: bytes) -> tuple[bytes, bytes]:
    """Splits a frame behind the rank; at its start if the rank is not where ddpwatch puts it."""
    at = frame.find(_RANK, 0, 32) + len(_RANK)
    if at < len(_RANK) or at >= len(frame):
        return b"", frame
    at += _INT_SIZES.get(frame[at], 1)
    return frame[:at], frame[at:]
