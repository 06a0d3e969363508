"""The command's standard streams: whatever they are, a command says in one line what went wrong, or goes on.

- stdout is what was asked for. If it cannot be written (a full disk, ``>&-``), the command fails.
- stderr is narration. If it cannot be written, that is nobody's loss: a job goes on. Names in it are shown without
  control characters.
- Characters that an encoding lacks are replaced.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from ddpwatch.common.text import clean
from ddpwatch.errors import DdpwatchError


class _Descriptor(io.FileIO):
    """A standard stream's descriptor. After an error, nothing more is written: Python would report it at the exit."""

    def __init__(self, descriptor: int, must_arrive: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._must_arrive = must_arrive
        self._failed = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return memoryview(data).nbytes if self._failed else super().write(data)
        except OSError as error:
            self._failed = True
            if not self._must_arrive:
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):  # `ddpwatch report … | head`
                raise
            raise DdpwatchError(f"cannot write to the standard output: {error.strerror}") from error


class _Narration(io.TextIOWrapper):
    """Shows names without characters that affect more than their own cell."""

    def write(self, text: str) -> int:
        super().write("\n".join(map(clean, text.split("\n"))))
        return len(text)


def prepare() -> None:
    """Takes the place of ``sys.stdout`` and ``sys.stderr``, unless others have done so already."""
    _open_closed()
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _over(sys.stdout, io.TextIOWrapper, must_arrive=True)
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _over(sys.stderr, _Narration, must_arrive=False)


def _over(stream: io.TextIOWrapper, kind: type[io.TextIOWrapper], must_arrive: bool) -> io.TextIOWrapper:
    """Returns a stream with the descriptor and the encoding of another one; an unbuffered one goes line by line."""
    return kind(
        io.BufferedWriter(_Descriptor(stream.fileno(), must_arrive)),
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering or stream.write_through,
    )


def _open_closed() -> None:
    """Gives this process the standard streams that it was started without (``2>&-``); Python has None for them.

    What it opens later would become one of them. A job is started without them all the same: they are not inherited.
    """
    for name, access, mode in (("stdin", os.O_RDWR, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_RDWR, "w")):
        if getattr(sys, name) is None:  # what is written to stdout fails, as it does on a closed one
            stream = open(os.open(os.devnull, access), mode, closefd=False)  # noqa: SIM115 - to the end
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
