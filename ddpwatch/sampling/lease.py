"""What sampling may cost: the detail, chosen by people, and the lease, by which ranks learn it while somebody looks.

Viewers and the recording ask the collector for a budget. The collector grants it in a page of shared memory that each
rank maps read-only and reads at the start of a step: a few words of memory, no system call. Without a page, nothing is
granted.

The page has words of 8 bytes, each written and read as a whole, so that none is ever torn:

- what it is: a hash of the format, the host's boot and the time namespace, as another clock's deadline means nothing;
- the deadline in monotonic ns, which the collector renews: a lease does not outlive its collector by much;
- two terms: each a budget, and the number of the first step that it holds for. The newest that has been reached holds,
  and the collector replaces the older one. So all ranks switch at the same step, into a lease and out of it;
- an order to sample stacks, in several words: the number of the order is written last and removed first.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.run import clock
from ddpwatch.run.blackbox import new_page
from ddpwatch.run.regular import open_regular
from ddpwatch.sampling.stack_order import StackOrder

FULL_PPM = 1_000_000  # of a step: whatever full steps cost
NORMAL_PPM = 10_000
DETAILS = {"low": 0, "normal": NORMAL_PPM, "high": FULL_PPM, "full": FULL_PPM}
LEASE_NS = 2_000_000_000
LEAD_STEPS = 2  # from the step that is open to the first of a new budget, or of an order
LONGEST_NS = 60_000_000_000  # a deadline further away is a false one
_WORDS = 10
_KIND, _DEADLINE, _FIRST_TERM, _SECOND_TERM, _ORDER, *_ORDERED = range(_WORDS)  # the other fields of a `StackOrder`
_BUDGET_BITS = 20  # of a term; the rest is the step, so newer terms are greater numbers
_BUDGET_MASK = (1 << _BUDGET_BITS) - 1
SIZE = mmap.PAGESIZE


def parse_detail(text: str) -> int:
    """Reads a detail, one of `DETAILS` or what watching may cost (``1``, ``0.5%`` of a step), as ppm of a step.

    Raises:
        UsageError: The text is something else.
    """
    if (known := DETAILS.get(text.strip())) is not None:
        return known
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise UsageError(f"{text[:50]!r} is no detail", "give low, normal, high, or a percentage of a step, e.g. 0.5%")
    return round(percent * FULL_PPM / 100)


def detail_name(ppm: int) -> str:
    """Returns a budget as `parse_detail` reads it."""
    return next((name for name, known in DETAILS.items() if known == ppm), f"{100 * ppm / FULL_PPM:g}%")


def detail_sentence(ppm: int, timed: str = "as many steps as that allows are timed in full") -> str:
    """Returns what such a budget lets hooks cost, which steps are ``timed`` in full for that, and what changes it."""
    if ppm == FULL_PPM:
        return "nearly every step is timed in full, whatever that costs"
    if not ppm:
        return "few steps are timed in full; --detail normal times more"
    return (
        f"ddpwatch's hooks may cost {100 * ppm / FULL_PPM:g} % of a step, so {timed} (--detail changes that); what "
        "sending and collecting cost comes on top"
    )


def detail_of_job(environment: Mapping[str, str], records: bool) -> int:
    """Returns what watching may cost though nobody looks, in ppm of a step: ``DDPWATCH_DETAIL``, or its default.

    Args:
        environment: The job's, the same for all ranks.
        records: Whether the job is recorded.

    Raises:
        UsageError: ``DDPWATCH_DETAIL`` is not valid.
    """
    return parse_detail(environment.get("DDPWATCH_DETAIL") or ("normal" if records else "low"))


class Lease:
    """The reading end, in a rank. Grants nothing until it has a page.

    Attributes:
        sampled: The slots whose stacks this rank samples: it needs to know their phases, whatever that costs.
    """

    def __init__(self) -> None:
        self.sampled = range(0)
        self._words: Sequence[int] | memoryview = (0,) * _WORDS

    def open(self, path: Path | None) -> None:
        """Reads this page from now on. A file that is missing or something else changes nothing."""
        if path is None:
            return
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is too short
            file = open_regular(path, os.O_NOFOLLOW)
            try:
                words = memoryview(mmap.mmap(file, SIZE, access=mmap.ACCESS_READ)).cast("Q")
            finally:
                os.close(file)
            if words[_KIND] == _kind():
                self._words = words

    def budget_ppm(self, slot: int, now: int) -> int:
        """Returns the budget for a step that starts now (monotonic ns), as millionths of it; 0 without a lease."""
        if slot in self.sampled:
            return FULL_PPM
        words = self._words
        if not 0 < words[_DEADLINE] - now <= LONGEST_NS:
            return 0
        term, other = words[_FIRST_TERM], words[_SECOND_TERM]
        if other >> _BUDGET_BITS <= slot and (other > term or term >> _BUDGET_BITS > slot):
            term = other
        return min(term & _BUDGET_MASK, FULL_PPM) if term >> _BUDGET_BITS <= slot else 0

    def order(self) -> StackOrder | None:
        """Returns the order to sample stacks; None without one."""
        words = self._words
        number = words[_ORDER]
        fields = [words[word] for word in _ORDERED]
        if not number or number != words[_ORDER]:
            return None
        rank, peer, steps, first_slot, profiler = fields
        return StackOrder(number, rank, peer, steps, first_slot, bool(profiler))


class LeasePage:
    """The writing end, in the collector.

    Args:
        path: Where to create it. A page of this run's previous collector is removed; ranks open the new one when they
            introduce themselves again.

    Raises:
        OSError: It cannot be created.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._words = memoryview(new_page(path, SIZE)).cast("Q")
        self._words[_KIND] = _kind()

    def granted_ppm(self, now: int) -> int:
        """Returns the budget granted last; 0 if that has run out by now (monotonic ns)."""
        return self._newest() & _BUDGET_MASK if now < self._words[_DEADLINE] else 0

    @property
    def first_slot(self) -> int:
        """The first slot (see `StepRecord`) of the budget granted last."""
        return self._newest() >> _BUDGET_BITS

    def grant(self, ppm: int, first_slot: int, now: int) -> None:
        """Grants another budget, 0 for none, from a slot on that is later than the first one of the budget before."""
        if now >= self._words[_DEADLINE]:  # what has run out must not come back before that step
            self._words[_FIRST_TERM] = self._words[_SECOND_TERM] = 0
        older = min(_FIRST_TERM, _SECOND_TERM, key=self._words.__getitem__)
        self._words[older] = first_slot << _BUDGET_BITS | ppm

    def renew(self, now: int) -> None:
        """Lets what is granted hold for `LEASE_NS` from now on."""
        self._words[_DEADLINE] = now + LEASE_NS

    def order(self, order: StackOrder | None) -> None:
        """Orders stacks to be sampled, or withdraws what was ordered."""
        self._words[_ORDER] = 0
        if order is not None:
            fields = (order.rank, order.peer, order.steps, order.first_slot, order.profiler)
            for word, value in zip(_ORDERED, fields, strict=True):
                self._words[word] = value
            self._words[_ORDER] = order.number

    def term(self, now: int) -> tuple[int, int] | None:
        """Returns the budget granted last and its first slot, 0 ppm included; None once the lease has run out."""
        return (self._newest() & _BUDGET_MASK, self.first_slot) if now < self._words[_DEADLINE] else None

    def _newest(self) -> int:
        return max(self._words[_FIRST_TERM], self._words[_SECOND_TERM])


def _kind() -> int:
    """Returns what the first word says: ranks and collector compute it alike if they share a clock."""
    text = f"ddpwatch lease 1 {clock.boot_id()} {clock.time_namespace()}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
