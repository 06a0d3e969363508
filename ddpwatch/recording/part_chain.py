"""Which files belong together: the parts of one recording, and the recordings of one run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.messages import Hello
from ddpwatch.recording.names import is_older_part
from ddpwatch.recording.part import Part, int_field
from ddpwatch.recording.selection import CONTEXT_ONLY, Selection
from ddpwatch.transport import Frame

PART_NAME = re.compile(r"\.(\d{4,8})$")
NAMED_RUNS = 5


@dataclass(frozen=True, slots=True)
class PartChain:
    """The parts of one recording, oldest first; at least one."""

    parts: list[Part]

    @property
    def newest(self) -> Part:
        """The part that was written last."""
        return self.parts[-1]

    @property
    def identity(self) -> str:
        """Identifies the recording: the same in all of its parts."""
        return identity_of(self.newest)

    @property
    def rank(self) -> int | None:
        """The rank that wrote this rank file; None for a recording of all ranks."""
        return int_field(self.newest.metadata, "rank") if "rank" in self.newest.metadata else None

    @property
    def lost(self) -> int:
        """Frames that did not reach the disk."""
        return max(part.lost for part in self.parts)

    @property
    def dropped(self) -> int:
        """How many of the oldest parts the recorder has removed to stay within its cap."""
        before, end = self.parts[0].number, self.newest.end
        return min(before, int_field(end, "dropped_parts")) if "dropped_parts" in end else before

    @property
    def missing(self) -> int:
        """How many parts are not here although the recorder kept them. A part that is read alone misses none."""
        if self._is_continued and len(self.parts) == 1:
            return 0
        written = self.newest.number + 1
        return max(0, written - self.dropped - len(self.parts)) + self._is_continued

    @property
    def start_ns(self) -> int:
        """Receive time of the first frame (ns since the Unix epoch); 0 without any."""
        return next((span[0] for part in self.parts if (span := part.index.span_ns) is not None), 0)

    def frames(self, selection: Selection) -> Iterator[Frame]:
        """The selected frames of all parts."""
        for number, part in enumerate(self.parts):
            yield from part.frames(selection, first=number == 0)

    def ranks(self) -> frozenset[int]:
        """The ranks in it."""
        if self.rank is not None:
            return frozenset({self.rank})
        return frozenset(message.rank for message, _ in self.frames(CONTEXT_ONLY) if isinstance(message, Hello))

    def lead_in(self, at_ns: int, steps: int, span_ns: int) -> int:
        """See `Recording.lead_in`. Takes a quarter more steps than asked for, since some ranks may be behind."""
        newest = 0
        for row in (row for part in reversed(self.parts) for row in part.index.backwards(at_ns)):
            if row.has_steps:
                newest = max(newest, row.last_step)
                if row.last_step < newest - steps - steps // 4 and row.end_ns < at_ns - span_ns:
                    return row.start_ns
        return 0

    @property
    def _is_continued(self) -> bool:
        return "continued" in self.newest.end


def foreign_ranks(chains: Sequence[PartChain]) -> list[frozenset[int]]:
    """Per recording the ranks that another one has, too, and has fewer of: a node's own recording beside the root's."""
    if len(chains) == 1 or all(chain.rank is not None for chain in chains):
        return [frozenset()] * len(chains)
    ranks = [chain.ranks() for chain in chains]
    taken: set[int] = set()
    foreign = [frozenset[int]()] * len(chains)
    for position in sorted(range(len(chains)), key=lambda position: len(ranks[position])):
        foreign[position] = ranks[position] & taken
        taken |= ranks[position]
    return foreign


def identity_of(part: Part) -> str:
    """See `PartChain.identity`."""
    return part.metadata.get("recording_id") or str(part.path)


def run_of(part: Part) -> str:
    """Identifies the run of a file: by its metadata, or else by its folder and its first hello."""
    if run_id := part.metadata.get("run_id"):
        return run_id
    hello = next((message for message, _ in part.frames(CONTEXT_ONLY) if isinstance(message, Hello)), None)
    return str(part.path.parent / (hello.run_id if hello else ""))


def chains_of(parts: Iterable[Part]) -> list[PartChain]:
    """Groups parts by recording. A file that is given twice counts once; of its copies, the longest counts."""
    found: dict[str, dict[int, tuple[int, Part]]] = {}
    seen = set()
    for part in parts:
        status = part.path.stat()
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        chain = found.setdefault(identity_of(part), {})
        if part.number not in chain or chain[part.number][0] < status.st_size:
            chain[part.number] = status.st_size, part
    return [PartChain([chain[number][1] for number in sorted(chain)]) for chain in found.values()]


def with_siblings(newest: Part) -> list[Part]:
    """The file and the older parts of the same recording in its directory."""
    path, found = newest.path, [newest]
    if "recording_id" not in newest.metadata or is_older_part(path, newest.number) or not newest.number:
        return found
    for file in path.parent.glob(f"{_escaped(path.stem)}.*{path.suffix}"):
        if PART_NAME.search(file.stem) and PART_NAME.sub("", file.stem) == path.stem:
            try:
                part = Part(file)
            except UsageError:
                continue
            if part.metadata.get("recording_id") == newest.metadata["recording_id"]:
                found.append(part)
    return found


def parts_of_newest_run(parts: list[Part]) -> tuple[list[Part], str]:
    """The files of the run that started last, and a note on the other runs; empty if there are none."""
    runs: dict[str, list[Part]] = {}
    for part in parts:
        runs.setdefault(run_of(part), []).append(part)
    if len(runs) == 1:
        return parts, ""
    order = sorted(runs.values(), key=lambda run: max(chain.start_ns for chain in chains_of(run)), reverse=True)
    paths = [str(_path_of(run)) for run in order]
    others = ", ".join(paths[1 : 1 + NAMED_RUNS]) + (", …" if len(paths) > 1 + NAMED_RUNS else "")
    what = "another run is" if len(order) == 2 else f"{len(order) - 1} other runs are"
    return order[0], f"this is the newest run, {paths[0]}; {what} in the directory, give its path to open it: {others}"


def _path_of(run: list[Part]) -> Path:
    """The path that opens the run: its file, or the folder of its files."""
    return Path(os.path.commonpath([chain.newest.path for chain in chains_of(run)]))


def _escaped(stem: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", stem)
