"""Recordings: the frames of a run with their receive times, in MCAP files.

    from ddpwatch.recording import open_recording
    for step in open_recording("run.mcap").steps(): ...

`open_recording` is imported on first use: it brings in the analysis, which a recorder does not need.
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
