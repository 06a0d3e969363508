"""Packs the steps of a node's ranks into one message, and expands it again.

Ranks of a job mostly do the same at nearly the same time. So each column of a Step is written as differences: to the
value before it, and to the same place on the rank before. A column that is equal to that rank's is not written at all.
What is left are numbers of the size of the noise. They are stored byte by byte in planes (all lowest bytes first),
which zstd makes small.

All that a Step says comes back as it was, but hook columns of ranks for which they were left out: these are empty.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from operator import add, sub
from typing import Any, Final, get_args

import zstandard

from ddpwatch.messages import CollectiveOp, FrameError, NodeStep, PhaseName, Span, Step, StepStatus, decode, encode
from ddpwatch.transport import Envelope, Frame

MAX_INTS: Final = 1 << 21  # of one message: more than any single step has
MAX_LENGTH: Final = 65_536  # of a column, as in a Step
_COUNT_LIMIT: Final = 1 << 53  # an absent count is 0, others are one more
_NS_LIMIT: Final = 1 << 62
_WORD, _HALF, _MASK = 8, 1 << 63, (1 << 64) - 1
_PHASES: Final = get_args(PhaseName)
_STATUSES: Final = get_args(StepStatus)
_OPS: Final = get_args(CollectiveOp)
_PLAIN: Final = ("hook_param", "hook_ns", "comm_group", "comm_seq", "comm_module", "comm_label", "comm_bytes")
_HOOKS: Final = ("hook_param", "hook_ns")
_COLUMNS: Final = 4 + len(_PLAIN) + 8

Ints = list[int]
Columns = tuple[Ints, ...]


def pack(node: int, steps: Sequence[Step], hooks: Collection[int] | None = None) -> NodeStep:
    """One step of a node's ranks as one message.

    Args:
        node: The node's number.
        steps: At most one per rank, at least one.
        hooks: The ranks whose hook columns are kept; None for all.

    Raises:
        FrameError: The steps are too large for one message.
    """
    rows = [_columns(step, hooks is None or step.rank in hooks) for step in steps]
    codes: Ints = []
    values: Ints = []
    for column in zip(*rows, strict=True):
        before: Ints = []
        by_length: dict[int, Ints] = {}
        for row in column:
            if row == before:
                codes.append(0)
                continue
            codes.append(len(row) + 1)
            reference = by_length.get(len(row))
            values += row if reference is None else map(sub, row, reference)
            before = by_length[len(row)] = row
    if len(codes) + len(values) > MAX_INTS:
        raise FrameError("oversize", f"{len(values)} numbers in one step of a node")
    return NodeStep(node=node, step=steps[0].step, ranks=[step.rank for step in steps], columns=_bytes(codes + values))


def expand(message: NodeStep) -> list[Step]:
    """The steps, in the order in which they were packed.

    Raises:
        FrameError: The message was not made by `pack`, or is damaged.
    """
    try:
        words = _words(message.columns)
        columns = list(_unpacked(words, len(message.ranks)))
        return [_step(rank, row) for rank, row in zip(message.ranks, zip(*columns, strict=True), strict=True)]
    except (ValueError, IndexError, OverflowError, zstandard.ZstdError) as error:
        raise FrameError("invalid", f"columns of a node's step: {error}") from None


def read(envelope: Envelope) -> list[Frame]:
    """What is in a frame: its message; of a node's step, its ranks' steps, in envelopes of the same number and time.

    Raises:
        FrameError: As `decode` and `expand`.
    """
    message = decode(envelope.frame)
    if not isinstance(message, NodeStep):
        return [(message, envelope)]
    seq, received_ns = envelope.seq, envelope.received_ns
    return [(step, Envelope(seq, received_ns, encode(step))) for step in expand(message)]


def without_hooks(message: NodeStep) -> NodeStep:
    """The same without any hook columns; the message itself if it cannot be read."""
    try:
        return pack(message.node, expand(message), ())
    except FrameError:
        return message


# -- a step as columns of integers -----------------------------------------------------------------------------------


def _columns(step: Step, hooks: bool) -> Columns:
    data = step.data
    scalars = [
        step.step, _STATUSES.index(step.status), step.synced, step.micro_steps, step.epoch, step.start_ns,
        step.duration_ns, _from_optional(step.comm_first_seq), step.reduced, _from_optional(step.clock_error_ns),
        step.own_ns, step.sender_ns, _from_optional(step.cpu_ns), step.dropped, data is not None,
    ]  # fmt: skip
    ready, done = _carried(step.comm_ready), _carried(step.comm_done)
    return (
        scalars,
        [_PHASES.index(span.phase) for span in step.spans],
        _differences([at for span in step.spans for at in (span.start, span.end)]),
        _differences([at for pair in data or () for at in pair]),
        *(_differences(getattr(step, name) if hooks or name not in _HOOKS else []) for name in _PLAIN),
        [_OPS.index(op) for op in step.comm_op],
        _known(step.comm_ready),
        _differences(ready),
        _differences(list(map(sub, step.comm_launch, ready))),
        _known(step.comm_start),
        [0 if at is None else at - launch for at, launch in zip(step.comm_start, step.comm_launch, strict=False)],
        _known(step.comm_done),
        _differences(done),
    )


def _step(rank: int, columns: Columns) -> Step:
    scalars, phases, stamps, data, *rest = columns
    plain: dict[str, Any] = dict(zip(_PLAIN, map(_in_range, map(_sums, rest)), strict=False))
    ops, ready_known, ready, launch, start_known, start, done_known, done = rest[len(_PLAIN) :]
    number, status, synced, micro_steps, epoch, start_ns, duration_ns, first, reduced, *others = scalars
    clock_error, own_ns, sender_ns, cpu_ns, dropped, has_data = others
    counts = (number, micro_steps, epoch, first, clock_error, own_ns, sender_ns, cpu_ns, dropped)
    if min(*counts, duration_ns, status, *phases, *ops) < 0 or max(counts) > _COUNT_LIMIT or duration_ns >= _NS_LIMIT:
        raise ValueError("a count out of range")
    ready_at = _sums(ready)
    launched = _in_range(list(map(add, _sums(launch), ready_at)))
    return Step(
        rank=rank, step=number, status=_STATUSES[status], synced=bool(synced), micro_steps=micro_steps, epoch=epoch,
        start_ns=_in_range([start_ns])[0], duration_ns=duration_ns, comm_first_seq=_to_optional(first),
        reduced=bool(reduced), clock_error_ns=_to_optional(clock_error), own_ns=own_ns, sender_ns=sender_ns,
        cpu_ns=_to_optional(cpu_ns), dropped=dropped, comm_launch=launched, comm_op=[_OPS[op] for op in ops],
        spans=[Span(_PHASES[phase], *pair) for phase, pair in zip(phases, _pairs(_sums(stamps)), strict=True)],
        data=list(_pairs(_sums(data))) if has_data else None,
        comm_ready=_sparse(ready_known, ready_at), comm_done=_sparse(done_known, _sums(done)),
        comm_start=_sparse(start_known, list(map(add, start, launched))), **plain,
    )  # fmt: skip


def _from_optional(value: int | None) -> int:
    return 0 if value is None else value + 1


def _to_optional(value: int) -> int | None:
    return value - 1 if value else None


def _differences(values: Ints) -> Ints:
    return list(map(sub, values, [0, *values]))


def _sums(differences: Ints) -> Ints:
    return list(accumulate(differences))


def _known(column: Sequence[int | None]) -> Ints:
    return [at is not None for at in column]


def _carried(column: Sequence[int | None]) -> Ints:
    """The column with the value before it in place of what is not known."""
    before = 0
    return [before if at is None else (before := at) for at in column]


def _sparse(known: Ints, values: Ints) -> list[int | None]:
    _in_range(values)
    return [at if has else None for has, at in zip(known, values, strict=True)]


def _pairs(values: Ints) -> Iterator[tuple[int, int]]:
    _in_range(values)
    return zip(values[::2], values[1::2], strict=True)


def _in_range(values: Ints) -> Ints:
    if values and (min(values) <= -_NS_LIMIT or max(values) >= _NS_LIMIT):
        raise ValueError("a time out of range")
    return values


# -- columns as integers, and integers as bytes ----------------------------------------------------------------------


def _unpacked(words: Ints, ranks: int) -> Iterator[list[Ints]]:
    """The columns, each of all ranks."""
    at = _COLUMNS * ranks
    if len(words) < at:
        raise ValueError("too short")
    for first in range(0, _COLUMNS * ranks, ranks):
        column: list[Ints] = []
        before: Ints = []
        by_length: dict[int, Ints] = {}
        for code in words[first : first + ranks]:
            if code:
                row = words[at : at + code - 1]
                if not 0 < code <= 2 * MAX_LENGTH + 1 or len(row) < code - 1:
                    raise ValueError("bad length")
                reference = by_length.get(len(row))
                before = row if reference is None else _wrapped(list(map(add, row, reference)))
                by_length[len(row)] = before
                at += len(row)
            column.append(before)
        yield column
    if at != len(words):
        raise ValueError("too long")


def _bytes(values: Ints) -> bytes:
    """The numbers, modulo 2^64, as compressed planes of bytes. Small ones of either sign have zeros in the upper."""
    words = array("Q", [value << 1 if value >= 0 else ~(value << 1) for value in _wrapped(values)])
    if sys.byteorder == "big":
        words.byteswap()
    raw = words.tobytes()
    return zstandard.compress(b"".join(raw[plane::_WORD] for plane in range(_WORD)))


def _words(compressed: bytes) -> Ints:
    """The numbers that `_bytes` compressed."""
    size = zstandard.frame_content_size(compressed)
    if not 0 <= size <= MAX_INTS * _WORD or size % _WORD:
        raise ValueError(f"{size} bytes")
    planes, count = zstandard.decompress(compressed), size // _WORD
    raw = bytearray(size)
    for plane in range(_WORD):
        raw[plane::_WORD] = planes[plane * count : (plane + 1) * count]
    words = array("Q", bytes(raw))
    if sys.byteorder == "big":
        words.byteswap()
    return [word >> 1 ^ -(word & 1) for word in words]


def _wrapped(values: Ints) -> Ints:
    """The numbers modulo 2^64: differences of differences may be larger."""
    if values and (min(values) < -_HALF or max(values) >= _HALF):
        return [(value + _HALF & _MASK) - _HALF for value in values]
    return values
