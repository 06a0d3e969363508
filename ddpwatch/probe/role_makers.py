"""Sees what says what process groups are for: meshes make their dimensions, and pipelines their stages.

Of a group that spans all ranks, nothing else does. These may be made before `watch()`, which only `ddpwatch run` sees,
or after it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Final

from ddpwatch.probe.calls import SeenCalls

_log = logging.getLogger("ddpwatch")
_seen: set[str] = set()
_asked: set[str] = set()


def see_roles(module: Any) -> None:
    """Notes what groups are for, wherever one of `ROLE_MAKERS` says it, from now on. Never raises.

    Args:
        module: It, just imported.
    """
    if module.__name__ in _seen:
        return
    _seen.add(module.__name__)
    owner, method, names, made = ROLE_MAKERS[module.__name__]
    function = getattr(getattr(module, owner, None), method, None)
    SeenCalls([], end=made, names=names, on_error=unnamed, code=getattr(function, "__code__", None))


def see_all_roles() -> None:
    """Does so once each of these modules is imported, or now."""
    import wrapt  # takes 60 ms, of which torch imports most itself

    for name in ROLE_MAKERS.keys() - _asked:
        _asked.add(name)
        wrapt.register_post_import_hook(see_roles, name)


def _made_dimension(name: str, group_name: object) -> None:
    from ddpwatch.probe.group_roles import note_dimension  # imports torch.distributed, whose import may be under way

    note_dimension(name, group_name)


def _made_stage(group: Any, result: None) -> None:
    from ddpwatch.probe.group_roles import note_pipeline

    note_pipeline(group)


def unnamed(error: Exception) -> None:
    """Notes an error of ddpwatch's; raises one of the job's, from a signal handler."""
    guard = sys.modules.get("ddpwatch.probe.guard")
    if guard is not None and guard.is_the_jobs(error):
        raise error
    reason = type(error).__name__ if guard is None else str(guard.reason_of(error))
    _log.debug("ddpwatch does not know what the job calls its process groups: %s", reason)


# By module: the class there, its method, the parameters that matter, and what notes these
ROLE_MAKERS: Final[dict[str, tuple[str, str, list[str], Callable[..., None]]]] = {
    "torch.distributed.device_mesh": ("DeviceMesh", "_init_one_process_group", ["dim_name"], _made_dimension),
    "torch.distributed.pipelining.stage": ("_PipelineStageBase", "__init__", ["group"], _made_stage),
}
