"""Why a rank is late, as text: one sentence, a table of lines, and what the machine did meanwhile."""

from __future__ import annotations

from ddpwatch.analysis.explanation import Explanation, Explanations, SampledRank
from ddpwatch.common.text import UNKNOWN, clean, number, percent, table
from ddpwatch.errors import UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.report.tables import explanation_table

_SAMPLED = ("", "samples", "in", "gap ms", "cost", "ran", "starved", "preempted", "disk pages")


def explained_in(recording: Recording) -> list[Explanation]:
    """Returns what was explained while it was recorded.

    Raises:
        UsageError: Nothing was.
    """
    found = Explanations()
    for message, _ in recording:
        found.apply_message(message)
    if not (explanations := found.all()):
        hint = "ddpwatch explain asks a live run for them; a recording of the same time has them, too"
        raise UsageError(f"{recording.path}: no stacks were sampled", hint)
    return explanations


def render_explanation(found: Explanation) -> str:
    """Returns the explanation for a terminal: it fits on a screen."""
    shown = explanation_table(found)
    rows = [[clean(cell) for cell in row] for row in shown.rows]
    lines = [clean(found.text), "", *(table(shown.header, rows) if rows else []), ""]
    return "\n".join(
        [*lines, f"ms a step, in {found.steps} steps", "", *table(_SAMPLED, [*map(_sampled, found.ranks)])]
    )


def _sampled(rank: SampledRank) -> list[str]:
    return [
        f"rank {rank.rank}",
        str(rank.samples),
        number(rank.seconds, unit=" s"),
        number(rank.longest_ms, 0),
        percent(rank.cost, 1),
        percent(rank.on_core),
        percent(rank.starved),
        _count(rank.preempted),
        _count(rank.major_faults),
    ]


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)
