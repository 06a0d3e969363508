"""``ddpwatch check -- COMMAND``: starts a job's command with the check in place of its script."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ddpwatch.check.judge import CheckResult
from ddpwatch.errors import DdpwatchError
from ddpwatch.job.command import refusal, require_command, with_module

STDERR = 2  # its file descriptor


def check_job(command: Sequence[str], seconds: float) -> CheckResult:
    """Returns what the ranks of such a job have measured on this node and on others. Their output goes to stderr.

    Raises:
        DdpwatchError: It did not come to an end.
    """
    require_command(command)
    with tempfile.TemporaryDirectory(prefix="ddpwatch-check-") as folder:
        file = Path(folder) / "result.json"
        arguments = ["--seconds", str(seconds), "--result", str(file)]
        _run(with_module(command, "ddpwatch.check", arguments))
        try:
            return msgspec.json.decode(file.read_bytes(), type=CheckResult)
        except (OSError, msgspec.DecodeError) as error:
            raise DdpwatchError("the check did not come to an end", "the output above says why") from error


def _run(command: Sequence[str]) -> None:
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=STDERR)
    except OSError as error:
        raise refusal(command[0], error) from error
    try:
        process.wait()
    finally:
        process.terminate()
        process.wait()
