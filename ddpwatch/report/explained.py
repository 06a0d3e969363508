"""Why a rank is late, as text: one sentence, a table of lines, and what the machine did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.analysis.diagnosis.words.wording import call_lines
from ddpwatch.analysis.explain.explanation import Explanation, Explanations
from ddpwatch.analysis.explain.lines import SampledRank
from ddpwatch.common.text import UNKNOWN, clean, number, percent, spans, table
from ddpwatch.errors import UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.report.tables import explanation_table
from ddpwatch.sampling.stack_order import EXPLAIN, FIRST_INCIDENT
from ddpwatch.wire.messages import StackSamples

_MODULE, _FUNCTION = 1, 2  # columns; of a profile, the first has numbers
_LEAST = {_MODULE: 6, _FUNCTION: 16}  # of them
_LEAST_OF_PLACE = 6  # of a file's name and line
_SAMPLED = ("in", "max ms", "cost", "ran", "starved", "preempted", "disk pages")


def explained_in(recording: Recording, rank: int | None = None) -> list[Explanation]:
    """Returns what was explained while it was recorded, of one rank or of all.

    Raises:
        UsageError: Nothing was.
    """
    found = Explanations()
    for message, _ in recording:
        if isinstance(message, StackSamples):
            found.add_samples(message)
    if not (explanations := [each for each in found.all() if rank in (None, each.rank)]):
        hint = f"run the job with {EXPLAIN}={FIRST_INCIDENT}, or ddpwatch explain while it is recorded"
        others = spans(sorted({each.rank for each in found.all()}))
        which = f"those sampled are of {others}, and not of rank {rank}" if others else "no stacks were sampled"
        raise UsageError(f"{recording.path}: {which}", hint)
    return explanations


def profile_in(recording: Recording) -> list[StackSamples]:
    """Returns what ranks sent of the newest profile; nothing without one."""
    found = [message for message, _ in recording if isinstance(message, StackSamples) and message.profiler]
    return [samples for samples in found if samples.order == found[-1].order]


def render_explanation(found: Explanation) -> str:
    """Returns the explanation for a terminal: it fits on a screen."""
    following = [f"next: {clean(found.next_step)}"] if found.next_step else []
    return "\n".join([clean(found.text), *following, "", *tables_below(found)])


def tables_below(found: Explanation, width: int | None = None) -> list[str]:
    """Returns what is below the sentence: the lines of code, and what the machine did; of a hang, ranks' calls.

    Names are cut so that no line is longer than ``width``.
    """
    if found.stacks:
        calls = [clean(line) for line in call_lines(found.stacks)]
        return [line if width is None or len(line) <= width else f"  …{line[3 - width :]}" for line in calls]
    shown = explanation_table(found)
    rows = [[clean(cell) for cell in row] for row in [shown.header, *shown.rows]]
    if width is not None:
        _cut_names(rows, width, (_FUNCTION,) if found.how == "profiler" else (_MODULE, _FUNCTION))
    lines = [f"ms a step, in {found.steps} steps", "", *table(rows[0], rows[1:]), ""]
    header = ("", "calls" if found.how == "profiler" else "samples", *_SAMPLED)
    return [*(lines if shown.rows else ()), *table(header, [*map(_sampled, found.ranks)])]


def _cut_names(rows: list[list[str]], width: int, columns: Sequence[int]) -> None:
    """Cuts names of modules, then of files, from the start on, as their ends differ; functions' last, at the end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + 2 * len(widths) - 2 - width
    for column in columns:
        most = min(max(widths[column] - excess, _LEAST[column]), widths[column])
        excess -= widths[column] - most
        for row in rows:
            row[column] = (_function if column == _FUNCTION else _end_of)(row[column], most)


def _function(text: str, most: int) -> str:
    name, gap, place = text.partition(" (")
    place = _end_of(place, max(most - len(name + gap), min(len(place), _LEAST_OF_PLACE)))
    room = most - len(gap + place)
    return f"{name if len(name) <= room else f'{name[: room - 1]}…'}{gap}{place}"


def _end_of(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"


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
