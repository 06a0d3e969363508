"""A recording without a collector: every rank writes a file of its own, and the reader merges them.

For sites where processes cannot talk to each other. `RankFile` takes the place of the socket that a rank sends to.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from ddpwatch.messages import decode
from ddpwatch.recording.rotation import RotatingWriter, limits_from_environment
from ddpwatch.transport import Envelope

FLUSH_S = 0.5


def rank_file(environment: Mapping[str, str], rank: int) -> RankFile | None:
    """The file that a rank shall record to, if ``DDPWATCH_RECORD_DIR`` asks for one.

    Ranks that cannot talk must agree on the run's name: it is that of the launcher's job (torchrun, Slurm), and of the
    attempt where the job was restarted.

    Raises:
        UsageError: The file cannot be created.
        OSError: The directory cannot.
    """
    directory = environment.get("DDPWATCH_RECORD_DIR")
    if not directory:
        return None
    names = (environment.get(name) for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_PORT"))
    name = next((name for name in names if name and name != "none"), "run")
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankFile(directory, name if attempt == "0" else f"{name}.{attempt}", rank)


class RankFile:
    """One rank's file: ``DIRECTORY/RUN/rank00042.mcap``. Call from one thread.

    Args:
        directory: Where all ranks of the job record to; created where it is missing.
        run_id: Name of the run, the same on all ranks.
        rank: This rank.

    Raises:
        UsageError: The file cannot be created.
        OSError: The directory cannot.
    """

    def __init__(self, directory: str | os.PathLike[str], run_id: str, rank: int) -> None:
        folder = Path(directory) / (re.sub(r"[^\w.-]+", "-", run_id).strip(".") or "run")
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank{rank:05d}.mcap"
        about = {"run_id": run_id, "rank": str(rank)}
        self._writer = RotatingWriter(self.path, about, limits_from_environment(os.environ))
        self._seq = 0
        self._flushed = time.monotonic()

    def send(self, frame: bytes, flags: int = 0) -> None:
        """Records a frame; at least every half second all of them reach the operating system. May raise OSError.

        Args:
            frame: An encoded message.
            flags: Ignored; sockets have it.
        """
        self._seq += 1
        self._writer.write_message(decode(frame), Envelope(self._seq, time.time_ns(), frame))
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self, linger: int | None = None) -> None:
        """Writes the end. May raise OSError."""
        self._writer.close()
