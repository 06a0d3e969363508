"""Whether jobs of this Python can be watched: torch, its backends, and the interfaces that the probe needs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

from ddpwatch.doctor.check import Check, Section
from ddpwatch.subprocesses import module_command

OLDEST = (2, 6)
IMPORT_TIMEOUT_S = 120.0
_section = Section("training")


def checks() -> Iterator[Check]:
    """What torch's own process says of it; one line if torch is missing or broken."""
    if importlib.util.find_spec("torch") is None:
        yield missing()
        return
    found = torch_facts(module_command("ddpwatch.doctor.torch_facts"))
    if isinstance(found, str):
        yield broken(found)
        return
    yield version(found["version"], found["seconds"])
    yield backends(found["backends"])
    yield cuda(found["cuda"], found["devices"])
    if found["backends"]:
        yield interfaces(found["missing"], found["probe"])


def missing() -> Check:
    """There is no torch, which is all right for viewers."""
    return _section.none(
        "torch",
        "not installed in this Python: it can view and record jobs, not run them",
        "pip install 'ddpwatch[torch]'",
    )


def broken(error: str) -> Check:
    """It cannot be imported."""
    return _section.warn("torch", f"cannot be imported: {error}", "does `python -c 'import torch'` work?")


def version(text: str, import_s: float) -> Check:
    """Whether ddpwatch supports this version."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return _section.warn(
            "torch", f"{text}, older than {oldest}: jobs may go unwatched", f"use torch {oldest} or newer"
        )
    return _section.ok("torch", f"{text}, imported in {import_s:.1f} s")


def backends(names: list[str]) -> Check:
    """What can carry a job's collectives."""
    if not names:
        text = "none: this torch was built without torch.distributed, and runs no DDP job"
        return _section.warn("backends", text, "install a torch that has it")
    return _section.ok("backends", ", ".join({"gloo": "Gloo", "nccl": "NCCL", "mpi": "MPI"}[name] for name in names))


def cuda(runtime: str, devices: int) -> Check:
    """How many GPUs torch sees."""
    if devices:
        return _section.ok("CUDA", f"{devices} devices, runtime {runtime}")
    text = f"runtime {runtime}, but no device" if runtime else "none: this torch computes on CPUs"
    hint = (
        "jobs on CPUs are watched all the same"
        if not runtime
        else "is there a driver, and is CUDA_VISIBLE_DEVICES right?"
    )
    return _section.none("CUDA", text, hint)


def interfaces(absent: list[str], probe_error: str) -> Check:
    """Whether the probe can attach to this torch's DDP."""
    if probe_error:
        return _section.warn(
            "probe",
            f"cannot be imported: {probe_error}: jobs train unwatched",
            "use a version of torch that it supports",
        )
    if absent:
        text = f"this torch has no {', '.join(absent)}: jobs may train unwatched"
        return _section.warn("probe", text, "use a version of torch that has it")
    return _section.ok("probe", "all interfaces of DDP that it needs are there")


def torch_facts(command: list[str]) -> dict[str, Any] | str:
    """What `ddpwatch.doctor.torch_facts` prints, or why it prints nothing."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not within {IMPORT_TIMEOUT_S:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
