"""Runs benchmarks one after the other, and puts their tables into `RESULTS.md`.

    python -m benchmarks [NAME ...]

Without names, it runs all in half an hour: those that need root, a GPU or hours have to be asked for. A table replaces
the one before of the same name, with the command, the day, and the machine's class. Ctrl-C ends the benchmark that
runs, which then prints the rounds that it has; what was cut is not written.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
TORCHRUN = f"{Path(sys.executable).parent / 'torchrun'} --standalone --nproc-per-node=2"
JOB, PYTHON = "JOB", "python"
USUAL = {
    "overhead": f"{JOB} benchmarks/overhead.py --rounds 64",
    "profiler_truth": f"{JOB} benchmarks/profiler_truth.py",
    "collector": f"{PYTHON} benchmarks/collector.py --seconds 40",
    "many_agents": f"{PYTHON} benchmarks/many_agents.py",
    "recording": f"{PYTHON} benchmarks/recording.py",
    "dashboard": f"{PYTHON} benchmarks/dashboard.py",
    "compare_aa": f"{PYTHON} benchmarks/compare_aa.py",
    "estimates": f"{PYTHON} benchmarks/estimates.py",
    "diagnosis": f"{PYTHON} benchmarks/diagnosis.py --quick",
    "whatif_speed": f"{PYTHON} benchmarks/whatif_speed.py",
}
ASKED_FOR = {
    "overhead_fsdp2": f"{JOB} benchmarks/overhead.py --strategy fsdp2 --step-ms 10 --rounds 96",
    "profiler_truth_fsdp2": f"{JOB} benchmarks/profiler_truth.py --strategy fsdp2",
    "diagnosis_real": f"{PYTHON} benchmarks/diagnosis.py --real",
    "hosts_cost": f"{PYTHON} benchmarks/hosts_cost.py",
    "whatif": f"{PYTHON} benchmarks/whatif.py",
    "scale": f"{PYTHON} benchmarks/scale.py",
}
PLAN = USUAL | ASKED_FOR


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PLAN))
    names = parser.parse_args().names or list(USUAL)
    if unknown := set(names) - set(PLAN):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(PLAN)}")
    cut: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: cut.append(number))  # the benchmark gets it, too
    failed = []
    for name in names:
        print(f"== {name}: {PLAN[name]}", file=sys.stderr, flush=True)
        started = time.monotonic()
        code, printed = run(PLAN[name])
        if cut:
            break
        if code:
            failed.append(name)
        else:
            about = f"`{PLAN[name]}`, {machine()}, {(time.monotonic() - started) / 60:.0f} min:"
            RESULTS.write_text(with_table(RESULTS.read_text(), name, f"{about}\n\n```\n{printed.strip()}\n```"))
    print(f"failed: {', '.join(failed)}" if failed else "cut" if cut else f"written: {RESULTS}", file=sys.stderr)
    return int(bool(failed or cut))


def run(command: str) -> tuple[int, str]:
    """Runs one; its exit code, and what it has printed, which is shown as it comes."""
    expanded = command.replace(JOB, TORCHRUN, 1).replace(f"{PYTHON} ", f"{sys.executable} ", 1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    printed = []
    with subprocess.Popen(
        shlex.split(expanded), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    return process.returncode, "".join(printed)


def machine() -> str:
    """The day, and what the figures depend on; nothing that names the machine."""
    cores = len(os.sched_getaffinity(0))
    return f"{date.today()}, torch {version('torch')}, Python {platform.python_version()}, {cores} cores"


def with_table(text: str, name: str, table: str) -> str:
    """The page with a table between the markers of its name; without these, at its end."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{table}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n{block}\n"
    before, _, rest = text.partition(begin)
    return before + block + rest.partition(end)[2]


if __name__ == "__main__":
    sys.exit(main())
