"""Watches every DDP module of a process without a line in its script (`ddpwatch run`)."""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType
from typing import Any

_log = logging.getLogger("ddpwatch")


def install(distributed: ModuleType) -> None:
    """Called once ``torch.nn.parallel.distributed`` has been imported: has each DDP module watched when it is made.

    A comm hook can only be registered on a finished module, so ours always comes first and takes the user's in.
    """
    ddp_class = distributed.DistributedDataParallel
    original = ddp_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        _watch(self)

    ddp_class.__init__ = __init__


def _watch(model: Any) -> None:
    """Watches a module; whatever goes wrong is ours and must not reach a script that knows nothing of us."""
    try:
        from ddpwatch.probe.session import watch

        watch(model, record=os.environ.get("DDPWATCH_RECORD"))
    except Exception as error:
        _log.warning("ddpwatch does not watch, training goes on: %s", error)
