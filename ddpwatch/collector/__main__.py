"""``python -m ddpwatch.collector``: rank 0 starts it, and the first rank of each other node."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time

from ddpwatch.collector.service import Collector, Options
from ddpwatch.errors import DdpwatchError
from ddpwatch.run import rundir
from ddpwatch.run.priority import lower_process

LAUNCHER_S = 10.0  # for a launcher to end; later, the next run removes its notes
LOOK_S = 0.1
_log = logging.getLogger("ddpwatch.collector")


def main() -> None:
    """Parses the rank's arguments and serves until the job has ended."""
    parser = argparse.ArgumentParser(prog="ddpwatch.collector", description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--watch-pid", type=int, required=True)
    parser.add_argument("--script", default="")
    parser.add_argument("--record", default="")
    parser.add_argument("--claim", type=int, default=-1, help="the claim on the run, a file descriptor")
    parser.add_argument("--control", type=int, default=-1, help="a socket to the rank that has started the collector")
    parser.add_argument("--node", default="", help="of the agent of another host than rank 0's: its name")
    parser.add_argument("--restarts", type=int, default=0, help="how many collectors of this run have died")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    lower_process()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # a scheduler's warning to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    options, ending = Options(**vars(parser.parse_args())), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # until they can be handled: the run is already announced
    collector = _made(options)
    collector.end_on(*ending)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)
    collector.run()
    for number in ending:  # it has done its work: its ranks take another exit code for a failure
        signal.signal(number, lambda *_: sys.exit(0))
    _remove_notes(options.run_id)


def _made(options: Options) -> Collector:
    """Returns the collector. Where it cannot be, it leaves nothing: the run directory was removed while it started."""
    try:
        return Collector(options)
    except DdpwatchError as error:
        _log.error("%s", error)
        with contextlib.suppress(DdpwatchError):
            rundir.remove(options.run_id)
        sys.exit(error.exit_code)


def _remove_notes(run_id: str) -> None:
    """Removes what the run's ranks have left for others in their place, once torchrun has gone, which ends last."""
    until_s = time.monotonic() + LAUNCHER_S
    with contextlib.suppress(DdpwatchError, OSError):  # no run directory
        while rundir.has_notes(run_id) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            rundir.remove_old_notes()


if __name__ == "__main__":
    main()
