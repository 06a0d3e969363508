"""The answer of ``ddpwatch whatif`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.common.text import clean, number, percent, table
from ddpwatch.whatif.answer import Prediction, WhatIfAnswer, most_to_save
from ddpwatch.whatif.wording import BOUND, nothing_sure

OUTSIDE = "stalls and checkpoints in other steps, or between them, are in no row"
APART = "each change by itself, so gains do not add up; a gain is what it takes off the measured step, rounded"


def render_whatif(answer: WhatIfAnswer, everything: bool) -> str:
    """Returns the answer as a table, then a reason per change.

    Args:
        answer: What `ddpwatch.whatif.command.answer` returns.
        everything: Show all changes, and not only the best.
    """
    shown = answer.scenarios if everything else _best(answer.scenarios)
    changes = [found for found in answer.scenarios if BOUND not in found.change]
    replayed = answer.replayed
    most = most_to_save(replayed.exposed_ms, replayed.measured_ms, answer.scenarios)
    lines = [_head(answer), *filter(None, [most]), OUTSIDE, ""]
    if changes and not any(found.sure for found in changes):
        lines += [nothing_sure(found.more_steps for found in changes), ""]
    if shown:
        lines += [] if len(shown) == 1 else [APART]
        lines += table(["step ms", "gain ms", "90 % interval", "gain", "change"], [_row(found) for found in shown])
        lines += ["", *(line for found in shown for line in _reasons(found))]
    if not everything and (unsure := [found for found in changes if not found.sure and found.gain_ms > 0]):
        lines.append("not sure to help: " + "; ".join(f"{one.change} ({_interval(one)} ms)" for one in unsure))
    lines += [f"not predicted: {refused.change}: {refused.why}" for refused in answer.refused]
    return "\n".join(map(clean, lines))


def _head(answer: WhatIfAnswer) -> str:
    replayed, steps, left_out = answer.replayed, answer.steps, answer.left_out
    used = f"the newest {steps} of {steps + left_out}" if left_out else f"{steps}"
    return (
        f"measured {number(replayed.measured_ms)} ms a step, over {used} steps timed in full; "
        f"replayed {number(replayed.step_ms)} ms ({100 * replayed.error:+.1f} %)"
    )


def _best(scenarios: Sequence[Prediction]) -> Sequence[Prediction]:
    """Returns the changes that are sure to help, the surest first; of all caps one; and the bound."""
    found: list[Prediction] = []
    for scenario in scenarios:
        again = scenario.cap_mib is not None and any(other.cap_mib is not None for other in found)
        if scenario.sure and not again and BOUND not in scenario.change:
            found.append(scenario)
    bound = [scenario for scenario in scenarios if BOUND in scenario.change]
    return found[:5] + bound


def _row(found: Prediction) -> list[str]:
    return [number(found.step_ms), number(found.gain_ms), _interval(found), percent(found.gain, 1), found.change]


def _interval(found: Prediction) -> str:
    """Returns that of the gain."""
    return f"{number(found.gain_low_ms)} to {number(found.gain_high_ms)}"


def _reasons(found: Prediction) -> list[str]:
    lines = [f"{found.change}: {found.why}"]
    lines += [f"    {line}" for line in found.code.splitlines()]
    lines += [f"  assumes: {found.assumes}"] if found.assumes else []
    return lines
