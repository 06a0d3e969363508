"""Replaces characters beyond ASCII cell by cell, for terminals and fonts without them."""

from __future__ import annotations

from functools import lru_cache

from rich.cells import cell_len

_GLYPHS = {
    "▒": "=", "▓": "#", "░": "~", "█": "%", "╱": "/", "·": ".", "▸": ">", "▾": "v", "▶": ">", "◀": "<", "▼": "v",
    "⡇": "'", "⢸": "'", "⣿": '"', "◆": "*", "╌": "-", "─": "-", "━": "=", "┄": ".", "│": "|", "╵": "|", "▲": "^",
    "△": "^", "–": "-", "…": ">", "×": "x", "←": "<", "→": ">", "↑": "^", "↓": "v", "✗": "x", "✓": "+", "≤": "<",
    "°": "o", "“": '"', "”": '"', "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#", "⠀": " ",
    "●": "@", "○": "o", "≈": ":", "╲": "\\", "╍": "-",
}  # fmt: skip


@lru_cache(maxsize=4096)
def ascii_text(text: str) -> str:
    """Returns the text in ASCII, of the same width."""
    return text if text.isascii() else "".join(_char(char) for char in text)


def _char(char: str) -> str:
    if char.isascii():
        return char
    if char in _GLYPHS:
        return _GLYPHS[char]
    return "*" if "⠀" < char <= "⣿" else "?" * cell_len(char)
