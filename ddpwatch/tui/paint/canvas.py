"""A grid of cells to paint on. Its rows are runs of equally styled text, as `Strip` needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import ne

from rich.cells import cell_len

Run = tuple[str, str]  # text, style name (see palette.py)
Row = list[Run]


class Canvas:
    """``width`` x ``height`` cells, each with a character and a style. Text outside is cut off."""

    def __init__(self, width: int, height: int) -> None:
        self.width = max(width, 0)
        self.height = max(height, 0)
        self._chars = [[" "] * self.width for _ in range(self.height)]
        self._styles = [["text"] * self.width for _ in range(self.height)]
        self._wide = False  # whether any character written is not one cell wide

    def put(self, x: int, y: int, text: str, style: str | None = "text") -> int:
        """Writes text from cell ``x`` on; style None keeps the style of the cells. Returns the cell after it."""
        if self._wide or not _one_cell_each(text):
            return self._put_wide(x, y, text, style)
        first, last = max(x, 0), min(x + len(text), self.width)
        if 0 <= y < self.height and first < last:
            self._chars[y][first:last] = text[first - x : last - x]
            if style is not None:
                self._styles[y][first:last] = [style] * (last - first)
        return x + len(text)

    def put_runs(self, x: int, y: int, runs: Iterable[Run]) -> int:
        """Writes styled texts one after the other. Returns the cell after them."""
        for text, style in runs:
            x = self.put(x, y, text, style)
        return x

    def fill(self, start: int, end: int, y: int, glyph: str, style: str) -> None:
        """Fills the cells [start, end) of a row."""
        if not 0 <= y < self.height:
            return
        first, last = max(start, 0), min(end, self.width)
        if self._wide:
            for x in range(first, last):
                self._set(x, y, glyph, 1, style)
        elif first < last:
            self._chars[y][first:last] = [glyph] * (last - first)
            self._styles[y][first:last] = [style] * (last - first)

    def put_cells(self, x: int, y: int, chars: Sequence[str], styles: Sequence[str]) -> None:
        """Sets the cells from ``x`` on, as far as the row goes. No character may be wide."""
        last = min(x + len(chars), self.width)
        if 0 <= y < self.height and x < last:
            self._chars[y][x:last] = chars[: last - x]
            self._styles[y][x:last] = styles[: last - x]

    def style_at(self, x: int, y: int) -> str:
        """Returns the style of a cell; empty outside."""
        return self._styles[y][x] if 0 <= y < self.height and 0 <= x < self.width else ""

    def char_at(self, x: int, y: int) -> str:
        """Returns the character of a cell; empty outside."""
        return self._chars[y][x] if 0 <= y < self.height and 0 <= x < self.width else ""

    def styles(self) -> set[str]:
        """Returns the styles of all cells."""
        return set().union(*self._styles)

    def rows(self) -> list[Row]:
        """Returns the rows, each of exactly ``width`` cells."""
        return [_runs(chars, styles) for chars, styles in zip(self._chars, self._styles, strict=True)]

    def _put_wide(self, x: int, y: int, text: str, style: str | None) -> int:
        for char in text:
            size = cell_len(char)
            if 0 <= y < self.height and x >= 0 and x + size <= self.width:
                self._set(x, y, char, size, style)
            x += size
        return x

    def _set(self, x: int, y: int, char: str, size: int, style: str | None) -> None:
        self._wide = self._wide or size != 1
        chars = self._chars[y]
        if not chars[x] and x:
            chars[x - 1] = " "  # the second half of a wide character loses its first
        if x + size < self.width and not chars[x + size]:
            chars[x + size] = " "
        chars[x] = char
        for extra in range(x + 1, x + size):
            chars[extra] = ""
        if style is not None:
            self._styles[y][x : x + size] = [style] * size


@lru_cache(maxsize=4096)
def _one_cell_each(text: str) -> bool:
    return (text.isascii() and text.isprintable()) or all(cell_len(char) == 1 for char in text)


def _runs(chars: list[str], styles: list[str]) -> Row:
    if not chars:
        return []
    cuts = [x for x, differs in enumerate(map(ne, styles, styles[1:]), start=1) if differs]
    return [("".join(chars[a:b]), styles[a]) for a, b in zip([0, *cuts], [*cuts, len(chars)], strict=True)]


def plain(rows: Iterable[Row]) -> list[str]:
    """Returns the rows as plain text, trailing blanks cut."""
    return ["".join(text for text, _ in row).rstrip() for row in rows]
