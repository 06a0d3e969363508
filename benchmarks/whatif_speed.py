"""Measures how long `ddpwatch whatif` takes for 20 scenarios of 8 made-up ranks with 500 full steps each."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

from ddpwatch.analysis.means import STARTING_STEPS
from ddpwatch.common.text import table
from ddpwatch.whatif.answer import WhatIf
from ddpwatch.whatif.recorded import recorded_of
from ddpwatch.whatif.scenarios import Change
from ddpwatch.whatif.schedule import Speeds
from tests.support.whatif import MadeUpJob, line

RANKS, STEPS = 8, 500
ROUNDS = 5
GOAL_S = 2.0
# Gloo's two collectives in flight, which slow compute: every event is played.
JOB = MadeUpJob(
    RANKS, STARTING_STEPS + STEPS, backend="gloo", speeds=Speeds(2, 0.5, 0.2, 0.0), cost=line(1.5, 4.0), wire_jitter=0.2
)
SCENARIOS = [
    *(Change(cap_mib=cap) for cap in (0.5, 1, 3, 5, 10, 25, 50)),
    *(Change(cap_mib=cap, first_mib=0.5) for cap in (3, 5)),
    *(Change(hook=hook) for hook in ("fp16", "bf16", "powersgd-2")),
    Change(link=2),
    Change(perfect=True),
    Change(without_lateness_of=5),
    Change(no_input=True),
    Change(world=16),
    Change(accumulate=2),
    Change(bucket_view=True),
    Change(cap_mib=1, hook="fp16"),
]
T = TypeVar("T")


def main() -> None:
    """Prints wall and CPU seconds; the median of a few rounds."""
    messages = list(JOB.messages())
    recorded, read = _timed(lambda: recorded_of(messages))
    found, answered = _timed(lambda: WhatIf(recorded).ask(SCENARIOS))
    print(f"{len(recorded.ranks)} ranks, {len(recorded.steps)} full steps, {len(found)} scenarios; {ROUNDS} rounds")
    rows = [["to take the frames", *read, ""], ["to answer", *answered, f"{GOAL_S:g} s"]]
    print("\n".join(table(["", "wall s", "CPU s", "goal"], rows)))


def _timed(call: Callable[[], T]) -> tuple[T, list[str]]:
    """What the call returns, and the median of its wall and CPU seconds."""
    walls, cpus = [], []
    for _ in range(ROUNDS):
        wall, cpu = time.perf_counter(), time.process_time()
        found = call()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return found, [f"{median(walls):.2f}", f"{median(cpus):.2f}"]


if __name__ == "__main__":
    main()
