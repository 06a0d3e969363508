"""Checks the machines of a job, for a minute: ``torchrun … -m ddpwatch.check`` in place of ``torchrun … train.py``.

The exit code is 1 if a rank, host or link is slow, and 2 if it was called wrongly.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist

from ddpwatch.check.judge import CheckResult, judge
from ddpwatch.check.measure import RankCheck
from ddpwatch.check.text import render_check
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.whatif.sweep import device_of

SECONDS = 60.0
LATE_S = 60.0  # after which a rank counts as stuck


def main(argv: list[str] | None = None) -> int:
    """Runs a rank's part. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="torchrun … -m ddpwatch.check", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="how long to measure (60)")
    parser.add_argument("--backend", metavar="NAME", help="gloo or nccl (default: what the devices have)")
    parser.add_argument("--disk", type=Path, default=Path(), metavar="DIR", help="on the disk to measure (here)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write JSON to FILE on each node, print nothing")
    options = parser.parse_args(argv)
    try:
        result = _run(options)
        _show(result, options)
    except DdpwatchError as error:
        print(f"ddpwatch.check: error: {error}", file=sys.stderr)
        return error.exit_code
    return int(bool(result.slow) and options.result is None)


def _run(options: argparse.Namespace) -> CheckResult:
    if "RANK" not in os.environ:
        raise UsageError("start it with torchrun", "torchrun --nproc-per-node=2 -m ddpwatch.check")
    if not 0.1 <= options.seconds <= 3600:
        raise UsageError("--seconds is from 0.1 to 3600")
    device = device_of(options.backend)
    backend = options.backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, timeout=timedelta(seconds=LATE_S + options.seconds))
    try:
        return judge(RankCheck(device, options.seconds, options.disk).run())
    finally:
        dist.destroy_process_group()


def _show(result: CheckResult, options: argparse.Namespace) -> None:
    if options.result is not None:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            options.result.write_bytes(msgspec.json.encode(result))
    elif int(os.environ["RANK"]) == 0:
        print(msgspec.json.encode(result).decode() if options.json else render_check(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
