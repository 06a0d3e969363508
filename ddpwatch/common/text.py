"""Formats names and figures as text: safe names, numbers with units, percentages, sizes, aligned tables.

Names come from other processes and from files. `clean` drops control, formatting and bidirectional characters (Unicode
categories Cc, Cf, Cs, Co, Cn, Zl, Zp), so that no name can move the cursor, ring the bell, or recolour or reorder its
neighbours.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from math import floor

from ddpwatch.common.units import NS_PER_MS

UNKNOWN = "–"
_DROPPED = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def clean(text: str) -> str:
    """Returns the text without characters that affect more than their own cell."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if unicodedata.category(c) not in _DROPPED)


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """Returns a figure with its unit, or a dash."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}{unit}"


def three_digits(value: float | None) -> str:
    """Returns three significant digits, at most four decimals, never an exponent; a dash for None."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    if abs(value) >= 9.995 or value == 0:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.0995 else f"{value:.4f}"


def ms(ns: float | None) -> str:
    """Formats nanoseconds as a number of milliseconds, without the unit."""
    if ns is None:
        return UNKNOWN
    value = ns / NS_PER_MS
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


def in_ms(ns: float) -> str:
    """Returns a duration in milliseconds, for a sentence; from 10 s on in seconds."""
    value = ns / NS_PER_MS
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{two_digits(value)} ms"


def two_digits(value: float) -> str:
    """Returns at least two significant digits, of what is not below 1."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def with_unit(text: str, unit: str) -> str:
    """Returns a formatted figure and its unit; no unit on a dash."""
    return text if text == UNKNOWN else f"{text} {unit}"


def percent(value: float | None, digits: int = 0) -> str:
    """Returns a ratio as a percentage, or a dash."""
    return UNKNOWN if value is None else f"{value:.{digits}%}".replace("%", " %")


def plus_minus(text: str, reach: str) -> str:
    """Returns a formatted figure with half the width of its interval, unless that rounds to 0: ``12.3 ±0.4``."""
    is_wide = reach != UNKNOWN and any(digit in reach for digit in "123456789")
    return f"{text} ±{reach}" if text != UNKNOWN and is_wide else text


def adding_up(total: float, parts: Sequence[float], digits: int = 1) -> list[str]:
    """Returns parts rounded so that they add up to the rounded total: those with the largest remainders are raised."""
    unit = 10**digits
    left = round(float(f"{total:.{digits}f}") * unit) - sum(floors := [floor(part * unit) for part in parts])
    by_remainder = sorted(range(len(parts)), key=lambda place: floors[place] - parts[place] * unit)
    for place in by_remainder[: max(left, 0)]:
        floors[place] += 1
    return [f"{part / unit:,.{digits}f}" for part in floors]


def spans(numbers: Sequence[int], most: int = 4, gap: str = ",") -> str:
    """Returns ascending numbers, three or more in a row as ``616–623``; the first ``most`` of many such runs."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], value]
        else:
            runs.append([value])
    texts = ["–".join(map(str, run)) if run[-1] - run[0] > 1 else gap.join(map(str, run)) for run in runs]
    return gap.join(texts[:most]) + (f"{gap.strip(',')}…" if len(texts) > most else "")


def one_of(ranks: Sequence[int]) -> str:
    """Names ranks of which it is one: "one of 3, 9"."""
    return f"one of {', '.join(map(str, ranks))}"


def size(nbytes: float | None) -> str:
    """Returns a size in bytes with a binary unit, or a dash."""
    if nbytes is None:
        return UNKNOWN
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def short_count(value: float | None, gap: str = "") -> str:
    """Returns three digits, the gap, and the prefix of a power of 1,000: ``12.3k``, ``989 T``; or a dash."""
    if value is None:
        return UNKNOWN
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{three_digits(value)}{gap}{prefixes[0]}"


def duration(seconds: float) -> str:
    """Returns a duration in the unit that suits it: ``2.9 s``, ``32 min``, ``5.2 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(number: int | None, name: str) -> str:
    """Returns how many there are: ``1 rank``, ``2 ranks``, and ``– ranks`` if that is not known."""
    return f"{UNKNOWN if number is None else number} {name}{'' if number == 1 else 's'}"


def run_size(ranks: int, rank_seconds: float) -> str:
    """Returns what accounts add up to: ``8 ranks × 32 min``."""
    return f"{counted(ranks, 'rank')} × {duration(rank_seconds / max(1, ranks))}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Returns the lines of a table with right-aligned columns.

    If it were wider than ``width``, headings take two lines, and columns come closer if that is not enough; else the
    widest columns go below their rows.
    """
    lines, columns = _aligned([header, *rows], "  "), range(len(header))
    if width is None or len(lines[0]) <= width:
        return lines
    by_size = sorted(columns, key=lambda at: max((len(row[at]) for row in rows), default=0))
    for count in reversed(columns):
        kept, below = sorted(by_size[: count + 1]), sorted(by_size[count + 1 :])
        lines = _folded([[row[at] for at in kept] for row in (header, *rows)], width)
        if len(lines[-1]) <= width:
            break
    for place, row in reversed([*enumerate(rows, start=len(lines) - len(rows) + 1)]):
        lines[place:place] = [f"    {header[at]}: {row[at]}" for at in below if row[at] != UNKNOWN]
    return lines


def _folded(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Returns the lines of a table whose headings take two; columns come closer if it is wide."""
    folded = [*zip(*map(_halves, rows[0]), strict=True), *rows[1:]]
    lines = _aligned(folded, "  ")
    first, *others = lines if len(lines[-1]) <= width else _aligned(folded, " ")
    return [first.rstrip(), *others]


def _aligned(rows: Sequence[Sequence[str]], gap: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _halves(heading: str) -> tuple[str, str]:
    """Returns a heading in two lines, the unit below."""
    first, _, last = heading.rpartition(" ")
    return first, last
