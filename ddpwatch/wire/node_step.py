"""Packs the steps of a node's ranks into one message, and expands it again.

Ranks of a job mostly do the same at nearly the same time. So each column of a Step is written as differences: to the
value before it, and to the same place on the rank before. A column that is equal to that rank's is not written at all.
What is left are numbers of the size of the noise. They are stored byte by byte in planes (all lowest bytes first),
which zstd makes small.

Everything in a Step comes back as it was, except hook columns that were left out: these are empty.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from operator import add, sub
from typing import Any, Final, TypeVar, get_args

import zstandard

from ddpwatch.wire.messages import (
    MAX_FRAME_BYTES,
    CollectiveOp,
    FrameError,
    NodeStep,
    PhaseName,
    Span,
    Step,
    StepStatus,
    decode,
    encode,
)  # fmt: skip
from ddpwatch.wire.transport import Envelope, Frame

MAX_INTS: Final = 1 << 21  # of one message: more than any single step has
MAX_EXPANDED: Final = 2 * MAX_INTS  # of its ranks together: of equal columns, one is in the message
MAX_LENGTH: Final = 65_536  # of a column, as in a Step
_HEAD_BYTES: Final = 32 << 10  # of a message, at most, beside its columns: 4,096 ranks
_COUNT_LIMIT: Final = 1 << 53  # an absent count is 0, others are one more
_NS_LIMIT: Final = 1 << 62
_WORD, _HALF, _MASK = 8, 1 << 63, (1 << 64) - 1
_PHASES: Final = get_args(PhaseName)
_STATUSES: Final = get_args(StepStatus)
_OPS: Final = get_args(CollectiveOp)
_PLAIN: Final = ("hook_param", "hook_ns", "comm_group", "comm_seq", "comm_module", "comm_label", "comm_bytes")
_HOOKS: Final = ("hook_param", "hook_ns")
_WAITS: Final = ("comm_wait_begin", "comm_wait_end")
_COLUMNS: Final = 4 + len(_PLAIN) + 8 + 2 * len(_WAITS)
_PAIRS: Final = (2, 3)  # columns that hold two numbers of each entry

Ints = list[int]
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def pack(node: int, steps: Sequence[Step], hooks: Collection[int] | None = None) -> NodeStep:
    """One step of a node's ranks as one message.

    Args:
        node: The node's number.
        steps: At most one per rank, at least one.
        hooks: The ranks whose hook columns are kept; None for all.

    Raises:
        FrameError: The steps are too large for one message.
    """
    codes: Ints = []
    values: Ints = []
    expanded = 0
    for column in _columns(steps, hooks):
        before: Ints = []
        by_length: dict[int, Ints] = {}
        for row in column:
            expanded += len(row)
            if row == before:
                codes.append(0)
                continue
            codes.append(len(row) + 1)
            reference = by_length.get(len(row))
            values += row if reference is None else map(sub, row, reference)
            before = by_length[len(row)] = row
    if len(codes) + len(values) > MAX_INTS or expanded > MAX_EXPANDED:
        raise FrameError("oversize", f"{expanded} numbers in one step of a node")
    packed = _bytes(codes + values)
    if len(packed) > MAX_FRAME_BYTES - _HEAD_BYTES:
        raise FrameError("oversize", f"{len(packed)} bytes in one step of a node")
    return NodeStep(node=node, step=steps[0].step, ranks=[step.rank for step in steps], columns=packed)


def expand(message: NodeStep) -> list[Step]:
    """The steps, in the order in which they were packed. Equal columns of several ranks may be one list.

    Raises:
        FrameError: The message was not made by `pack`, or is damaged.
    """
    words: Ints = []
    try:
        words = _words(message.columns)
        columns = list(_unpacked(words, len(message.ranks)))
        return list(_steps(message.ranks, columns))
    except (ValueError, IndexError, OverflowError, zstandard.ZstdError) as error:
        raise FrameError("invalid", f"columns of a node's step: {error}", _WORD * len(words)) from None


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


# -- steps as columns of integers ------------------------------------------------------------------------------------


def _columns(steps: Sequence[Step], hooks: Collection[int] | None) -> list[list[Ints]]:
    """Per column, the integers of each rank."""
    plain = [[getattr(step, name) for step in steps] for name in _PLAIN]
    for position, name in enumerate(_PLAIN):
        if name in _HOOKS and hooks is not None:
            plain[position] = [getattr(step, name) if step.rank in hooks else [] for step in steps]
    ready = [_carried(step.comm_ready) for step in steps]
    return [
        [_scalars(step) for step in steps],
        [[_PHASES.index(span.phase) for span in step.spans] for step in steps],
        [_differences([at for span in step.spans for at in (span.start, span.end)]) for step in steps],
        [_differences([at for pair in step.data or () for at in pair]) for step in steps],
        *(_each(_differences, column) for column in plain),
        _each(_op_numbers, [step.comm_op for step in steps]),
        [_known(step.comm_ready) for step in steps],
        [_differences(at) for at in ready],
        [_differences(list(map(sub, step.comm_launch, at))) for step, at in zip(steps, ready, strict=True)],
        [_known(step.comm_start) for step in steps],
        [_since_launch(step) for step in steps],
        [_known(step.comm_done) for step in steps],
        [_differences(_carried(step.comm_done)) for step in steps],
        *([_known(getattr(step, name)) for step in steps] for name in _WAITS),
        *([_differences(_carried(getattr(step, name))) for step in steps] for name in _WAITS),
    ]


def _steps(ranks: Sequence[int], columns: list[list[Ints]]) -> Iterator[Step]:
    scalars, phases, stamps, data, *rest = columns
    plain = [_each(_column, column) for column in rest[: len(_PLAIN)]]
    ops, ready_known, ready, launch, start_known, start, done_known, done, *waits = rest[len(_PLAIN) :]
    wait_known, wait = waits[: len(_WAITS)], waits[len(_WAITS) :]
    names, named = _each(_phase_names, phases), _each(_op_names, ops)
    for position, rank in enumerate(ranks):
        ready_at = _sums(ready[position])
        launched = _in_range(list(map(add, _sums(launch[position]), ready_at)))
        spans = zip(names[position], _pairs(stamps[position]), strict=True)
        about = _about(scalars[position])
        has_data = about.pop("has_data")
        about |= {name: column[position] for name, column in zip(_PLAIN, plain, strict=True)}
        for name, known, at in zip(_WAITS, wait_known, wait, strict=True):
            about[name] = _sparse(known[position], _sums(at[position]))
        yield Step(
            rank=rank,
            **about,
            spans=[Span(phase, *pair) for phase, pair in spans],
            data=list(_pairs(data[position])) if has_data else None,
            comm_op=named[position],
            comm_ready=_sparse(ready_known[position], ready_at),
            comm_launch=launched,
            comm_start=_sparse(start_known[position], list(map(add, start[position], launched))),
            comm_done=_sparse(done_known[position], _sums(done[position])),
        )  # fmt: skip


def _scalars(step: Step) -> Ints:
    return [
        step.step, step.micro_steps, step.epoch, step.own_ns, step.sender_ns, step.dropped,
        _from_optional(step.comm_first_seq), _from_optional(step.clock_error_ns), _from_optional(step.cpu_ns),
        step.start_ns, step.duration_ns, _STATUSES.index(step.status), step.synced, step.reduced,
        step.data is not None,
    ]  # fmt: skip


def _about(scalars: Ints) -> dict[str, Any]:
    """The fields of `_scalars`."""
    *counts, first, clock_error, cpu, start_ns, duration_ns, status, synced, reduced, has_data = scalars
    number, micro_steps, epoch, own_ns, sender_ns, dropped = counts
    if min(*counts, first, clock_error, cpu, duration_ns, status) < 0:
        raise ValueError("a negative count")
    if max(*counts, first - 1, clock_error - 1, cpu - 1) >= _COUNT_LIMIT:
        raise ValueError("a count out of range")
    _in_range([start_ns, duration_ns])
    return {
        "step": number, "micro_steps": micro_steps, "epoch": epoch, "own_ns": own_ns, "sender_ns": sender_ns,
        "dropped": dropped, "comm_first_seq": _to_optional(first), "clock_error_ns": _to_optional(clock_error),
        "cpu_ns": _to_optional(cpu), "start_ns": start_ns, "duration_ns": duration_ns, "status": _STATUSES[status],
        "synced": bool(synced), "reduced": bool(reduced), "has_data": bool(has_data),
    }  # fmt: skip


def _each(function: Callable[[list[_In]], list[_Out]], rows: Sequence[list[_In]]) -> list[list[_Out]]:
    """The function of each rank's row. Mostly all rows are equal: then they share one list."""
    found: list[list[_Out]] = []
    before: list[_In] | None = None
    for row in rows:
        found.append(found[-1] if before is not None and (row is before or row == before) else function(row))
        before = row
    return found


