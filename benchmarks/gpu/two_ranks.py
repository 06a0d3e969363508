"""Two ranks that share a GPU, over NCCL: are parameters those of an unwatched job, and is the right rank named?

    python benchmarks/gpu/two_ranks.py

Takes one to two minutes. `ddpwatch run` watches `two_ranks_job.py`, with a rank whose host or GPU is late, and with one
that hangs for a while; the same jobs run unwatched. Times are no measure: jobs run beside each other. Recordings are
kept in a folder beside the results. Without a GPU, some of the jobs run on the CPU, over Gloo.

The columns:
    job           see `two_ranks_job.CASES`
    exit          the exit code of the job, and of the bare one
    equal         whether all ranks' parameters are bit-identical to the unwatched job's; faults change none
    steps         that were recorded, of all ranks; all in full
    with times    of these, those whose GPU times came
    expected      the rank that is late, or hangs
    named         the ranks that incidents name
    says          the first of these incidents
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.part import Row, command_line, run
from benchmarks.gpu.two_ranks_job import CASES, FAULTY_RANK, Case
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.recording.reader import Recording
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Beat, Bye, Step

JOB = Path(__file__).with_name("two_ranks_job.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
DDPWATCH = [sys.executable, "-m", "ddpwatch", "run", "--headless", "--record"]
KINDS = ("straggler", "hang")  # of incidents that name a rank
AT_ONCE = max(1, min(3, (os.cpu_count() or 1) // 2))
LIMIT_S = 150.0


class Outcome(NamedTuple):
    """How a job ended, and its ranks' parameters."""

    code: int
    parameters: list[str]


def jobs(names: list[str], device: str, folder: Path) -> Iterator[Row]:
    """One row per job. Jobs that differ in their fault have one twin."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {like(CASES[name]) for name in names}
    twins = {like(case): name for name, case in reversed(CASES.items()) if like(case) in wanted}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        plain = {key: pool.submit(ended, name, device) for key, name in twins.items()}
        watched = {name: pool.submit(ended, name, device, folder / f"{name}.mcap") for name in names}
        for name in names:
            yield row(name, watched[name].result(), plain[like(CASES[name])].result(), folder / f"{name}.mcap")


def like(case: Case) -> tuple[str, str | None]:
    """What makes a difference to the parameters."""
    return case.strategy, case.backend


def ended(name: str, device: str, recording: Path | None = None) -> Outcome:
    """Runs a job; watched, if it is recorded."""
    with tempfile.TemporaryDirectory(prefix="ddpwatch-gpu-") as place:
        command = [*TORCHRUN, str(JOB), name, "--device", device]
        if recording is not None:
            command = [*DDPWATCH, str(recording), "--", *command]
        environment = {**os.environ, "DDPWATCH_DIR": place, "DDPWATCH_DETAIL": "full", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        print(f"{name}: {done.stderr[-2000:]}", file=sys.stderr)
    return Outcome(done.returncode, printed(done.stdout))


def printed(output: str) -> list[str]:
    """What the ranks say of their parameters. Lines of two ranks may run into each other."""
    return sorted(re.findall("parameters [0-9]+ [0-9a-f]{16}", output))


def row(name: str, watched: Outcome, plain: Outcome, recording: Path) -> Row:
    fault = CASES[name].fault
    steps, named, says = found_in(recording, ("hang",) if fault == "hang" else KINDS)
    return {
        "job": name,
        "exit": f"{watched.code}, {plain.code}",
        "equal": bool(plain.parameters) and watched.parameters == plain.parameters,
        "steps": len(steps),
        "with times": sum(step.status != "unresolved" for step in steps),
        "expected": f"{FAULTY_RANK}" if fault else "–",
        "named": ", ".join(map(str, named)) or "–",
        "says": says,
    }


def found_in(recording: Path, kinds: tuple[str, ...]) -> tuple[list[Step], list[int], str]:
    """The steps, the ranks that incidents of some kinds name, and the first of these incidents.

    At each heartbeat, as a viewer would see them: a hang that is over is a pause.
    """
    state, steps, naming = RunState(), list[Step](), list[Incident]()
    for message, envelope in Recording(recording):
        state.apply_message(message, envelope.received_ns)
        if isinstance(message, Step):
            steps.append(message)
        if isinstance(message, Beat | Bye):
            naming = [incident for incident in state.diagnosis.incidents() if incident.kind in kinds] or naming
    ranks = sorted({rank for incident in naming for rank in incident.ranks})
    return steps, ranks, naming[0].message if naming else "–"


if __name__ == "__main__":
    folder = command_line("two_ranks", __doc__).parse_args().out.with_suffix("")
    on_cpu = partial(jobs, [name for name, case in CASES.items() if case.on_cpu], "cpu", folder)
    sys.exit(run("two_ranks", __doc__, partial(jobs, list(CASES), "cuda", folder), on_cpu))
