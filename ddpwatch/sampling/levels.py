"""How much of a step is recorded, and what follows from it: the statuses that a step's message carries.

| status | recorded | counted | timed | watched |
|---|---|---|---|---|
| ``ok`` | every stamp | yes | yes | yes |
| ``shadow`` | phases and ready times, no completions | yes | no | yes |
| ``unwatched`` | start, end, near a watched step CPU time | no | no | no |
| ``warmup`` | every stamp, of DDP's first reduced step | no | yes | yes |
| ``profiled`` | every stamp, under torch's profiler, or of the step that ends it | no | yes | yes |
| ``unresolved`` | CPU time: the GPU's times did not come | no | no | no |
| ``aborted`` | what came before an exception | no | yes | yes |
"""

from __future__ import annotations

from typing import Final

from ddpwatch.wire.messages import StepStatus

FULL: Final = "ok"
LIGHT: Final = "shadow"
BARE: Final = "unwatched"
UNRESOLVED: Final = "unresolved"
PROFILED: Final = "profiled"
LEVELS: Final = (BARE, LIGHT, FULL)  # from the least recorded to the most

ORDINARY = frozenset((FULL, LIGHT, BARE))  # their duration is known and holds for others
_COUNTED = frozenset((FULL, LIGHT))
_BARE = frozenset((BARE, UNRESOLVED))
_UNTIMED = _BARE | {LIGHT}
_NAMES = {"warmup": "warm-up", LIGHT: "timed in part", BARE: "duration only"}


def is_counted(status: StepStatus) -> bool:
    """Returns whether statistics include such a step."""
    return status in _COUNTED


def is_timed(status: StepStatus) -> bool:
    """Returns whether the probe timed its collectives."""
    return status not in _UNTIMED


def is_watched(status: StepStatus) -> bool:
    """Returns whether more than its start and end is known."""
    return status not in _BARE


def is_odd(status: StepStatus) -> bool:
    """Returns whether the job did something out of the ordinary: a warm-up step, a profiled one, or one that raised."""
    return is_watched(status) and not is_counted(status)


def status_name(status: StepStatus) -> str:
    """Returns the status as people read it."""
    return _NAMES.get(status, status)
