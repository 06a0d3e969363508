"""Runs all parts one after the other, and sums up.

    python -m benchmarks.gpu [--out FOLDER]

Without a GPU, the parts do what they can on the simulated one, and say that they were not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.part import RESULTS
from ddpwatch.report.format import table

PARTS = ("timed_group", "overlap_blocking", "drift", "host_cost", "illegal_access", "gloo_on_cuda", "truth")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    out = parser.parse_args().out
    codes = {part: run(part, out / f"{part}.json") for part in PARTS}
    print(
        "\n".join(
            ["", *table(["part", "outcome", "results"], [[p, outcome(out, p, codes[p]), f"{p}.json"] for p in PARTS])]
        )
    )
    return int(any(codes.values()))


def run(part: str, out: Path) -> int:
    """Runs one part; its exit code."""
    print(f"\n== {part}", flush=True)
    out.unlink(missing_ok=True)
    return subprocess.call([sys.executable, Path(__file__).parent / f"{part}.py", "--out", out])


def outcome(out: Path, part: str, code: int) -> str:
    """In a few words."""
    file = out / f"{part}.json"
    if not file.exists():
        return f"failed with exit code {code}"
    found = json.loads(file.read_text())
    return found["why"] or ("measured" if code == 0 else "measured, outside its budget")


if __name__ == "__main__":
    sys.exit(main())
