"""What a job prints below the dashboard: a pipe, the process that reads it, a file in the user's state directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

from ddpwatch.errors import DdpwatchError
from ddpwatch.job import output_copy
from ddpwatch.job.output_copy import CUT, DONE, MISSING, OLDER, TOTAL, OutputBuffer, copy_output, older_part
from ddpwatch.run.state_folder import state_folder


class OutputPipe:
    """The output of one job.

    Args:
        name: The job's name.

    Raises:
        DdpwatchError: There is no memory, no pipe or no home for it.

    Attributes:
        path: The file that the output is copied to.
        buffer: The newest output.
        pipe: Where the job prints to.
    """

    def __init__(self, name: str) -> None:
        self.path = state_folder("output") / f"{name}.out"
        try:
            self.buffer = OutputBuffer.create()
            self._read_end, self.pipe = os.pipe()
        except OSError as error:
            why = f"cannot take the job's output: {error.strerror}"
            raise DdpwatchError(why, "look at `ulimit -a`, or leave the output in this terminal: --headless") from error
        with contextlib.suppress(OSError):  # the user has too many such pipes
            # What Linux lets any user have; a long line is then written in one piece
            fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, 1024 * 1024)
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start_copy(self) -> None:
        """Starts to read the pipe, once the job has its end of it."""
        os.close(self.pipe)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Waits until all that could write to the pipe have closed it, and what they wrote was copied."""
        self._thread.join(timeout_s)

    def notes(self) -> list[str]:
        """Returns where the output is, and what is missing there, in lines."""
        total, missing, older, cut = map(self.buffer.get, (TOTAL, MISSING, OLDER, CUT))
        missing += total - self.buffer.get(DONE)
        why = self.buffer.why or "not written yet"
        if 0 < total <= missing:
            return [f"nothing of the job's output is in {self.path}: {why}"]
        parts = f"{older_part(self.path)} and {self.path}" if older else str(self.path)
        kept = f" (the newest {(total - cut - missing) >> 20} MiB)" if cut else ""
        where = [f"the job's output is in {parts}{kept}"]
        return [*where, f"{missing} bytes of it are missing there: {why}"] if missing else where

    def _copy(self) -> None:
        """Lets another process copy. If that is killed or cannot be started, this one goes on in its place."""
        if self._copy_in_process() != 0:
            copy_output(self._read_end, self.buffer, self.path)
        os.close(self._read_end)

    def _copy_in_process(self) -> int:
        """Runs the process to its end; its exit code.

        It outlives this one, even SIGHUP and the signals that end a job. They are blocked in this thread while the job
        runs, so they are in the process, too.
        """
        script = Path(output_copy.__file__)
        command = [sys.executable, "-I", "-S", str(script), str(self.buffer.descriptor), str(self.path)]
        try:
            return subprocess.Popen(
                command,
                stdin=self._read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[self.buffer.descriptor],
            ).wait()
        except OSError:
            return 1
