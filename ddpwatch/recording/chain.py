"""Files that belong together: the parts of a rotated recording, and the recordings of one run among those of others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.messages import Hello
from ddpwatch.recording.container import NO_STEP
from ddpwatch.recording.part import Frame, Part, count_in
from ddpwatch.recording.selection import Selection

PART_NAME = re.compile(r"\.(\d{4,8})$")
NAMED_RUNS = 5


@dataclass(frozen=True, slots=True)
class Chain:
    """One recording: its parts, oldest first; at least one."""

    parts: list[Part]

    @property
    def newest(self) -> Part:
        """The part that was written last."""
        return self.parts[-1]

    @property
    def identity(self) -> str:
        """What all parts of the recording share, and no other recording has."""
        return identity_of(self.newest)

    @property
    def rank(self) -> int | None:
        """The rank that wrote this file of its own; None for a recording of all ranks."""
        return count_in(self.newest.metadata, "rank") if "rank" in self.newest.metadata else None

    @property
    def lost(self) -> int:
        """Frames that did not get to the disk."""
        return max(part.lost for part in self.parts)

    @property
    def dropped(self) -> int:
        """How many of the oldest parts the recorder has removed, to keep within its cap."""
        before, end = self.parts[0].number, self.newest.end
        return min(before, count_in(end, "dropped_parts")) if "dropped_parts" in end else before

    @property
    def missing(self) -> int:
        """How many parts are not here that the recorder has left. A part that is read alone misses none."""
        if self._goes_on and len(self.parts) == 1:
            return 0
        written = self.newest.number + 1
        return max(0, written - self.dropped - len(self.parts)) + self._goes_on

    @property
    def begin_ns(self) -> int:
        """Receive time of the first frame (ns since the Unix epoch); 0 without any."""
        return next((span[0] for part in self.parts if (span := part.index.span_ns) is not None), 0)

    def frames(self, selection: Selection) -> Iterator[Frame]:
        """The selected frames of all parts."""
        for place, part in enumerate(self.parts):
            yield from part.frames(selection, first=place == 0)

    def lead_in(self, at_ns: int, steps: int, span_ns: int) -> int:
        """See `Recording.lead_in`. A quarter more steps than asked for: not every rank is equally far."""
        newest = 0
        for row in (row for part in reversed(self.parts) for row in part.index.backwards(at_ns)):
            if row.has_steps:
                newest = max(newest, row.last_step)
                if row.last_step < newest - steps - steps // 4 and row.end_ns < at_ns - span_ns:
                    return row.start_ns
        return 0

    @property
    def _goes_on(self) -> bool:
        return "continued" in self.newest.end


def identity_of(part: Part) -> str:
    """See `Chain.identity`."""
    return part.metadata.get("recording_id") or str(part.path)


def run_of(part: Part) -> str:
    """The run that a file is about. One whose recorder did not know is told by its ranks' word and its folder."""
    if run_id := part.metadata.get("run_id"):
        return run_id
    introductions = Selection(first=NO_STEP)  # no step, and what is needed to understand any
    hello = next((message for message, _ in part.frames(introductions) if isinstance(message, Hello)), None)
    return str(part.path.parent / (hello.run_id if hello else ""))


def chains_of(parts: Iterable[Part]) -> list[Chain]:
    """Parts of one recording after each other, recordings side by side. A file given twice counts once."""
    found: dict[str, list[Part]] = {}
    seen = set()
    for part in parts:
        status = part.path.stat()
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            found.setdefault(identity_of(part), []).append(part)
    return [Chain(sorted(chain, key=lambda part: part.number)) for chain in found.values()]


def with_siblings(newest: Part) -> list[Part]:
    """The file and the older parts of the same recording that lie beside it."""
    name, found = newest.path, [newest]
    if "recording_id" not in newest.metadata or PART_NAME.search(name.stem) or not newest.number:
        return found
    for file in name.parent.glob(f"{_escaped(name.stem)}.*{name.suffix}"):
        if PART_NAME.search(file.stem) and PART_NAME.sub("", file.stem) == name.stem:
            try:
                part = Part(file)
            except UsageError:
                continue
            if part.metadata.get("recording_id") == newest.metadata["recording_id"]:
                found.append(part)
    return found


def newest_run(parts: list[Part]) -> tuple[list[Part], str]:
    """The files of the run that began last, and a note on the other runs; empty where there is none."""
    runs: dict[str, list[Part]] = {}
    for part in parts:
        runs.setdefault(run_of(part), []).append(part)
    if len(runs) == 1:
        return parts, ""
    order = sorted(runs.values(), key=lambda run: max(chain.begin_ns for chain in chains_of(run)), reverse=True)
    places = [str(_place_of(run)) for run in order]
    others = ", ".join(places[1 : 1 + NAMED_RUNS]) + (", …" if len(places) > 1 + NAMED_RUNS else "")
    what = "another run is" if len(order) == 2 else f"{len(order) - 1} other runs are"
    return order[0], f"this is the newest run, {places[0]}; {what} in the directory, give its path to open it: {others}"


def _place_of(run: list[Part]) -> Path:
    """What to give to open the run: its file, or the folder of its files."""
    return Path(os.path.commonpath([chain.newest.path for chain in chains_of(run)]))


def _escaped(stem: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", stem)
