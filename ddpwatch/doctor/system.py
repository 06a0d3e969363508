"""The machine: this Python, process and time namespaces, GPUs."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpwatch.doctor.check import Check, Section, error_text
from ddpwatch.run import clock
from ddpwatch.version import __version__

HOST_PID_NAMESPACE = "pid:[4026531836]"  # a constant of Linux, as is the next
HOST_TIME_NAMESPACE = "time:[4026531834]"
_section = Section("system")


def checks() -> Iterator[Check]:
    """Checks software, processes, clock and GPUs."""
    yield _section.ok("ddpwatch", f"{__version__}, {Path(__file__).parents[1]}")
    yield _section.ok(
        "Python", f"{platform.python_version()}, {sys.executable}; {platform.system()} {platform.release()}"
    )
    yield processes(clock.pid_namespace())
    yield deaths(_pidfd_error())
    yield clocks(clock.boot_id(), clock.time_namespace())
    yield gpus()


def processes(namespace: str) -> Check:
    """Returns which processes are visible."""
    if not namespace:
        text = "/proc is not mounted: how a rank died is not known"
        return _section.warn("processes", text, "mount /proc")
    if namespace != HOST_PID_NAMESPACE:
        text = f"those of a container ({namespace})"
        hint = "the death of a rank in another container is noticed only when its connection or heartbeat ends"
        return _section.none("processes", text, hint)
    return _section.ok("processes", "those of the host")


def deaths(pidfd_error: str) -> Check:
    """Returns whether the collector notices a rank's death at once."""
    if pidfd_error:
        text = f"pidfd_open does not work ({pidfd_error}): deaths are noticed within half a second"
        return _section.none("deaths", text, "it needs Linux 5.3, and a seccomp filter that allows it")
    return _section.ok("deaths", "noticed at once (pidfd_open works)")


def clocks(boot_id: str, time_namespace: str) -> Check:
    """Returns whether processes of this machine can be known to share a clock."""
    if not boot_id:
        text = "no boot id: whether two processes share a clock is not known"
        return _section.warn("clock", text, "mount /proc, with /proc/sys/kernel/random/boot_id")
    own = time_namespace not in ("", HOST_TIME_NAMESPACE)
    return _section.ok(
        "clock", f"boot {boot_id[:8]}, {f'its own time namespace ({time_namespace})' if own else 'host time'}"
    )


def gpus(nvml: Any = None) -> Check:
    """Returns how many GPUs NVML shows; ``nvml`` is ``pynvml`` unless it is given."""
    unseen = "no utilisation, memory, power and temperature of GPUs"
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        count, driver = nvml.nvmlDeviceGetCount(), nvml.nvmlSystemGetDriverVersion()
    except Exception as error:  # NVMLError is made in pynvml, which may be missing
        hint = "without NVIDIA GPUs, that is all right; in a container, pass the driver in (docker run --gpus all)"
        return _section.none("GPUs", f"{unseen}: {error_text(error)}", hint)
    driver = driver.decode() if isinstance(driver, bytes) else driver
    if not count:
        return _section.none(
            "GPUs", f"{unseen}: driver {driver} has none", "are they hidden by a container or a cgroup?"
        )
    return _section.ok("GPUs", f"{count}, driver {driver}")


def _pidfd_error() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return error_text(error)
    return ""
