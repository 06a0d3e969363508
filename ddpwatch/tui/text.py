"""Text of known width for a terminal: names cut to it, lines wrapped, fields fitted."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from ddpwatch.common.text import clean


def shorten_name(name: str, width: int) -> str:
    """Makes a name from a frame safe to draw: without control, bidi, zero-width and combining characters.

    The result is at most ``width`` cells wide; "…" marks a cut.
    """
    harmless = clean(name[: 8 * max(width, 0) + 64])
    if not harmless.isascii():
        harmless = "".join(c for c in harmless if unicodedata.category(c) not in ("Mn", "Me") and cell_len(c) > 0)
    return shorten(harmless, width)


def shorten_host(called: str, width: int) -> str:
    """Does the same with what a host is called; its ranks, which distinguish it from others, are not cut."""
    name, gap, ranks = called.partition(" (")
    return shorten_name(name, width - cell_len(gap + ranks)) + shorten_name(gap + ranks, width)


def shorten(text: str, width: int) -> str:
    """Cuts a text to ``width`` cells; "…" marks the cut."""
    if cell_len(text) <= width:
        return text
    if width <= 0:
        return ""
    kept, used = [], 0
    for char in text:
        used += cell_len(char)
        if used > width - 1:
            break
        kept.append(char)
    return "".join(kept) + "…"


def first_fit(texts: Sequence[str], width: int) -> str:
    """Returns the first of some texts, the longest first, that fits into ``width`` cells; else the last one, cut."""
    return next((text for text in texts if cell_len(text) <= width), shorten(texts[-1], width))


def wrap(text: str, width: int, lines: int) -> list[str]:
    """Breaks a text between words into at most ``lines`` lines of ``width`` cells; "…" if some are left out."""
    if width <= 0 or lines <= 0:
        return []
    out = [""]
    for word in text.split():
        joined = f"{out[-1]} {word}".lstrip()
        if cell_len(joined) <= width or not out[-1]:
            out[-1] = joined
        elif len(out) < lines:
            out.append(word)
        else:
            before = out[-1] if cell_len(out[-1]) + 2 <= width else out[-1].rpartition(" ")[0]
            out[-1] = f"{before} …" if before else f"{out[-1]}…"
            break
    return [shorten(line, width) for line in out]


def flow(parts: Sequence[str], width: int, lines: int) -> list[str]:
    """Puts whole parts onto at most ``lines`` lines of ``width`` cells; "…" says that some are left out."""
    out: list[str] = []
    for part in parts:
        joined = f"{out[-1]} · {part}" if out else part
        if out and cell_len(joined) <= width:
            out[-1] = joined
        elif len(out) < lines:
            out.append(part)
        else:
            out[-1] += " …" if cell_len(out[-1]) + 2 <= width else ""
            break
    return [shorten(line, width) for line in out]


@dataclass(frozen=True, slots=True)
class Field:
    """One figure of a line: in full and in short, its priority (0 is dropped last), and its newest values."""

    full: str
    short: str
    priority: int = 0
    style: str = "text"
    spark: str = ""


def fit(fields: Sequence[Field], width: int) -> list[tuple[str, str]]:
    """Fits fields on one line, as ``(text, style)``.

    In full; or the least important ones, as few as possible, in short; or without them.
    """
    chosen = [field for field in fields if field.full]
    for gap in (3, 2):
        if _length(chosen, gap) <= width:
            return _spaced(chosen, gap)
    brief: list[Field] = []
    for field in sorted(chosen, key=lambda field: field.priority, reverse=True):
        brief.append(field)
        if _length(chosen, 2, brief) <= width:
            return _spaced(chosen, 2, brief)
    while chosen:
        if _length(chosen, 2, chosen) <= width:
            return _spaced(chosen, 2, chosen)
        if len(chosen) == 1:
            return [(shorten(chosen[0].short, width), chosen[0].style)]
        chosen.remove(max(chosen, key=lambda field: field.priority))
    return []


def fits(fields: Sequence[Field], width: int, short: bool = False) -> bool:
    """Returns whether all the fields fit on one line, in full or in short."""
    shown = [field for field in fields if field.full]
    return _length(shown, 2, shown if short else ()) <= width


def _length(fields: Sequence[Field], gap: int, brief: Collection[Field] = ()) -> int:
    texts = (cell_len(field.short if field in brief else field.full) for field in fields)
    sparks = (1 + cell_len(field.spark) for field in fields if field.spark)
    return sum(texts) + sum(sparks) + gap * max(len(fields) - 1, 0)


def _spaced(fields: Sequence[Field], gap: int, brief: Collection[Field] = ()) -> list[tuple[str, str]]:
    spaced: list[tuple[str, str]] = []
    for field in fields:
        spaced += [(" " * gap, "text")] if spaced else []
        spaced.append((field.short if field in brief else field.full, field.style))
        spaced += [(f" {field.spark}", "chart")] if field.spark else []
    return spaced
