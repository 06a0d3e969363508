"""Which part of a recording is wanted: steps, ranks, and from which moment on."""

from __future__ import annotations

from dataclasses import dataclass

from ddpwatch.errors import UsageError
from ddpwatch.messages import Beat, Bye, Hello, Layout, Mark, Message, Step
from ddpwatch.recording.container import NO_STEP, ChunkRow, kind_bit

CONTEXT = (Hello, Layout, Bye, Mark)
_NEEDED = (Hello, Layout, Bye)
_NEEDED_KINDS = sum(kind_bit(kind) for kind in ("hello", "layout", "bye"))
_MARK = kind_bit("mark")
_STEP = kind_bit("step")


@dataclass(frozen=True, slots=True)
class Selection:
    """Steps ``first`` to ``stop - 1``, of these ranks, received at ``start_ns`` or later.

    What is needed to understand the rest (who the ranks are, how buckets are laid out, ends) is selected whatever the
    steps and the moment; so are marks, but for those from before ``start_ns``.

    Attributes:
        first: First step.
        stop: The step after the last one; None for all.
        ranks: None for all.
        start_ns: ns since the Unix epoch.
        context: False leaves out even what is needed: for finding a place, not for understanding it.
    """

    first: int = 0
    stop: int | None = None
    ranks: frozenset[int] | None = None
    start_ns: int = 0
    context: bool = True

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self == Selection()

    def narrowed(self, other: Selection) -> Selection:
        """What both select."""
        stops = [stop for stop in (self.stop, other.stop) if stop is not None]
        ranks = [ranks for ranks in (self.ranks, other.ranks) if ranks is not None]
        return Selection(
            max(self.first, other.first),
            min(stops, default=None),
            frozenset.intersection(*ranks) if ranks else None,
            max(self.start_ns, other.start_ns),
            self.context and other.context,
        )

    def wants_chunk(self, row: ChunkRow) -> bool:
        """Whether the chunk may hold more than context."""
        if row.end_ns < self.start_ns:
            return False
        if self.first == 0 and self.stop is None:
            return True
        if row.kinds & _STEP and row.first_step > row.last_step:
            return True  # it has steps, and does not say which
        return row.first_step < (NO_STEP if self.stop is None else self.stop) and row.last_step >= self.first

    def wants_context(self, row: ChunkRow) -> bool:
        """Whether the chunk may hold what the rest needs."""
        marks = 0 if row.end_ns < self.start_ns else _MARK
        return self.context and bool(row.kinds & (_NEEDED_KINDS | marks))

    def wants(self, message: Message, received_ns: int) -> bool:
        """Whether the message is selected."""
        rank = getattr(message, "rank", None)
        if self.ranks is not None and rank is not None and rank not in self.ranks:
            return False
        if isinstance(message, _NEEDED):
            return self.context
        if received_ns < self.start_ns:
            return False
        if isinstance(message, Mark):
            return self.context
        if isinstance(message, (Step, Beat)):
            return message.step >= self.first and (self.stop is None or message.step < self.stop)
        return True


def parse_steps(text: str | None) -> tuple[int, int | None]:
    """``A:B`` as in Python: from A up to but not including B; either may be missing. ``A`` alone is one step.

    Raises:
        UsageError: It is something else.
    """
    if text is None:
        return 0, None
    first, colon, stop = text.strip().partition(":")
    try:
        begin = int(first) if first else 0
        end = (int(stop) if stop else None) if colon else begin + 1
    except ValueError:
        raise _bad("--steps", text, "A:B, from step A up to but not including B, e.g. 100:200") from None
    if begin < 0 or (end is not None and end <= begin) or not text.strip():
        raise _bad("--steps", text, "A:B with A < B, e.g. 100:200")
    return begin, end


def parse_ranks(text: str | None) -> frozenset[int] | None:
    """``0,2,4-7``; None for all.

    Raises:
        UsageError: It is something else.
    """
    if text is None:
        return None
    ranks: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 14:
            raise _bad("--ranks", text, "ranks and ranges of them, e.g. 0,2,4-7")
        end = int(last) if dash else int(first)
        if end >= 1 << 20:
            raise _bad("--ranks", text, "rank numbers below 1048576")
        ranks.update(range(int(first), end + 1))
    if not ranks:
        raise _bad("--ranks", text, "ranges that go upwards, e.g. 4-7")
    return frozenset(ranks)


def selection_of(steps: str | None, ranks: str | None) -> Selection:
    """What the options ``--steps`` and ``--ranks`` select."""
    first, stop = parse_steps(steps)
    return Selection(first, stop, parse_ranks(ranks))


def _bad(option: str, text: str, hint: str) -> UsageError:
    return UsageError(f"{option} {text!r} is not understood", f"give {hint}")
