"""Measures how far the host times of GPU stamps are off after 3,000 steps without a synchronisation.

    python benchmarks/gpu/drift.py

Takes about a minute on a GPU. The job runs as far ahead of the GPU as it can. Then it waits for the GPU, which gives
tight bounds: a second look at the same moment shows how far the first was off.

The columns:
    drift ppm     true drift of the simulated GPU
    off us        host time of the last step before the synchronisation, minus that of the same step after it
    stated us     how far it may have been off, by its own word
    after us      the same, after the synchronisation
    from, to ppm  bounds of the drift in the end
    epochs        how often the clocks seemed to jump
    resolved      steps whose GPU times came
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from benchmarks.gpu.job import LARGE, LEVELS, Job
from benchmarks.gpu.part import Row, Rows, run
from ddpwatch.probe.cuda import CudaClock
from tests.support.simulated_gpu import MS, SimulatedJob

STEPS = 3000
CALIBRATION_STEPS = 20
SIMULATED_PPM = (-50.0, 0.0, 10.0)


def measure(
    job: Job | SimulatedJob, step: Callable[[], None], synchronise: Callable[[], None], clock: CudaClock
) -> Row:
    for _ in range(STEPS):
        step()
    known, moment = clock._map, clock._anchor_ns
    before, stated = known.host_ns(moment), known.error_ns(moment)
    for _ in range(CALIBRATION_STEPS):
        synchronise()
        step()
    after = known.host_ns(moment)
    slowest, fastest = known.drift_ppm
    return {
        "off us": (before - after) / 1e3,
        "stated us": stated / 1e3,
        "after us": known.error_ns(clock._anchor_ns) / 1e3,
        "from ppm": slowest,
        "to ppm": fastest,
        "epochs": known.epoch,
        "resolved": sum(record.status in LEVELS for record in job.records),
    }


def on_gpu() -> Rows:
    torch.backends.cuda.matmul.allow_tf32 = True
    job = Job(torch.device("cuda", torch.cuda.current_device()), **LARGE)
    job.schedule.level = "shadow"
    assert isinstance(job.recorder.gpu, CudaClock)
    return [{"drift ppm": None, **measure(job, job.step, job.synchronise, job.recorder.gpu)}]


def simulated() -> Rows:
    return [{"drift ppm": ppm, **simulated_at(ppm)} for ppm in SIMULATED_PPM]


def simulated_at(ppm: float) -> Row:
    """The host is two steps ahead of the GPU, as full launch queues make it."""
    job = SimulatedJob(offset=987_654_321, ppm=ppm)

    def step() -> None:
        job.step(completions=False)
        job.gpu.host = max(job.gpu.host, job.gpu.free["compute"] - 140 * MS)

    return measure(job, step, job.gpu.synchronise, job.clock)


if __name__ == "__main__":
    sys.exit(run("drift", __doc__, on_gpu, simulated))
