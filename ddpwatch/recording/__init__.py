"""Recordings: raw frames with their receive time, in MCAP files.

    from ddpwatch.recording import open_recording
    for step in open_recording("run.mcap").steps(): ...

The name is brought in when it is first used: it works out figures, which the recorder need not know how to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpwatch.export.library import open_recording

__all__ = ["open_recording"]


def __getattr__(name: str) -> Any:
    if name != "open_recording":
        raise AttributeError(f"module 'ddpwatch.recording' has no attribute {name!r}")
    from ddpwatch.export.library import open_recording

    return open_recording
