"""Whether jobs of this Python can be watched: torch, its backends, and the parts of the probe, which are tried."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from typing import Any

from ddpwatch.doctor.check import Check, Section
from ddpwatch.run.subprocesses import module_command
from ddpwatch.version import OLDEST_TORCH, untested

TIMEOUT_S = 120.0  # importing torch may take most of it
# Each part of the probe (`ddpwatch.doctor.torch_facts`): what works with it, and what is missing without it.
PARTS = {
    "DDP": ("steps, buckets and gradients are seen", "jobs with DDP train unwatched"),
    "comm hooks": ("timed, where they are registered after watch()", "their buckets have no times"),
    "group hooks": (
        "comm hooks that are registered before watch() are timed, too",
        "comm hooks that are registered before watch() have launch times only",
    ),
    "FSDP2": ("steps, waits and collectives are seen", "jobs with FSDP2 train unwatched"),
}
_section = Section("training")


def checks() -> Iterator[Check]:
    """Yields what torch's own process says of it; one line if torch is missing or broken."""
    if importlib.util.find_spec("torch") is None:
        yield missing()
        return
    found, end = torch_facts(module_command("ddpwatch.doctor.torch_facts"))
    if "seconds" not in found:
        yield broken(end)
        return
    yield version(found["version"], found["seconds"])
    yield backends(found.get("backends", []))
    yield cuda(found.get("cuda", ""), found.get("devices", 0))
    if "gloo" in found.get("backends", ["gloo"]):
        yield from parts(found, end)


def missing() -> Check:
    """Says that there is no torch, which is all right for viewers."""
    return _section.none(
        "torch",
        "not installed in this Python: it can view and record jobs, not run them",
        "pip install 'ddpwatch[torch]'",
    )


def broken(error: str) -> Check:
    """Says that torch cannot be imported."""
    return _section.warn("torch", f"cannot be imported: {error}", "does `python -c 'import torch'` work?")


def version(text: str, import_s: float) -> Check:
    """Returns whether ddpwatch is tested with this version."""
    if beyond := untested(text):
        hint = "the lines below say what works; with a newer ddpwatch, more may"
        if beyond.startswith("older"):
            hint = f"the lines below say what works; use torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
        return _section.warn("torch", f"{text}, {beyond}", hint)
    return _section.ok("torch", f"{text}, imported in {import_s:.1f} s")


def backends(names: list[str]) -> Check:
    """Returns what can carry a job's collectives."""
    if not names:
        text = "none: this torch was built without torch.distributed, and runs no DDP job"
        return _section.warn("backends", text, "install a torch that has it")
    return _section.ok("backends", ", ".join({"gloo": "Gloo", "nccl": "NCCL", "mpi": "MPI"}[name] for name in names))


def cuda(runtime: str, devices: int) -> Check:
    """Returns how many GPUs torch sees."""
    if devices:
        return _section.ok("CUDA", f"{devices} devices, runtime {runtime}")
    text = f"runtime {runtime}, but no device" if runtime else "none: this torch computes on CPUs"
    hint = (
        "jobs on CPUs are watched all the same"
        if not runtime
        else "is there a driver, and is CUDA_VISIBLE_DEVICES right?"
    )
    return _section.none("CUDA", text, hint)


def parts(found: dict[str, Any], end: str) -> Iterator[Check]:
    """Yields what each part of the probe did in a job of one rank.

    Args:
        found: The facts, with an error for each part that was tried; see `ddpwatch.doctor.torch_facts`.
        end: How the process ended that tried them.
    """
    if "gloo" in found:
        text = f"not tried: no Gloo group of one rank can be made: {found['gloo']}"
        yield _section.warn(
            "probe", text, "set GLOO_SOCKET_IFNAME to a network interface, as jobs on Gloo need it, too"
        )
        return
    for name in PARTS:
        if name not in found:  # it crashed or hung in this one
            yield part(name, end or "not tried")
            return
        yield part(name, found[name])


def part(name: str, error: str | None) -> Check:
    """Returns what one part did: its error, empty if it works, None if this torch has no such thing."""
    works, lost = PARTS[name]
    if error is None:
        return _section.none(name, f"this torch has none: {lost}", "torch 2.14 has them")
    if error:
        return _section.warn(name, f"off, {lost}: {error}", "use a version of torch that ddpwatch is tested with")
    return _section.ok(name, works)


def torch_facts(command: list[str]) -> tuple[dict[str, Any], str]:
    """Returns what `ddpwatch.doctor.torch_facts` prints, and what its end says if it is not as it should be."""
    try:
        done = _finished(command)
        code, output, said = done.returncode, done.stdout, done.stderr.decode(errors="replace").strip()
        end = (said.splitlines() or [f"exit code {code}"])[-1] if code else ""
    except subprocess.TimeoutExpired as error:
        output, end = error.stdout or b"", f"not within {TIMEOUT_S:.0f} s"
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(b"{"):  # torch may print as well
            found.update(json.loads(line))
    return found, end


def _finished(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Returns what a process printed whose temporary files are removed: torch makes a directory for compiled code."""
    environment = dict(os.environ)
    with ExitStack() as removed:
        with suppress(OSError):  # nothing can be written there, by torch neither
            environment["TMPDIR"] = removed.enter_context(TemporaryDirectory(prefix="ddpwatch-doctor-"))
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, env=environment
        )