def _from_optional(value: int | None) -> int:
    return 0 if value is None else value + 1


def _to_optional(value: int) -> int | None:
    return value - 1 if value else None


def _op_numbers(ops: list[CollectiveOp]) -> Ints:
    return [_OPS.index(op) for op in ops]


def _op_names(numbers: Ints) -> list[CollectiveOp]:
    return [_OPS[_index(number)] for number in numbers]


def _phase_names(numbers: Ints) -> list[PhaseName]:
    return [_PHASES[_index(number)] for number in numbers]


def _index(number: int) -> int:
    if number < 0:
        raise ValueError("a negative index")
    return number


def _differences(values: Ints) -> Ints:
    return list(map(sub, values, [0, *values]))


def _sums(differences: Ints) -> Ints:
    return _wrapped(list(accumulate(differences)))


def _column(differences: Ints) -> Ints:
    return _in_range(_sums(differences))


def _known(column: Sequence[int | None]) -> Ints:
    return [at is not None for at in column]


def _carried(column: Sequence[int | None]) -> Ints:
    """The column with the value before it in place of what is not known."""
    before = 0
    return [before if at is None else (before := at) for at in column]


def _since_launch(step: Step) -> Ints:
    starts = zip(step.comm_start, step.comm_launch, strict=False)
    return [0 if at is None else at - launch for at, launch in starts]


