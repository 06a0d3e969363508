"""The widget behind every view: turns painted rows into strips, and redraws only what changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ddpwatch.tui.paint import palette
from ddpwatch.tui.paint.ascii import ascii_text
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.glyphs import HALVES, UPPER_HALF


def changed_cells(row: Row, old: Row, width: int) -> tuple[int, int]:
    """Returns the first changed cell of a row and the one after the last, in complete runs.

    Only these go to the terminal.
    """
    first = last = 0
    for new_run, old_run in zip(row, old, strict=False):
        if new_run != old_run:
            break
        first += cell_len(new_run[0])
    for new_run, old_run in zip(reversed(row), reversed(old), strict=False):
        if new_run != old_run or first + last + cell_len(new_run[0]) > width:
            break
        last += cell_len(new_run[0])
    return first, max(width - last, first)


class RowStrip(Strip):
    """A row of the screen. A `Strip` divided into one piece caches itself, which is a cycle; this one does not."""

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        cuts = list(cuts)
        return [self] if cuts == [self.cell_length] else super().divide(cuts)


class PaintedView(Widget):
    """Draws the rows that `paint` gives, one `Segment` per run of equal cells."""

    ALLOW_SELECT = False

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: list[Row] = []
        self._strips: dict[int, Strip] = {}
        self._painted: tuple[int, int] = (0, 0)
        self._was_stale = False
        self.apply_theme("dark")

    def apply_theme(self, theme: str, ascii_only: bool = False) -> None:
        """Changes colours and characters."""
        self._styles = {stale: palette.styles(stale, theme) for stale in (False, True)}
        self._ascii = ascii_only
        self._half_cells = palette.SCHEMES[theme] is not None and not ascii_only
        self._strips.clear()
        self.refresh()

    @abstractmethod
    def paint(self, width: int, height: int) -> list[Row]:
        """Returns the rows to draw."""

    @property
    def stale(self) -> bool:
        """Whether the rows show a run that sends no more frames."""
        return False

    @property
    def pending(self) -> bool:
        """Whether to repaint even if no frame arrives, because work is under way."""
        return False

    def invalidate(self) -> None:
        """Has everything painted when it is drawn next; for a view that was hidden."""
        self._painted = (0, 0)

    def repaint(self) -> None:
        """Paints, and redraws the rows that differ from before."""
        width, height = self.size
        before, size_before, stale_before = self._rows, self._painted, self._was_stale
        self._rows, self._painted, self._was_stale = self.paint(width, height), (width, height), self.stale
        if self._painted != size_before or self._was_stale != stale_before:
            self._strips.clear()
            self.refresh()
            return
        changed = []
        for y, (row, old) in enumerate(zip(self._rows, before, strict=False)):
            if row != old:
                self._strips.pop(y, None)
                first, last = changed_cells(row, old, width)
                changed.append(Region(first, y, last - first, 1))
        if changed:
            self.refresh(*changed)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Returns rows of the screen, without Textual's work for borders, padding and filters."""
        return [self.render_line(y).crop(crop.x, crop.right) for y in crop.line_range]

    def render_line(self, y: int) -> Strip:
        """Returns one row of the screen."""
        if self._painted != tuple(self.size):
            self.repaint()
        if y >= len(self._rows):
            return Strip.blank(self.size.width)
        if y not in self._strips:
            row, styles = self._rows[y], self._styles[self._was_stale]
            if self._ascii:
                row = [(ascii_text(text), name) for text, name in row]
            elif self._half_cells:
                row = [(UPPER_HALF * len(text) if HALVES in name else text, name) for text, name in row]
            self._strips[y] = RowStrip([Segment(text, styles[name]) for text, name in row], self.size.width)
        return self._strips[y]
