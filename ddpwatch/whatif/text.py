"""The answer of ``ddpwatch whatif`` as text."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from ddpwatch.common.text import clean, number, percent, table
from ddpwatch.whatif.answer import Prediction, WhatIfAnswer
from ddpwatch.whatif.summary import gain_text, interval_text, not_predicted, sentences

OUTSIDE = (
    "a report's step is the mean of all steps; here, stalls and checkpoints in steps that are not timed in full, or "
    "between steps, are in no row"
)
APART = "each change by itself, so gains do not add up; a gain is what it takes off the measured step, rounded"


def render_whatif(answer: WhatIfAnswer, everything: bool, width: int | None = None) -> str:
    """Returns the answer as a table, then a reason per change.

    Args:
        answer: What `ddpwatch.whatif.command.answer` returns.
        everything: Show all changes, and not only the best.
        width: Of the terminal, for which lines are wrapped between words; None otherwise.
    """
    shown = answer.scenarios if everything else _best(answer.scenarios)
    lines = [_head(answer), *sentences(answer), OUTSIDE, ""]
    if shown:
        lines += [] if len(shown) == 1 else [APART]
        lines += table(["step ms", "gain ms", "90 % interval", "gain", "change"], [*map(_row, shown)], width)
        lines += ["", *(line for found in shown for line in _reasons(found))]
    if not everything and (unsure := [found for found in answer.scenarios if _may_help(found)]):
        lines.append("not sure to help: " + "; ".join(f"{one.change} ({interval_text(one)} ms)" for one in unsure))
    lines += [f"not predicted: {changes}: {why}" for changes, why in not_predicted(answer.refused)]
    return "\n".join(wrapped for line in lines for wrapped in _wrapped(clean(line), width))


def _wrapped(line: str, width: int | None) -> list[str]:
    """Returns a line's parts; code stays as it is."""
    if width is None or len(line) <= width or line.startswith("    "):
        return [line]
    return wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _may_help(found: Prediction) -> bool:
    return found.kind != "bound" and not found.sure and found.gain_ms > 0


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
        if scenario.sure and not again and scenario.kind != "bound":
            found.append(scenario)
    return found[:5] + [scenario for scenario in scenarios if scenario.kind == "bound"]


def _row(found: Prediction) -> list[str]:
    least, most = ("≥ ", "≤ ") if found.kind == "bound" else ("", "")
    figures = [least + number(found.step_ms), most + gain_text(found.gain_ms), interval_text(found)]
    return [*figures, percent(found.gain, 1), found.change]


def _reasons(found: Prediction) -> list[str]:
    lines = [f"{found.change}: {found.why}"]
    lines += [f"    {line}" for line in found.code.splitlines()]
    lines += [f"  assumes: {found.assumes}"] if found.assumes else []
    return lines
