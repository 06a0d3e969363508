"""Whether the device panel's sample of a GPU agrees with nvidia-smi's.

    python benchmarks/gpu/device_panel.py

Takes some seconds. The two are not taken at the same moment: a quarter more or less is near.

The columns:
    figure       as nvidia-smi calls it
    nvidia-smi   its reading
    ddpwatch     that of the panel
    near         whether they agree
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

from benchmarks.gpu.part import Row, run
from ddpwatch.collector.devices import DeviceSampler

QUERY = "utilization.gpu,memory.used,power.draw,temperature.gpu,clocks.sm"
NEAR = 0.25  # of a reading


def on_gpu() -> Iterable[Row]:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    theirs = [float(value) for value in subprocess.check_output(command, text=True).split(",")]
    gpu = next(device for device in DeviceSampler().sample() if device.kind == "cuda")
    memory = None if gpu.memory_used is None else gpu.memory_used / (1 << 20)
    ours = [gpu.utilization, memory, gpu.power_w, gpu.temperature_c, gpu.sm_clock_mhz]
    return [compared(name, a, b) for name, a, b in zip(QUERY.split(","), theirs, ours, strict=True)]


def compared(figure: str, theirs: float, ours: float | None) -> Row:
    near = ours is not None and abs(ours - theirs) <= max(NEAR * theirs, 5.0)
    return {"figure": figure, "nvidia-smi": theirs, "ddpwatch": ours, "near": near}


if __name__ == "__main__":
    sys.exit(run("device_panel", __doc__, on_gpu, "nvidia-smi needs a GPU"))
