"""Recording without a collector: each rank writes its own file, and the reader merges them.

For sites where only a shared disk connects the job to its viewers. A `RankFile` replaces the socket that a rank sends
to.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from pathlib import Path

import msgspec

from ddpwatch.recording.failing_disk import RETRY_S, ResilientWriter
from ddpwatch.recording.limits import limits_from_environment
from ddpwatch.recording.names import parts_of
from ddpwatch.wire.messages import Bye, Hello, decode
from ddpwatch.wire.transport import Envelope, ReceiveClock

FLUSH_S = 0.5
_log = logging.getLogger("ddpwatch.recording")


class RankFile:
    """One rank's file: ``DIRECTORY/RUN/rank00042.mcap``. Not thread-safe.

    Survives a failing disk, see `ResilientWriter`. If another run has left a file of that name, this run is called
    ``RUN-2``.

    Args:
        directory: Directory for all ranks of the job; created if it is missing.
        hello: Who the rank is, and in which run.
        retry_s: Pause before each retry after an error.

    Raises:
        UsageError: The limits in the environment are not valid.

    Attributes:
        path: The file.
    """

    def __init__(self, directory: str | os.PathLike[str], hello: Hello, retry_s: float = RETRY_S) -> None:
        name = re.sub(r"[^\w.-]+", "-", hello.run_id).strip(".") or "run"
        self.path = _free(Path(directory).absolute(), name, f"rank{hello.rank:05d}.mcap")
        about = {
            "run_id": self.path.parent.name,
            "rank": str(hello.rank),
            "world_size": str(hello.world_size),
            "script": hello.script,
            "launch": os.environ.get("DDPWATCH_RUN", ""),  # by which `ddpwatch run` finds its ranks' files
        }
        self._writer = ResilientWriter(self.path, about, limits_from_environment(os.environ), retry_s, make_folder=True)
        self._hello = hello
        self._bye: Bye | None = None
        self._seq = 0
        self._clock = ReceiveClock()
        self._flushed = time.monotonic()

    @property
    def lost(self) -> int:
        """Frames that did not reach the disk."""
        return self._writer.lost

    def send(self, frame: bytes, flags: int = 0) -> None:
        """Records a frame. Frames reach the operating system within `FLUSH_S`, as long as more of them come.

        Args:
            frame: An encoded message.
            flags: Ignored, as sockets have it.
        """
        self._seq += 1
        message = decode(frame)
        if isinstance(message, Bye):
            self._bye = message
        self._writer.write_message(message, Envelope(self._seq, self._clock.now_ns(), frame))
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self, linger: int | None = None) -> None:
        """Writes ``run.json`` and the end. There are no findings: these need all ranks.

        Args:
            linger: Ignored, as sockets have it.
        """
        self._writer.close({"run.json": _run_document(self._hello, self._bye)})
        if self.lost:
            _log.warning("%d frames of ddpwatch are missing from %s: %s", self.lost, self.path, self._writer.error)


def _free(directory: Path, name: str, file: str) -> Path:
    """Returns the path in the run's folder, or in ``NAME-2`` and so on if it is taken."""
    folders = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    paths = (directory / folder / file for folder in folders)
    return next(path for path in paths if not path.exists() and not parts_of(path))


def _run_document(hello: Hello, bye: Bye | None) -> bytes:
    """Returns the counterpart for one rank of what `ddpwatch.analysis.attachments.AttachmentBuilder` writes for all."""
    end = None if bye is None else {key: getattr(bye, key) for key in _END}
    run = {
        "id": hello.run_id,
        "previous": hello.previous or None,
        "world_size": hello.world_size,
        "parallelism": None,  # one rank does not show it
        "backend": hello.backend,
        "hosts": [hello.host],
        "model": hello.module,
        "torch": hello.torch,
        "timing_source": hello.timing_source,
        "ends": {str(hello.rank): end},
    }
    return msgspec.json.encode(run)


_END = ("reason", "detail", "signal", "step", "phase", "in_flight", "at_ns")
