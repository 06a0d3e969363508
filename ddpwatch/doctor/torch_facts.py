"""Prints what this Python's torch offers, and which parts of the probe work with it: a JSON object a line.

The doctor runs it in a process of its own, since torch may be broken: what was printed before it crashes or hangs
counts. No CUDA context is made, as that takes GPU memory from jobs. Nothing is left.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

STEPS = 4  # the buckets are rebuilt in the first


def facts() -> Iterator[tuple[str, Any]]:
    """Yields the version, the backends, the number of CUDA devices, then each of `TRIALS` with its error."""
    began = time.monotonic()
    import torch

    yield "version", str(torch.__version__)
    yield "seconds", time.monotonic() - began
    yield "cuda", str(torch.version.cuda or torch.version.hip or "")
    yield "devices", torch.cuda.device_count()
    distributed = torch.distributed.is_available()
    names = [n for n in ("gloo", "nccl", "mpi") if distributed and getattr(torch.distributed, f"is_{n}_available")()]
    yield "backends", names
    if "gloo" not in names:
        return
    try:
        _start_job_of_one_rank()
    except Exception as error:
        yield "gloo", _text(error)
        return
    for name, trial in TRIALS.items():
        yield name, _error_of(trial)
    torch.distributed.destroy_process_group()


def _start_job_of_one_rank() -> None:
    import torch.distributed as dist

    if any(name == "lo" for _, name in socket.if_nameindex()):  # else Gloo looks for the host's name in the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _error_of(trial: Callable[[], bool]) -> str | None:
    try:
        return "" if trial() else None
    except Exception as error:
        return _text(error)


def _text(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    return text.removeprefix("RuntimeError: ").removesuffix(": ")


def _ddp(hooks: str = "") -> Any:
    """Returns a watched DDP model: with a comm hook from ``before`` it was watched, or from ``after``."""
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from ddpwatch.probe.ddp import DdpProbe

    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=0.0001)
    if hooks == "before":
        model.register_comm_hook(None, allreduce_hook)
    watched = _watch(model, DdpProbe)
    if hooks == "after":
        model.register_comm_hook(None, allreduce_hook)
    return watched


def _watch(model: Any, probe: Any) -> Any:
    """Returns what trains the model, and then returns its last step as a message and the number of its layouts."""
    import torch

    from ddpwatch.probe.guard import Guard
    from ddpwatch.probe.guarded import ProbeContext
    from ddpwatch.probe.recorder import StepRecorder
    from ddpwatch.wire.messages import Layout

    records: list[Any] = []
    published: list[Any] = []
    errors: list[tuple[str, Exception]] = []
    recorder = StepRecorder(records.append)
    guard = Guard(lambda feature, error: errors.append((feature, error)))
    context = ProbeContext(recorder, guard, published.append)
    attached = probe(model, context)

    def train() -> tuple[Any, int]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            model(torch.ones(2, 4)).sum().backward()
            recorder.optimizer_begin()
            optimizer.step()
            recorder.optimizer_end()
            optimizer.zero_grad()
        recorder.finish()
        attached.close()
        context.completions.stop()
        for feature, error in errors:
            raise RuntimeError(f"{feature}: {_text(error)}") from error
        return records[-1].message(0, 0), sum(isinstance(message, Layout) for message in published)

    return train


def try_ddp() -> bool:
    """Watches a DDP model."""
    step, layouts = _ddp()()
    _expect("buckets", layouts and step.comm_label)
    _expect("completions", None not in step.comm_done)
    _expect("ready gradients", step.hook_ns)
    return True


def try_comm_hook() -> bool:
    """Watches one that is given a comm hook then."""
    step, _ = _ddp("after")()
    _expect("buckets of the comm hook", step.comm_label)
    _expect("its completions", None not in step.comm_done)
    return True


def try_group_hooks() -> bool:
    """Watches one that had a comm hook before; only a process group's own hooks show how that ends."""
    import torch.distributed as dist

    from ddpwatch.probe.ddp_collectives import GroupHooks

    if not GroupHooks.supported(dist.group.WORLD):
        return False
    step, _ = _ddp("before")()
    _expect("collectives", step.comm_label)
    _expect("completions", None not in step.comm_done)
    return True


def try_fsdp2() -> bool:
    """Watches a model of FSDP2, which communicates nothing within one rank: what the probe puts there is tried."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ddpwatch.probe.fsdp import FsdpProbe

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh)
    step, layouts = _watch(fully_shard(model, mesh=mesh), FsdpProbe)()
    _expect("parameter groups", layouts)
    _expect("forward and backward", {"forward", "backward"} <= {span.phase for span in step.spans})
    return True


def _expect(what: str, seen: object) -> None:
    if not seen:
        raise LookupError(f"no {what} seen")


TRIALS = {
    "DDP": try_ddp,
    "comm hooks": try_comm_hook,
    "group hooks": try_group_hooks,
    "FSDP2": try_fsdp2,
}

if __name__ == "__main__":
    for fact in facts():
        print(json.dumps(dict([fact])), flush=True)
