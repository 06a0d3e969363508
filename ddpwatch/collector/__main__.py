"""``python -m ddpwatch.collector``: started by rank 0, not by hand."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from pathlib import Path

from ddpwatch.collector.service import Collector, Options

NICENESS = 10  # where cores are short, training goes first; a tenth of one is left even then, and that is plenty


def main() -> None:
    """Parses what rank 0 gave and serves."""
    parser = argparse.ArgumentParser(prog="ddpwatch.collector", description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--watch-pid", type=int, required=True)
    parser.add_argument("--script", default="")
    parser.add_argument("--record", default="")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # where the kernel groups by session, that is what counts
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    Collector(Options(**vars(parser.parse_args()))).run()


if __name__ == "__main__":
    main()
