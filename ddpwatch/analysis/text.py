"""Text that is safe to draw: names come from other processes and from files.

Control, formatting and bidirectional characters (Unicode categories Cc, Cf, Cs, Zl, Zp) are dropped, so that no name
can move the cursor, ring, recolour or reorder what stands beside it.
"""

from __future__ import annotations

import unicodedata

_DROPPED = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def clean(text: str) -> str:
    """The text without characters that do more than show themselves."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if unicodedata.category(c) not in _DROPPED)
