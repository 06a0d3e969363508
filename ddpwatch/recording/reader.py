"""Reads a recording: one file, the parts of a rotated one, or a directory with one file per rank.

Recordings are untrusted input, and any file may end in the middle: everything before the cut or the damage is read, and
`Recording.cut_tail` reports it. Reading everything goes from front to back and needs no index; reading a selection uses
the index, or builds it where the file has none.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.recording.part import Part
from ddpwatch.recording.part_chain import (
    chains_of,
    foreign_ranks,
    parts_of_newest_run,
    wall_clocks_note,
    with_one_wall_clock,
    with_siblings,
)
from ddpwatch.recording.seek import Position
from ddpwatch.recording.selection import CONTEXT_ONLY, Selection
from ddpwatch.wire.messages import Hello, Step
from ddpwatch.wire.transport import Envelope, Frame

NEARBY_STEPS = 4096
StrPath = str | os.PathLike[str]


class Recording:
    """A recording, for any number of passes. The counters are those of the last pass.

    Args:
        path: A file, a directory with one file per rank or node, or several of these, which are merged by receive
            time. If wall clocks differ by seconds, the first recording's counts. A rank that is in several comes from
            the one with the fewest ranks. The older parts of a rotated recording are found beside the newest. Of
            several runs in a directory, the newest is read.

    Raises:
        UsageError: A file cannot be opened, is not an MCAP file, or was written by a newer major version.

    Attributes:
        frames: Frames read so far.
        skipped: Frames that could not be decoded (unknown type, damaged).
        cut_tail: A file is damaged, or ends before its end was written; frames up to there were read.
        metadata: What the recorder wrote about the run.
        notes: Warnings about files that were left out, or have a newer format.
        chains: The recordings that are merged: one, or one per rank.
    """

    def __init__(self, path: StrPath | Iterable[StrPath]) -> None:
        paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(item) for item in path]
        if not paths:
            raise UsageError("no recording was given", "give a file that was written with --record")
        self.path = paths[0]
        self.notes: list[str] = []
        self.chains = with_one_wall_clock(chains_of([part for item in paths for part in self._parts_of(item)]))
        self._note_wall_clocks()
        self._note_formats()
        self.frames = 0
        self.skipped = 0
        self.cut_tail = False
        self.metadata = self.chains[0].parts[0].metadata
        self._first_ns = 0
        self._last_ns = 0

    @property
    def nbytes(self) -> int:
        """Size of the files in bytes."""
        return sum(part.path.stat().st_size for part in self.parts)

    @property
    def seconds(self) -> float:
        """Receive time from the first to the last frame read, in seconds."""
        return max(0, self._last_ns - self._first_ns) / 1e9

    @property
    def parts(self) -> list[Part]:
        """The files, oldest first."""
        return [part for chain in self.chains for part in chain.parts]

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step number, from the index; None if there is no step, or no index lists them."""
        found = [steps for part in self.parts if (steps := part.index.steps) is not None]
        return (min(first for first, _ in found), max(last for _, last in found)) if found else None

    @property
    def span_ns(self) -> tuple[int, int]:
        """Receive time of the first and the last frame (ns since the Unix epoch), from the index; zeros without any."""
        found = [span for chain in self.chains if (span := chain.span_ns) is not None]
        return (min(first for first, _ in found), max(last for _, last in found)) if found else (0, 0)

    @property
    def dropped_parts(self) -> int:
        """How many of the oldest parts the recorder has removed to stay within its cap."""
        return sum(chain.dropped for chain in self.chains)

    @property
    def missing_parts(self) -> int:
        """How many parts are missing from the directory of the others."""
        return sum(chain.missing for chain in self.chains)

    @property
    def lost(self) -> int:
        """Frames that did not reach the disk."""
        return sum(chain.lost for chain in self.chains)

    @property
    def left_out(self) -> list[str]:
        """What the last pass could not read, a sentence each."""
        skipped = f"frames left out: {self.skipped}, damaged or of a type unknown to this version of ddpwatch"
        return [*([skipped] if self.skipped else []), *(["the recording was cut off here"] if self.cut_tail else [])]

    @property
    def rank_files(self) -> list[int] | None:
        """The ranks that wrote these rank files; None for a recording of all ranks."""
        ranks = [chain.rank for chain in self.chains]
        return None if None in ranks else sorted(rank for rank in ranks if rank is not None)

    def __iter__(self) -> Iterator[Frame]:
        """Yields the frames in the order in which they were received."""
        return self.select(Selection())

    def select(self, selection: Selection) -> Iterator[Frame]:
        """Yields the selected frames and their context."""
        self.frames = self.skipped = 0
        self._first_ns = self._last_ns = 0
        self.cut_tail = False
        chains = [
            chain.frames(selection) if not foreign else _without(foreign, chain.frames(selection))
            for chain, foreign in zip(self.chains, foreign_ranks(self.chains), strict=True)
        ]
        merged = chains[0] if len(chains) == 1 else heapq.merge(*chains, key=_received)
        for message, envelope in merged:
            self.frames += 1
            received_ns = envelope.received_ns
            self._first_ns = self._first_ns or received_ns
            if received_ns > self._last_ns:
                self._last_ns = received_ns
            yield message, Envelope(self.frames, received_ns, envelope.frame)
        self._note_ends()

    def seek(self, at_ns: int) -> Iterator[Frame]:
        """Yields the frames received at ``at_ns`` (ns since the Unix epoch) or later, and their context."""
        return self.select(Selection(start_ns=at_ns))

    @cached_property
    def world_size(self) -> int:
        """How many ranks the run has; 0 if no rank says so."""
        context = (message for chain in self.chains for message, _ in chain.frames(CONTEXT_ONLY))
        return next((message.world_size for message in context if isinstance(message, Hello)), 0)

    def lead_in(self, at_ns: int, steps: int, seconds: float) -> Selection:
        """Selects what gives so many steps, and so many seconds of all else, at ``at_ns``. Reads only the index."""
        starts_ns, steps_from_ns = zip(
            *(chain.lead_in(at_ns, steps, int(seconds * 1e9)) for chain in self.chains), strict=True
        )
        return Selection(start_ns=min(starts_ns), steps_from_ns=min(steps_from_ns))

    def find_step(self, number: int, back: bool = False) -> Position | None:
        """Returns when a step's last rank sent it; without that step, the same of the next (``back``: previous) one.

        Returns:
            None if there is no such step, or with ``back`` none within `NEARBY_STEPS` before.
        """
        found = self._step_at(number)
        if found is None and back:
            near = self._steps(Selection(max(number - NEARBY_STEPS, 0), number, context=False))
            nearest = max((step.step for step, _ in near), default=None)
        elif found is None:
            nearest = next((step.step for step, _ in self._steps(Selection(number, context=False))), None)
        else:
            return found
        return None if nearest is None else self._step_at(nearest)

    def check(self, selection: Selection) -> None:
        """Checks that a step is selected, without a full pass over the file.

        Raises:
            UsageError: No step is; the hint says which there are.
        """
        if not selection.everything and next(self._steps(replace(selection, context=False)), None) is None:
            raise UsageError(f"{self.path}: it has none of the selected steps and ranks", self._contents())

    def attachments(self) -> dict[str, bytes]:
        """Returns the documents in the files, by name; the newest of each."""
        return {name: data for part in self.parts for name, data in part.attachments().items()}

    # -- inside ----------------------------------------------------------------------------------------------

    def _contents(self) -> str:
        ranks = {m.rank for chain in self.chains for m, _ in chain.frames(CONTEXT_ONLY) if isinstance(m, Hello)}
        if self.steps is None or not ranks:
            return "omit --steps and --ranks"
        return f"it has the steps {self.steps[0]} to {self.steps[1]} of the ranks {min(ranks)} to {max(ranks)}"

    def _step_at(self, number: int) -> Position | None:
        received = [at_ns for _, at_ns in self._steps(Selection(number, number + 1, context=False))]
        return Position(max(received), number) if received else None

    def _steps(self, selection: Selection) -> Iterator[tuple[Step, int]]:
        """Yields steps and their receive times. Does not count frames, since another pass may be under way."""
        frames = (frame for chain in self.chains for frame in chain.frames(selection))
        return ((message, envelope.received_ns) for message, envelope in frames if isinstance(message, Step))

    def _parts_of(self, path: Path) -> list[Part]:
        if not path.is_dir():
            return with_siblings(Part(path))
        parts = []
        for file in sorted(path.rglob("*.mcap")):
            try:
                parts.append(Part(file))
            except UsageError as error:
                self.notes.append(f"left out: {error.message}")
        if not parts:
            raise UsageError(f"{path}: no recording in this directory", "give a directory with .mcap files")
        newest, note = parts_of_newest_run(parts)
        self.notes += [note] if note else []
        return newest

    def _note_wall_clocks(self) -> None:
        if note := wall_clocks_note([chain.ahead_ns for chain in self.chains], self.chains[0].newest.path):
            self.notes.append(note)

    def _note_formats(self) -> None:
        found = [part.note for part in self.parts if part.note]
        if found:
            self.notes.append(found[0] + (f"; so were {len(found) - 1} other files" if len(found) > 1 else ""))

    def _note_ends(self) -> None:
        self.skipped = sum(part.skipped for part in self.parts)
        self.cut_tail = any(part.cut_tail for part in self.parts)


def _without(ranks: frozenset[int], frames: Iterable[Frame]) -> Iterator[Frame]:
    return (frame for frame in frames if getattr(frame[0], "rank", None) not in ranks)


def _received(frame: Frame) -> int:
    return frame[1].received_ns
