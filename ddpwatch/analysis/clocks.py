"""Puts the clocks of several hosts onto one time line: each clock's offset is an interval, never a bare number.

The evidence is causality: no collective is done on any rank before its last rank has launched it. So for two clocks,
each collective that both took part in bounds their offset from both sides. The interval is about as wide as the
shortest times from launch to done on either clock together; waiting for a rank that is late every time is part of that.

Where a node's agent pings the root, each exchange bounds the offset, too: what was sent was received later, and the
answer returned later still. That interval is as wide as the way there and back, and knows nothing of collectives. So a
host that is late in every step can be distinguished from a clock that is ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

from ddpwatch.analysis.clock_offset import Bound, ClockOffset, at_least, at_most
from ddpwatch.analysis.step import BucketKey, bucket_keys
from ddpwatch.sampling.levels import is_timed
from ddpwatch.wire.messages import ClockExchange, Hello, Step

Clock = tuple[str, str]
_Collective = tuple[BucketKey, "int | None"]  # with its sequence number, where the group counts


class Shift(NamedTuple):
    """What puts a clock's stamps of one step onto a common time line.

    Attributes:
        clock: The clock.
        root: The clock whose time line it is.
        offset: To be added to the stamps (ns).
        error: How far that may be off (ns).
    """

    clock: Clock
    root: Clock
    offset: int
    error: int


def clock_of(hello: Hello) -> Clock:
    """Returns the clock that a rank stamps with, named by the boot of its host and the time namespace."""
    return hello.boot_id or hello.host, hello.time_ns


class ClockDomains:
    """The clocks of a run's ranks, and what is known of the offsets between them.

    Attributes:
        several: Whether there is more than one clock.
    """

    def __init__(self) -> None:
        self.several = False
        self._clocks: dict[int, Clock] = {}
        self._lowest: dict[Clock, int] = {}  # rank
        self._offsets: dict[tuple[Clock, Clock], ClockOffset] = {}

    def meet(self, hello: Hello) -> None:
        """Notes a rank's clock; what is known of a clock that no rank has any longer is dropped."""
        clock, before = clock_of(hello), self._clocks.get(hello.rank)
        if clock == before:
            return
        self._clocks[hello.rank] = clock
        if before is None:
            self._lowest[clock] = min(hello.rank, self._lowest.get(clock, hello.rank))
        else:
            self._lowest = {known: rank for rank, known in sorted(self._clocks.items(), reverse=True)}
            pairs = self._offsets.items()
            self._offsets = {pair: offset for pair, offset in pairs if self._lowest.keys() >= set(pair)}
        self.several = len(self._lowest) > 1

    @property
    def ranks(self) -> int:
        """How many ranks have named their clock."""
        return len(self._clocks)

    def offset(self, clock: Clock, other: Clock) -> ClockOffset:
        """Returns what to add to a clock's times to get the other's, to be asked or to be bounded further."""
        return self._offsets.setdefault((clock, other), ClockOffset())

    def exchange(self, ping: ClockExchange) -> None:
        """Takes a ping between a node and the root."""
        node, root = (ping.node_boot_id, ping.node_time_ns), (ping.root_boot_id, ping.root_time_ns)
        if node == root or ping.returned_ns - ping.sent_ns < ping.replied_ns - ping.received_ns:
            return
        there = at_most(ping.sent_ns, ping.received_ns - ping.sent_ns)
        back = at_least(ping.returned_ns, ping.replied_ns - ping.returned_ns)
        self.offset(node, root).add_bounds(there, back)

    def observe(self, steps: Mapping[int, Step]) -> None:
        """Takes the collectives of one step, given by rank."""
        if not self.several:
            return
        tightest: dict[tuple[Clock, Clock], tuple[Bound, Bound]] = {}
        for stamps in self._stamps(steps).values():
            other = min(stamps, key=self._lowest.__getitem__)
            launched, done = stamps.pop(other)
            for clock, (last_launch, first_done) in stamps.items():
                low, high = at_least(first_done, launched - first_done), at_most(last_launch, done - last_launch)
                before = tightest.get((clock, other), (low, high))
                tightest[clock, other] = max(before[0], low, key=_value), min(before[1], high, key=_value)
        for pair, bounds in tightest.items():
            self.offset(*pair).add_bounds(*bounds)

    def shifts(self, steps: Mapping[int, Step]) -> dict[int, Shift]:
        """Returns per rank of a step what puts it onto a common time line, as far as is known by now.

        That of the lowest rank's clock, where a chain of bounded offsets leads there. Other clocks share time lines
        among themselves. Ranks without a hello are left out.
        """
        spans: dict[Clock, tuple[int, int]] = {}
        for rank, step in steps.items():
            if (clock := self._clocks.get(rank)) is not None:
                start, end = step.start_ns, step.start_ns + step.duration_ns
                first, last = spans.get(clock, (start, end))
                spans[clock] = min(first, start), max(last, end)
        nearer = self._nearer()
        found = {clock: self._shift(clock, span, nearer) for clock, span in spans.items()}
        return {rank: found[self._clocks[rank]] for rank in steps if rank in self._clocks}

    # -- inside ----------------------------------------------------------------------------------------------

    def _stamps(self, steps: Mapping[int, Step]) -> dict[_Collective, dict[Clock, tuple[int, int]]]:
        """Returns per collective the last launch and the first done on each clock."""
        found: defaultdict[_Collective, dict[Clock, tuple[int, int]]] = defaultdict(dict)
        for rank, step in steps.items():
            if (clock := self._clocks.get(rank)) is not None:
                for collective, launch, done in _collectives(step):
                    stamps = found[collective]
                    last, first = stamps.get(clock, (launch, done))
                    stamps[clock] = max(last, launch), min(first, done)
        return found

    def _nearer(self) -> dict[Clock, Clock | None]:
        """Returns the way to the time line's clock: each clock's next one, None where it is that clock."""
        neighbours: defaultdict[Clock, list[Clock]] = defaultdict(list)
        for (clock, other), offset in self._offsets.items():
            if offset.bounded:
                neighbours[clock].append(other)
                neighbours[other].append(clock)
        nearer: dict[Clock, Clock | None] = {}
        for root in sorted(self._lowest, key=self._lowest.__getitem__):
            queue = [] if root in nearer else [root]
            nearer.setdefault(root, None)
            for clock in queue:
                found = [other for other in neighbours[clock] if other not in nearer]
                nearer.update(zip(found, repeat(clock)))
                queue += found
        return nearer

    def _shift(self, clock: Clock, span: tuple[int, int], nearer: Mapping[Clock, Clock | None]) -> Shift:
        start, end = span
        low = high = 0
        root = clock
        while (following := nearer[root]) is not None:
            least, most = self._bounds(root, following, start + low, end + high)
            low, high, root = low + least, high + most, following
        offset = (low + high) // 2
        return Shift(clock, root, offset, high - offset)

    def _bounds(self, clock: Clock, other: Clock, start: int, end: int) -> tuple[int, int]:
        """Bounds of the offset from a clock to a neighbour within [start, end] of that clock."""
        known = self._offsets.get((clock, other))
        if known is not None and known.bounded:
            return known.between(start, end)
        backwards = self._offsets[other, clock]
        low, high = backwards.newest
        low, high = backwards.between(start - high, end - low)
        return -high, -low


_value = attrgetter("value")


def _collectives(step: Step) -> Iterator[tuple[_Collective, int, int]]:
    """Yields the collectives with a measured completion, the earliest possible launch and the latest possible done."""
    if not step.reduced or not is_timed(step.status):
        return
    error, first = step.clock_error_ns or 0, step.comm_first_seq
    seqs = repeat(None) if first is None or not step.comm_seq else (first + offset for offset in step.comm_seq)
    for key, seq, launch, done in zip(bucket_keys(step), seqs, step.comm_launch, step.comm_done, strict=False):
        if done is not None:
            yield (key, seq), step.start_ns + launch - error, step.start_ns + done + error
