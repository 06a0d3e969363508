"""Who this rank is: its introduction."""

from __future__ import annotations

import os
import socket
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.common.peak_flops import PEAK, parse_peak
from ddpwatch.run import clock, rundir
from ddpwatch.wire.messages import Hello

Flags = dict[str, bool | int | float | str | None]


def attempt() -> int:
    """Returns how often torchrun has restarted the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def hello_of(
    module: torch.nn.Module,
    backend: str,
    flags: Flags,
    timing_source: str,
    run_id: str,
    rank: int,
    world_size: int,
) -> Hello:
    """Returns the introduction of the rank that trains ``module``, with the clock that it stamps with."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    uuid = getattr(properties, "uuid", None)  # older versions of torch do not have it
    return Hello(
        run_id=run_id,
        attempt=attempt(),
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        world_size=world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=clock.boot_id(),
        time_ns=clock.time_namespace(),
        pid_ns=clock.pid_namespace(),
        start_ticks=clock.start_ticks(os.getpid()),
        device_kind=device.type,
        device_name="" if properties is None else properties.name,
        device_uuid="" if uuid is None else f"GPU-{uuid}",
        backend=backend,
        torch=str(torch.__version__),
        module=module_name(module),
        parameters=sum(p.numel() for p in module.parameters()),
        timing_source=timing_source,
        script=as_text(rundir.script_name(sys.argv[0]), 1024),
        ddp=flags,
        threads=torch.get_num_threads(),
        peak_flops=parse_peak(os.environ.get(PEAK, "")),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
    )


def ddp_flags(ddp: DistributedDataParallel) -> Flags:
    """Returns the options of a DDP module that change its timeline."""
    names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")
    flags: Flags = {name: getattr(ddp, name, None) for name in names}
    cap = getattr(ddp, "bucket_bytes_cap", None)
    flags["bucket_cap_mb"] = None if cap is None else cap / (1 << 20)
    return flags


def as_text(value: object, most: int) -> str:
    """Returns what messages can hold of a value.

    That is so many characters of it, and none that is no Unicode, as in file names.
    """
    return str(value)[:most].encode(errors="replace").decode()


def module_name(module: object) -> str:
    """Returns the class of a model; of one that FSDP2 has made a class for, the class that it was before."""
    kind = type(module)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)].__name__
