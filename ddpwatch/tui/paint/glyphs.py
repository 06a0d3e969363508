"""The glyphs of timelines. With colour, a bar is solid; without, its glyph identifies it."""

from __future__ import annotations

PHASES = {"data": "≈", "forward": "▒", "backward": "▓", "optimizer": "░"}
IDLE = "·"
COMM = {"comm-a": "█", "comm-b": "█", "waits": "╍", "exposed": "╱", "waits-exposed": "╲"}
EXPOSED = {"comm-a": "exposed", "comm-b": "exposed", "waits": "waits-exposed"}  # what it becomes while exposed
LAUNCH = "▸"
MARK, MARK_LINE = "◆", "╌"
HOOK_LEFT, HOOK_RIGHT, HOOK_BOTH = "⡇", "⢸", "⣿"

HALVES = "/"  # in a style's name: the upper half of the cells, and the lower half
UPPER_HALF = "▀"
