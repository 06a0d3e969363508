"""Measures how much watching keeps compute from overlapping with collectives.

    python benchmarks/gpu/overlap_blocking.py

Starts itself for each setting: 1, 8 and 32 hardware queues (CUDA_DEVICE_MAX_CONNECTIONS). Takes about a minute. Blocks
of bare and of full steps alternate; each collective sleeps on a stream of its own beside the backward. A stream
that waits for it in a queue that compute needs makes the full steps longer.

The columns:
    queues          the setting
    bare ms         a step, by the clock: the median of blocks that end with a synchronisation
    full / bare     the ratio, and its 95 % interval (`paired.hodges_lehmann`)
    overlap %       by ddpwatch, in the full steps
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable

import torch

from benchmarks.gpu.job import Job, cycles_per_ms
from benchmarks.gpu.part import Row, run
from ddpwatch.analysis.step import figures
from tests.support.paired import hodges_lehmann, ratios

QUEUES = (1, 8, 32)
BLOCKS, STEPS = 24, 10
COLLECTIVE_MS = 1.0
MEASURE = "--measure"
NOT_SIMULATED = "which hardware queue a stream gets is the driver's choice; the simulated GPU's streams never block"


def on_gpu() -> Iterable[Row]:
    return map(of_setting, QUEUES)


def of_setting(queues: int) -> Row:
    """Measures in a process of its own: the driver reads the number of queues when it starts."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    done = subprocess.run([sys.executable, __file__, MEASURE], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{queues} queues: {done.stderr[-2000:]}")
    return {"queues": queues, **json.loads(done.stdout.splitlines()[-1])}


def measure() -> Row:
    device = torch.device("cuda", torch.cuda.current_device())
    job = Job(device, round(COLLECTIVE_MS * cycles_per_ms()), layers=16, width=4096, batch=2048)
    took: dict[str, list[float]] = {"unwatched": [], "ok": []}
    overlaps: list[float] = []
    job.steps(5)
    for _ in range(BLOCKS):
        for level, values in took.items():
            start = time.perf_counter()
            records = job.steps(STEPS, level)
            values.append((time.perf_counter() - start) / (STEPS + 1) * 1e3)
            found = [figures(record.message(0, 0)).overlap for record in records if record.status == "ok"]
            overlaps += [100 * overlap for overlap in found if overlap is not None]
    ratio = hodges_lehmann(ratios(took["ok"], took["unwatched"]))
    return {
        "bare ms": statistics.median(took["unwatched"]),
        "full / bare": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "overlap %": statistics.median(overlaps) if overlaps else None,
    }


if __name__ == "__main__":
    if sys.argv[1:] == [MEASURE]:
        print(json.dumps(measure()))
    else:
        sys.exit(run("overlap_blocking", __doc__, on_gpu, NOT_SIMULATED))
