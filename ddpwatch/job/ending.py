"""Ends a job that hangs: SIGTERM, and SIGKILL to what is left of it."""

from __future__ import annotations

import contextlib
import subprocess
import time

import psutil

GRACE_S = 45.0  # torchrun itself kills ranks that have not ended 30 s after SIGTERM


def end_job(job: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """Ends a job's process, and those that it has started. Waits for their ends.

    Not the collector: it closes the recording.
    """
    with contextlib.suppress(psutil.Error):
        children = [child for child in psutil.Process(job.pid).children(recursive=True) if not _is_collector(child)]
        if job.poll() is not None:  # only now: until then, its pid is not another process's
            return
        deadline_s = time.monotonic() + grace_s
        with contextlib.suppress(PermissionError):  # the job is another user's, by sudo
            job.terminate()
        _, left = psutil.wait_procs(children, grace_s)
        _wait_or_kill(job, deadline_s - time.monotonic())
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _wait_or_kill(job: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Waits as whoever started it does: psutil would take the exit code away from there."""
    try:
        job.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(PermissionError):
            job.kill()


def _is_collector(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "ddpwatch.collector" in process.cmdline()
    return False
