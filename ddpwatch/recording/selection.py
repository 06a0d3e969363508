"""Selects from a recording: by step, rank and receive time."""

from __future__ import annotations

from dataclasses import dataclass

from ddpwatch.errors import UsageError
from ddpwatch.recording.container import NO_STEP, ChunkRow, kind_bit
from ddpwatch.wire.messages import Beat, Bye, Group, Hello, Layout, Mark, Message, Step

CONTEXT = (Hello, Group, Layout, Bye, Mark)
_ALWAYS_KINDS = sum(kind_bit(kind) for kind in ("hello", "group", "layout", "bye"))
_MARK = kind_bit("mark")
_STEPS = kind_bit("step") | kind_bit("node_step")


@dataclass(frozen=True, slots=True)
class Selection:
    """Steps ``first`` to ``stop - 1``, of these ranks, received at ``start_ns`` or later (steps: ``steps_from_ns``).

    The context that frames need to be understood (who the ranks are, process groups, bucket layouts, ends) is always
    selected; so are marks received at ``start_ns`` or later.

    Attributes:
        first: First step.
        stop: The step after the last one; None for no end.
        ranks: None for all.
        start_ns: ns since the Unix epoch.
        steps_from_ns: The same for steps, which are not even decoded before that.
        context: False leaves out the context, too: to find a position, not to understand it.
    """

    first: int = 0
    stop: int | None = None
    ranks: frozenset[int] | None = None
    start_ns: int = 0
    context: bool = True
    steps_from_ns: int = 0

    @property
    def everything(self) -> bool:
        """Whether all frames are selected."""
        return self == Selection()

    def narrowed(self, other: Selection) -> Selection:
        """Returns the intersection of both."""
        stops = [stop for stop in (self.stop, other.stop) if stop is not None]
        ranks = [ranks for ranks in (self.ranks, other.ranks) if ranks is not None]
        return Selection(
            max(self.first, other.first),
            min(stops, default=None),
            frozenset.intersection(*ranks) if ranks else None,
            max(self.start_ns, other.start_ns),
            self.context and other.context,
            max(self.steps_from_ns, other.steps_from_ns),
        )

    def wants_chunk(self, row: ChunkRow, after: int) -> bool:
        """Returns whether the chunk may hold selected frames other than context.

        Args:
            row: Of the chunk.
            after: The newest step in the chunks before it.
        """
        if row.end_ns < self.start_ns:
            return False
        if self.first == 0 and self.stop is None:
            return True
        stop = NO_STEP if self.stop is None else self.stop
        if not row.kinds & _STEPS:  # it was written during the step after those
            return self.first <= after + 1 and after < stop
        if row.first_step > row.last_step:
            return True  # it holds steps and does not say which
        return row.first_step < stop and row.last_step >= self.first

    def wants_context(self, row: ChunkRow) -> bool:
        """Returns whether the chunk may hold context."""
        marks = 0 if row.end_ns < self.start_ns else _MARK
        return self.context and bool(row.kinds & (_ALWAYS_KINDS | marks))

    def wants(self, message: Message, received_ns: int) -> bool:
        """Returns whether the message is selected."""
        rank = getattr(message, "rank", None)
        if self.ranks is not None and rank is not None and rank not in self.ranks:
            return False
        if isinstance(message, (Hello, Group, Layout, Bye)):
            return self.context
        if received_ns < self.start_ns:
            return False
        if isinstance(message, Mark):
            return self.context
        if isinstance(message, (Step, Beat)):
            return message.step >= self.first and (self.stop is None or message.step < self.stop)
        return True


CONTEXT_ONLY = Selection(first=NO_STEP)  # no step at all, and the context of any


def parse_steps(text: str | None) -> tuple[int, int | None]:
    """Parses ``A:B``, which excludes B as in Python; either may be missing. ``A`` alone is one step.

    Raises:
        UsageError: The text is something else.
    """
    if text is None:
        return 0, None
    first, colon, stop = text.strip().partition(":")
    try:
        start = int(first) if first else 0
        end = (int(stop) if stop else None) if colon else start + 1
    except ValueError:
        raise _bad("--steps", text, "A:B for the steps from A up to but not including B, e.g. 100:200") from None
    if start < 0 or (end is not None and end <= start) or not text.strip():
        raise _bad("--steps", text, "A:B with A < B, e.g. 100:200")
    return start, end


def parse_ranks(text: str | None) -> frozenset[int] | None:
    """Parses ``0,2,4-7``; None means all ranks.

    Raises:
        UsageError: The text is something else.
    """
    if text is None:
        return None
    ranks: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 14:
            raise _bad("--ranks", text, "ranks and ranges of ranks, e.g. 0,2,4-7")
        end = int(last) if dash else int(first)
        if end >= 1 << 20:
            raise _bad("--ranks", text, "rank numbers below 1048576")
        ranks.update(range(int(first), end + 1))
    if not ranks:
        raise _bad("--ranks", text, "ascending ranges, e.g. 4-7")
    return frozenset(ranks)


def selection_of(steps: str | None, ranks: str | None) -> Selection:
    """Returns the selection of the options ``--steps`` and ``--ranks``."""
    first, stop = parse_steps(steps)
    return Selection(first, stop, parse_ranks(ranks))


def _bad(option: str, text: str, hint: str) -> UsageError:
    return UsageError(f"{option} {text!r} is not valid", f"give {hint}")
