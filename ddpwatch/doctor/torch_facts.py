"""Prints what this Python's torch offers, as JSON. The doctor runs it in a process of its own: torch may be broken.

No CUDA context is made: that takes GPU memory from jobs.
"""

from __future__ import annotations

import json
import pkgutil
import time
from typing import Any

# What the probe uses beyond torch's documented interface. The probe's import, tried as well, covers the rest.
NEEDED = (
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    "torch.nn.parallel:DistributedDataParallel.register_comm_hook",
    "torch.distributed:Reducer._update_process_group",
    "torch.distributed:ProcessGroup._get_backend",
    "torch.distributed:ProcessGroup._register_backend",
    "torch.distributed:ProcessGroup._device_types",
    "torch.distributed:ProcessGroup.bound_device_id",
    "torch.distributed:ProcessGroup.BackendType",
    "torch.distributed.distributed_c10d:_get_default_store",
)


def facts(needed: tuple[str, ...] = NEEDED) -> dict[str, Any]:
    """Version, backends, number of CUDA devices, interfaces that are missing, and why the probe cannot be imported."""
    began = time.monotonic()
    import torch

    found: dict[str, Any] = {"version": str(torch.__version__), "seconds": time.monotonic() - began}
    found["cuda"] = str(torch.version.cuda or torch.version.hip or "")
    found["devices"] = torch.cuda.device_count()
    distributed = torch.distributed.is_available()
    found["backends"] = [
        name for name in ("gloo", "nccl", "mpi") if distributed and getattr(torch.distributed, f"is_{name}_available")()
    ]
    found["missing"] = [name.replace(":", ".") for name in needed if not _is_there(name)] if distributed else []
    found["probe"] = _probe_error() if distributed else ""
    return found


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _probe_error() -> str:
    try:
        import ddpwatch.probe  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    print(json.dumps(facts()))