def _sparse(known: Ints, values: Ints) -> list[int | None]:
    if not any(known):
        return [None] * len(known)
    _in_range(values)
    return [at if has else None for has, at in zip(known, values, strict=True)]


def _pairs(differences: Ints) -> Iterator[tuple[int, int]]:
    values = _column(differences)
    return zip(values[::2], values[1::2], strict=True)


def _in_range(values: Ints) -> Ints:
    if values and (min(values) <= -_NS_LIMIT or max(values) >= _NS_LIMIT):
        raise ValueError("a time out of range")
    return values


# -- columns as integers, and integers as bytes ----------------------------------------------------------------------


def _unpacked(words: Ints, ranks: int) -> Iterator[list[Ints]]:
    """The columns, each of all ranks."""
    at, expanded = _COLUMNS * ranks, 0
    if len(words) < at:
        raise ValueError("too short")
    for number in range(_COLUMNS):
        longest = MAX_LENGTH * (2 if number in _PAIRS else 1)
        column: list[Ints] = []
        before: Ints = []
        by_length: dict[int, Ints] = {}
        for code in words[number * ranks : (number + 1) * ranks]:
            if code:
                row = words[at : at + code - 1]
                if not 0 < code <= longest + 1 or len(row) < code - 1:
                    raise ValueError("bad length")
                reference = by_length.get(len(row))
                before = row if reference is None else _wrapped(list(map(add, row, reference)))
                by_length[len(row)] = before
                at += len(row)
            column.append(before)
            expanded += len(before)
            if expanded > MAX_EXPANDED:
                raise ValueError("too many numbers")
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
