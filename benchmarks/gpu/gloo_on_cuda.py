"""Two ranks that share a GPU, over Gloo: whether lateness, a hang and the device panel are right.

    python benchmarks/gpu/gloo_on_cuda.py

Starts the trainer with torchrun, twice, with a rank that is late and with one that hangs; then compares a sample of the
device panel with nvidia-smi. Takes about a minute and a half.

The columns:
    question    what was tried
    expected    what is true
    shown       what ddpwatch says
    agrees      whether that is the same
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.part import Row, Rows, run
from ddpwatch.analysis.window import summarise
from ddpwatch.collector.devices import DeviceSampler
from ddpwatch.errors import DdpwatchError
from ddpwatch.messages import Bye, Message
from ddpwatch.recording.reader import Recording
from ddpwatch.state import RunState
from ddpwatch.transport import Envelope

TRAIN = Path(__file__).resolve().parents[2] / "demo" / "train.py"
LATE_RANK, LATE_MS, STEPS = 1, 100, 60
HANG_STEP, KILLED_AFTER_S = 20, 40.0
QUERY = "utilization.gpu,memory.used,power.draw,temperature.gpu,clocks.sm"
COLLECTOR_S = 20.0
NEAR = 0.25  # of a reading: the two are not taken at the same moment


def on_gpu(device: str = "cuda") -> Rows:
    with tempfile.TemporaryDirectory(prefix="ddpwatch-gpu-") as folder:
        place = Path(folder)
        late = verdict_after(place / "late.mcap", device, f"slow-backward:rank={LATE_RANK},ms={LATE_MS}", None)
        hang = verdict_after(place / "hang.mcap", device, f"hang:rank={LATE_RANK},step={HANG_STEP}", KILLED_AFTER_S)
    return [
        {"question": "who is late", "expected": f"rank {LATE_RANK}", "shown": late[1], "agrees": late[0] == LATE_RANK},
        {"question": "who hangs", "expected": f"rank {LATE_RANK}", "shown": hang[1], "agrees": hang[0] == LATE_RANK},
        *(panel() if device == "cuda" else []),
    ]


def verdict_after(file: Path, device: str, fault: str, kill_after_s: float | None) -> tuple[int | None, str]:
    """Trains with a fault, and judges the recording as of its end; which rank is named, and the sentence."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(TRAIN)]
    options = ["--device", device, "--steps", str(STEPS), "--inject", fault, "--record", str(file)]
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = {**os.environ, "DDPWATCH_DIR": str(file.parent), "CUDA_VISIBLE_DEVICES": first_gpu}
    job = subprocess.Popen([*command, *options], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        job.wait(kill_after_s)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)
        job.wait()
    state = RunState()
    for message, envelope in complete(file):
        if isinstance(message, Bye):
            break
        state.apply(message, envelope.received_ns)
    found = state.verdict(summarise(state.recent()), state.diagnosis.incidents())
    return found.rank, found.text


def complete(file: Path) -> list[tuple[Message, Envelope]]:
    """The recording, once the collector has written the end of the run: it outlives the ranks by some seconds."""
    deadline = time.monotonic() + COLLECTOR_S
    while True:
        with contextlib.suppress(DdpwatchError):  # it is being written
            frames = list(Recording(file))
            if any(isinstance(message, Bye) and message.rank is None for message, _ in frames):
                return frames
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} has no end")
        time.sleep(0.2)


def panel() -> Rows:
    """The device panel's sample of the first GPU against nvidia-smi's."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    theirs = [float(value) for value in subprocess.check_output(command, text=True).split(",")]
    gpu = next(device for device in DeviceSampler().sample() if device.kind == "cuda")
    memory = None if gpu.memory_used is None else gpu.memory_used / (1 << 20)
    ours = [gpu.utilization, memory, gpu.power_w, gpu.temperature_c, gpu.sm_clock_mhz]
    return [compared(name, a, b) for name, a, b in zip(QUERY.split(","), theirs, ours, strict=True)]


def compared(name: str, expected: float, shown: float | None) -> Row:
    near = shown is not None and abs(shown - expected) <= max(NEAR * expected, 5.0)
    return {"question": name, "expected": str(expected), "shown": str(shown), "agrees": near}


if __name__ == "__main__":
    sys.exit(run("gloo_on_cuda", __doc__, on_gpu, "Gloo's copies and nvidia-smi's figures need a GPU"))
