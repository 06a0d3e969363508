"""Runs all parts one after the other, the most valuable first, and sums up.

    python -m benchmarks.gpu [--out FOLDER] [--only PART,PART] [--until SECONDS]

FOLDER/results.json holds what is known after each part: if the run is cut, all before is there. Nothing that a part has
started outlives it. Without a GPU, the parts do what they can, and say that they were not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import RESULTS, save
from ddpwatch.common.text import table

FOLDER = Path(__file__).parent
PARTS = (
    "two_ranks", "matrix", "graphs", "illegal_access", "overlap_known", "stamp_cost", "ahead",
    "overlap_blocking", "drift", "truth",
)  # fmt: skip
MARK = "GPU_BENCHMARK_PART"  # in the environment of all that a part starts
LIMIT_S, LEAST_S = 180.0, 8.0  # the most that a part may take; with less than that left, none starts
CUT = 124  # as timeout(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="these parts, in the usual order")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no part runs")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, dict[str, Any]] = {}
    try:
        run_all([part for part in PARTS if part in args.only.split(",")], args.out, args.until, found)
    except KeyboardInterrupt:
        print("\ncut", file=sys.stderr)
    rows = [[part, one["outcome"], f"{one['seconds']:.0f} s"] for part, one in found.items()]
    print("\n".join(["", *table(["part", "outcome", "took"], rows), f"results: {args.out / 'results.json'}"]))
    return int(any(one["code"] for one in found.values()))


def run_all(parts: list[str], out: Path, until_s: float, found: dict[str, dict[str, Any]]) -> None:
    """Runs parts, and writes what is found after each."""
    start = time.monotonic()
    for part in parts:
        file = out / f"{part}.json"
        file.unlink(missing_ok=True)
        begun = time.monotonic()
        left = until_s - (begun - start)
        code = run(part, file, min(left, LIMIT_S)) if left >= LEAST_S else CUT
        results = json.loads(file.read_text()) if file.exists() else {}
        about = {"outcome": outcome(results, code), "code": code, "seconds": round(time.monotonic() - begun, 1)}
        found[part] = {**about, **results}
        save(out / "results.json", found)


def run(part: str, out: Path, limit_s: float) -> int:
    """Runs one part, and ends all that it leaves behind; its exit code, or `CUT`."""
    print(f"\n== {part}", flush=True)
    mark = f"{part}.{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, FOLDER / f"{part}.py", "--out", out], env={**os.environ, MARK: mark}, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return CUT
    finally:
        while end_marked(mark):
            pass
        process.wait()


def end_marked(mark: str) -> int:
    """Kills what a part has started, whatever session it is in; how many processes that were."""
    ended = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)
                ended += 1
        except OSError:  # it has ended, or is another user's
            pass
    return ended


def outcome(results: dict[str, Any], code: int) -> str:
    """In a few words."""
    rows = len([*results.get("rows", ()), *results.get("simulated", ())])
    if code == CUT:
        return f"no time left: {rows} rows" if results else "no time left"
    if not results.get("complete"):
        return f"failed with exit code {code}: {rows} rows"
    return results["why"] or ("measured" if code == 0 else "measured, outside its budget")


if __name__ == "__main__":
    sys.exit(main())
