"""Gives ranks what viewers ask for: a budget as long as they look (`ddpwatch.sampling.lease`), and sampled stacks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from itertools import accumulate, islice

from msgspec import structs

from ddpwatch.collector.hub import RankEntry
from ddpwatch.run import blackbox, rundir
from ddpwatch.sampling.lease import LEAD_STEPS, LeasePage
from ddpwatch.sampling.stack_order import LEAD_NS, StackOrder
from ddpwatch.wire.messages import Hello, Step, decode

INTRODUCED_NS = 5_000_000_000  # then no longer is waited for ranks that have not said hello
RECENT_STEPS = 16  # by which the length of a step is judged
NODES_LEAD_NS = 500_000_000  # if other nodes have to get it first
_log = logging.getLogger("ddpwatch.collector")


class Attention:
    """One run's lease on this node. Where there is no memory for its page, nothing is granted.

    Args:
        run_id: The run.
        world_size: How many ranks the job has.
        ranks: All ranks known so far.

    Attributes:
        lead_ns: How far ahead a new budget starts at least.
        order: To sample stacks; None without one.
    """

    def __init__(self, run_id: str, world_size: int, ranks: Mapping[int, RankEntry]) -> None:
        self._run_id = run_id
        self._world_size = world_size
        self._ranks = ranks
        # At least; a collector that is held up for longer than that between two lines is rare
        self.lead_ns = 50_000_000
        self._introduced_by = time.monotonic_ns() + INTRODUCED_NS
        self._wanted_ppm = 0
        self.order: StackOrder | None = None
        self._page: LeasePage | None = None
        try:
            if (path := rundir.lease(run_id)) is not None:
                self._page = LeasePage(path)
        except OSError as error:
            _log.warning("no lease: %s", error)

    def is_news(self, wanted_ppm: int) -> bool:
        """Returns whether viewers want another budget than at the last `renew`."""
        return wanted_ppm != self._wanted_ppm

    def granted_ppm(self, now: int) -> int | None:
        """Returns the budget that ranks sample by now (monotonic ns) or in a moment; None without a lease."""
        return None if self._page is None else self._page.granted_ppm(now) or None

    def term(self, now: int) -> tuple[int, int] | None:
        """Returns the budget granted last and its first slot; None without a lease."""
        return None if self._page is None else self._page.term(now)

    def follow(self, ppm: int, first_slot: int, now: int) -> None:
        """Grants what the root has granted. Only the root chooses: all ranks of a group switch at the same slot."""
        if self._page is None:
            return
        if self._page.term(now) is None or first_slot > self._page.first_slot:
            self._page.grant(ppm, first_slot, now)
        self._page.renew(now)

    def renew(self, wanted_ppm: int, now: int) -> None:
        """Grants what viewers want (0: nothing more) until `LEASE_NS` from now. Call it about twice a second."""
        self._wanted_ppm = wanted_ppm
        granted = self.granted_ppm(now) or 0
        if self._page is None or not (wanted_ppm or granted):
            return
        if wanted_ppm != granted and (self._all_introduced() or now > self._introduced_by):
            self._grant(self._page, wanted_ppm, now)
        self._page.renew(now)

    def follow_order(self, order: StackOrder | None) -> None:
        """Passes on an order that has its first slot, or withdraws the one before."""
        if self._page is not None and order != self.order:
            self._page.order(order)
            self.order = order

    def take_order(self, wanted: StackOrder | None) -> None:
        """Gives ranks the order that a viewer wants, from a step on that none has reached; None withdraws it."""
        if wanted is None:
            self.follow_order(None)
        elif self._page is not None and (self.order is None or self.order.number != wanted.number):
            slot = self._open_slot()
            if slot is not None:
                first = slot + LEAD_STEPS + self._usual_steps_in(LEAD_NS + self.lead_ns)
                self.follow_order(structs.replace(wanted, first_slot=first))

    def _all_introduced(self) -> bool:
        """Returns whether every rank has said hello, and so has opened the page."""
        return sum((Hello, 0) in entry.newest for entry in self._ranks.values()) >= self._world_size

    def _grant(self, page: LeasePage, ppm: int, now: int) -> None:
        """Grants from a step on that no rank has reached, unless the budget before still waits for its own."""
        slot = self._open_slot()
        if slot is not None and slot >= page.first_slot:
            page.grant(ppm, slot + LEAD_STEPS + self._steps_in(self.lead_ns), now)

    def _open_slot(self) -> int | None:
        """Returns the slot that the rank in front is in, by the black boxes."""
        running = (rank for rank, entry in self._ranks.items() if entry.ended is None)
        boxes = map(blackbox.read, rundir.blackboxes(self._run_id, running))
        return max((box.slot for box in boxes if box is not None), default=None)

    def _steps_in(self, ns: int) -> int:
        """Returns how many steps a rank finishes in that time at most, by the shortest of the newest that came."""
        return ns // min(self._newest_ns(), default=ns + 1)

    def _usual_steps_in(self, ns: int) -> int:
        """Returns how many if it goes on as in the newest steps that came: each of them again, the shortest first."""
        durations = sorted(self._newest_ns())
        rounds, left = divmod(ns, sum(durations) or ns + 1)
        return rounds * len(durations) + sum(at <= left for at in accumulate(durations))

    def _newest_ns(self) -> list[int]:
        """Returns how long the newest steps took, of the rank of which the newest came."""
        newest = max(
            (entry.steps for entry in self._ranks.values() if entry.steps),
            key=lambda steps: steps[-1].seq,
            default=deque(),
        )
        messages = (decode(envelope.frame) for envelope in islice(reversed(newest), RECENT_STEPS))
        return [step.duration_ns for step in messages if isinstance(step, Step) and step.duration_ns]
