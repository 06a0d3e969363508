"""The case that made other tools name nobody: every rank's step takes as long, as all wait for one of them.

Four ranks with steps of 93 ms. In the first job, rank 1's backward takes 200 ms longer, from the first step on; in the
other one, rank 2 waits 150 ms for its input. Steps then take 293 ms on every rank, or 243 ms.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.common.text import table
from tests.support.fleet import LAYER_PARAMS, Disturbance, Fleet, Shape, zeros
from tests.support.fleet_noise import Noise

SHAPE = Shape(world=4, steps=60, step_ns=93_000_000, noise=Noise("gauss", 0.01), watched_period=2, seed=252)
LATE_BACKWARD_NS, LATE_INPUT_NS = 200_000_000, 150_000_000
HEADER = ["job", "mean step per rank (ms)", "named after", "which says"]


def rows() -> Iterator[list[str]]:
    """What the diagnosis says of both jobs, and after how long."""
    for name, wrong in (("rank 1's backward + 200 ms", _late_backward()), ("rank 2's input + 150 ms", _late_input())):
        fleet, durations, named = Fleet(SHAPE, wrong), [], ""
        diagnosis = Diagnosis(fleet.names)
        for played in fleet.play():
            diagnosis.add_step(fleet.across(played))
            durations.append(played.end - played.start)
            if not named and (found := diagnosis.slowest()) is not None:
                named = f"{played.number + 1} steps, {sum(int(one.max()) for one in durations) / 1e9:.1f} s"
        found = diagnosis.slowest()
        means = "  ".join(f"{mean / 1e6:.1f}" for mean in np.mean(durations, axis=0))
        yield [name, means, named or "never", "nothing" if found is None else found.message]


def _late_backward() -> Disturbance:
    wrong, late = Disturbance(SHAPE), zeros(SHAPE)
    late[:, 1] = LATE_BACKWARD_NS
    wrong.backward.append((5 * LAYER_PARAMS, late))
    return wrong


def _late_input() -> Disturbance:
    wrong = Disturbance(SHAPE)
    wrong.data[:, 2] = LATE_INPUT_NS
    return wrong


def show() -> None:
    """Prints the table."""
    print("\n".join(table(HEADER, list(rows()))))
