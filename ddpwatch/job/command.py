"""The job's command line: what it runs, and why it cannot be started."""

from __future__ import annotations

import errno
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from ddpwatch.errors import UsageError

REFUSALS = {
    errno.ENOENT: ("command not found", "give the whole command after --"),
    errno.EACCES: ("permission denied", "chmod +x it, or put its interpreter in front, e.g. python"),
    errno.ENOEXEC: ("neither a program nor a script that starts with #!", "put its interpreter in front, e.g. sh"),
    errno.E2BIG: ("the argument list is too long", "put arguments into a file; the environment counts as well"),
}

_RUNS_MODULE = ("-m", "--module")
_LAUNCHERS = ("torch.distributed.", "accelerate.", "deepspeed.", "ray.")


def require_command(command: Sequence[str]) -> None:
    """Checks that there is one.

    Raises:
        UsageError: There is none.
    """
    if not any(command[:1]):
        raise UsageError("no command to run", "ddpwatch run -- torchrun --nproc-per-node=2 train.py")


def refusal(command: str, error: OSError) -> UsageError:
    """Returns why a command cannot be started, with a hint."""
    name = shlex.quote(command)
    if isinstance(error, PermissionError) and Path(command).is_dir():
        return UsageError(f"{name} is a directory", "give the whole command after --")
    if isinstance(error, FileNotFoundError) and shutil.which(command) is not None:
        return UsageError(f"{name}: the interpreter that its first line names does not exist", "correct its #! line")
    why, hint = REFUSALS.get(error.errno or 0, (error.strerror or str(error), "does it run without ddpwatch?"))
    return UsageError(f"{name}: {why}", hint)


def script_of(command: Sequence[str]) -> str:
    """Returns the script in a command line, or the module that is run with ``-m``, for the run's name."""
    at = _script_at(command)
    word = command[at or 0]
    return word if at is None or word.endswith(".py") else word.replace(".", "-")


def with_module(command: Sequence[str], module: str, arguments: Sequence[str]) -> list[str]:
    """Returns a command line with a module in place of its script and what follows that."""
    at = _script_at(command)
    kept = list(command[:at])
    if at is not None and not command[at].endswith(".py"):
        del kept[max(place for place, word in enumerate(kept) if word in _RUNS_MODULE)]
    return [*kept, "-m", module, *arguments]


def _script_at(command: Sequence[str]) -> int | None:
    """Returns the place of the script, or of the module that is run; not of one that starts the job's."""
    is_module = False
    for at, word in enumerate(command):
        if is_module and not word.startswith("-"):  # torchrun allows options between that and the module
            if not word.startswith(_LAUNCHERS):
                return at
            is_module = False
        elif word in _RUNS_MODULE:
            is_module = True
        elif word.endswith(".py"):
            return at
    return None
