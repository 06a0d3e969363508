"""An order to sample a rank's stacks, and those of a peer, or to profile both: which ranks, and for how many steps.

A viewer asks by subscribing to a topic. The collector adds the first step, which no rank has reached, and puts the
order into the page that ranks read (`ddpwatch.sampling.lease`); the root sends it to the other nodes, too. It is
withdrawn when the viewer goes, but a rank that has begun goes on to the end.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from ddpwatch.wire.messages import Count, Rank

MOST_STEPS: Final = 100_000
MOST_PROFILED: Final = 20  # steps: each event takes memory
LEAD_NS: Final = 1_000_000_000  # to its first step, at least: sender threads read it when they wake
PARTIAL: Final = 2  # steps that are not sampled whole: the first and the last
RUN_ENDED: Final = "the run ended"  # why fewer were sampled; the same
OTHER_ORDER: Final = "another order came"
TOO_LONG: Final = "they took too long"
CUT_SHORT: Final = (RUN_ENDED, OTHER_ORDER, TOO_LONG)
EXPLAIN: Final = "DDPWATCH_EXPLAIN"  # of the job's environment: when to ask by itself
FIRST_INCIDENT: Final = "first-incident"
_FORM: Final = re.compile(rb"([0-9]{1,10})\.([0-9]{1,7})\.([0-9]{1,7})\.([0-9]{1,6})(\.profiler)?")


class StackOrder(msgspec.Struct, tag="stack_order", frozen=True):
    """What to sample.

    Attributes:
        number: Random, from 1; ranks take each order once.
        rank: The rank to explain.
        peer: The one to compare it with, itself if there is none.
        steps: How many.
        first_slot: The first of them (see `StepRecord`); 0 until the collector has chosen it.
        profiler: Whether torch's profiler is to be used.
    """

    number: Count
    rank: Rank
    peer: Rank
    steps: Count
    first_slot: Count = 0
    profiler: bool = False

    @property
    def compared_with(self) -> Rank | None:
        """The peer; None if there is none."""
        return None if self.peer == self.rank else self.peer

    @property
    def topic(self) -> bytes:
        """What a viewer subscribes to, behind `ddpwatch.wire.transport.STACKS`."""
        how = b".profiler" if self.profiler else b""
        return b"%d.%d.%d.%d%b" % (self.number, self.rank, self.peer, self.steps, how)


def parse_topic(topic: bytes) -> StackOrder | None:
    """Returns the order of a topic; None if that is something else."""
    found = _FORM.fullmatch(topic)
    if found is None:
        return None
    number, rank, peer, steps = map(int, found.groups()[:4])
    profiler = found[5] is not None
    most = MOST_PROFILED if profiler else MOST_STEPS
    is_valid = 0 < number < 1 << 32 and max(rank, peer) < 1 << 20 and 0 < steps <= most
    return StackOrder(number, rank, peer, steps, profiler=profiler) if is_valid else None
