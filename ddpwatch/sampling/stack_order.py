"""An order to sample a rank's stacks, and those of a peer: which ranks, and for how many steps.

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
EXPLAIN: Final = "DDPWATCH_EXPLAIN"  # of the job's environment: when to ask by itself
FIRST_INCIDENT: Final = "first-incident"
_FORM: Final = re.compile(rb"([0-9]{1,10})\.([0-9]{1,7})\.([0-9]{1,7})\.([0-9]{1,6})")


class StackOrder(msgspec.Struct, tag="stack_order", frozen=True):
    """What to sample.

    Attributes:
        number: Random, from 1; ranks take each order once.
        rank: The rank to explain.
        peer: The one to compare it with, itself if there is none.
        steps: How many.
        first_slot: The first of them (see `StepRecord`); 0 until the collector has chosen it.
    """

    number: Count
    rank: Rank
    peer: Rank
    steps: Count
    first_slot: Count = 0

    @property
    def topic(self) -> bytes:
        """What a viewer subscribes to, behind `ddpwatch.wire.transport.STACKS`."""
        return b"%d.%d.%d.%d" % (self.number, self.rank, self.peer, self.steps)


def parse_topic(topic: bytes) -> StackOrder | None:
    """Returns the order of a topic; None if that is something else."""
    found = _FORM.fullmatch(topic)
    if found is None:
        return None
    number, rank, peer, steps = map(int, found.groups())
    is_valid = 0 < number < 1 << 32 and max(rank, peer) < 1 << 20 and 0 < steps <= MOST_STEPS
    return StackOrder(number, rank, peer, steps) if is_valid else None
