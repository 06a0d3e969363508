"""How the ranks of a job find their collector: rank 0 starts it, and puts its address into the job's own store."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from ddpwatch import clock, rundir
from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.identity import attempt
from ddpwatch.recording.names import reserve

FIND_TIMEOUT_S = 60.0
# As `python -m ddpwatch.collector`, but without the job's directory on sys.path, and with this very package at its end.
# Python 3.10 has no option for that (-P).
_RUN_COLLECTOR = (
    "import sys; sys.path = [*filter(None, sys.path), sys.argv.pop(1)]; "
    "from ddpwatch.collector.__main__ import main; main()"
)
_log = logging.getLogger("ddpwatch")


class JobUnwatchedError(DdpwatchError):
    """Rank 0 cannot watch the job, and has said so: no other rank needs to."""


class CollectorAddress(msgspec.Struct):
    """What rank 0 publishes to the other ranks. With an empty endpoint, that it cannot watch."""

    run_id: str
    endpoint: str
    boot_id: str


class Rendezvous:
    """One rank's way to the collector. On rank 0, making this starts the collector.

    Args:
        rank: This rank.
        world_size: How many there are.
        session: Number of this session in the process, from 1.
        store: The job's c10d store; None for a job of one process.
        record: Where the collector writes a recording, or None. Only rank 0's counts.
    """

    def __init__(
        self, rank: int, world_size: int, session: int, store: Any, record: str | os.PathLike[str] | None
    ) -> None:
        self._store = store
        self._key = f"ddpwatch/{attempt()}/{session}"
        self._deadline_s = time.monotonic() + FIND_TIMEOUT_S
        self._address: CollectorAddress | None = None
        if rank == 0:
            try:
                self._address = self._start_collector(world_size, session, record)
            except Exception:
                self._publish(CollectorAddress("", "", ""))
                raise

    @property
    def run_id(self) -> str:
        """Id of the run; empty until it is known here."""
        return "" if self._address is None else self._address.run_id

    def find(self) -> CollectorAddress | None:
        """The collector's address, or None while rank 0 has not published it. Call it on the sender thread.

        Asks with ``check``, which returns at once: a waiting call would hold the store's lock, and the training thread
        would wait with it.

        Raises:
            JobUnwatchedError: Rank 0 cannot watch.
            DdpwatchError: Rank 0 has not published an address in time, or what is in the store is no run.
        """
        if self._address is None and self._store is not None:
            if not self._store.check([self._key]):
                if time.monotonic() > self._deadline_s:
                    raise DdpwatchError(f"rank 0 has not called watch() within {FIND_TIMEOUT_S:.0f} s")
                return None
            address = msgspec.json.decode(self._store.get(self._key), type=CollectorAddress)
            if not address.endpoint:
                raise JobUnwatchedError("rank 0 cannot watch the job")
            rundir.check_run_id(address.run_id)
            self._address, self._store = address, None
        return self._address

    def close(self) -> None:
        """Releases the store."""
        self._store = None

    def _start_collector(
        self, world_size: int, session: int, record: str | os.PathLike[str] | None
    ) -> CollectorAddress:
        run_id = new_run_id(session)
        ingest, _ = rundir.endpoints(run_id)
        if not os.environ.get("DDPWATCH_RECORD_DIR"):  # then every rank writes a rank file
            spawn_collector(run_id, world_size, record)
        if "DDPWATCH_RUN" not in os.environ and (note := rundir.fallback()):  # `ddpwatch run` says it itself
            _log.warning("ddpwatch: %s", note)
        address = CollectorAddress(run_id, ingest, clock.boot_id())
        self._publish(address)
        return address

    def _publish(self, address: CollectorAddress) -> None:
        if self._store is not None:
            self._store.set(self._key, msgspec.json.encode(address).decode())


def spawn_collector(run_id: str, world_size: int, record: str | os.PathLike[str] | None) -> None:
    """Starts the collector process: detached, so that a signal to the job's process group spares it."""
    package = Path(__file__).parents[2]
    command = [sys.executable, "-c", _RUN_COLLECTOR, str(package), "--run-id", run_id, "--world-size", str(world_size)]
    command += ["--watch-pid", str(os.getpid()), f"--script={Path(sys.argv[0]).name}"]
    if record is not None:
        command += ["--record", str(recording_path(record))]
    with open(rundir.log(run_id), "xb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
    process.returncode = 0  # it outlives this process on purpose: no warning about that when the handle is collected


def new_run_id(session: int) -> str:
    """Id of a new run. `ddpwatch run` gives the start, and may start several jobs: each gets an id of its own.

    Restarts and further sessions have their numbers at the end.
    """
    given = os.environ.get("DDPWATCH_RUN")
    if given is None:
        return rundir.new_run_id(sys.argv[0])
    further = [part for part in (attempt(), session - 1) if part]
    return ".".join([f"{given}-{secrets.token_hex(2)}", *map(str, further)])


def recording_path(record: str | os.PathLike[str]) -> Path:
    """Where to record to: to a new file, whether an earlier job, a restart or another job has left one of that name."""
    path, restarts = Path(record).absolute(), attempt()
    path = path.with_suffix(f".{restarts}{path.suffix}") if restarts else path
    try:
        free = reserve(path)
    except OSError:  # the collector goes on trying
        _log.warning("ddpwatch cannot record to %s: its directory is missing or not writable", path)
        return path
    if free != path:
        _log.warning("ddpwatch records to %s: %s exists", free, path.name)
    return free
