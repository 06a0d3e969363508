"""Which files belong together: the parts of one recording, and the recordings of one run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpwatch.errors import UsageError
from ddpwatch.recording.names import is_older_part
from ddpwatch.recording.part import Part, int_field
from ddpwatch.recording.selection import CONTEXT_ONLY, Selection
from ddpwatch.wire.messages import Hello, Step
from ddpwatch.wire.transport import Envelope, Frame

PART_NAME = re.compile(r"\.(\d{4,8})$")
NAMED_RUNS = 5
WALL_CLOCKS_NS = 5_000_000_000  # apart by more: what lies between is no network, and no slow start


@dataclass(frozen=True, slots=True)
class PartChain:
    """The parts of one recording, oldest first; at least one.

    Attributes:
        ahead_ns: By how much its recorder's wall clock is ahead of those of the recordings that it is merged with.
            Receive times are without it.
    """

    parts: list[Part]
    ahead_ns: int = 0

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
        return next((span[0] - self.ahead_ns for part in self.parts if (span := part.index.span_ns) is not None), 0)

    @property
    def span_ns(self) -> tuple[int, int] | None:
        """Receive time of the first and the last frame (ns since the Unix epoch); None without any."""
        found = [span for part in self.parts if (span := part.index.span_ns) is not None]
        if not found:
            return None
        return min(first for first, _ in found) - self.ahead_ns, max(last for _, last in found) - self.ahead_ns

    def frames(self, selection: Selection) -> Iterator[Frame]:
        """Yields the selected frames of all parts."""
        ahead_ns = self.ahead_ns
        if ahead_ns and selection.start_ns:
            start_ns, steps_from_ns = selection.start_ns + ahead_ns, selection.steps_from_ns + ahead_ns
            selection = replace(selection, start_ns=start_ns, steps_from_ns=steps_from_ns)
        for number, part in enumerate(self.parts):
            frames = part.frames(selection, first=number == 0)
            yield from received_earlier(frames, ahead_ns) if ahead_ns else frames

    def ranks(self) -> frozenset[int]:
        """Returns the ranks in it."""
        if self.rank is not None:
            return frozenset({self.rank})
        return frozenset(message.rank for message, _ in self.frames(CONTEXT_ONLY) if isinstance(message, Hello))

    def lead_in(self, at_ns: int, steps: int, span_ns: int) -> tuple[int, int]:
        """Returns since when there is all of the history that `Recording.lead_in` finds, and since when all its steps.

        Takes a quarter more steps than asked for, since some ranks may be behind.
        """
        newest = steps_from_ns = 0
        at_ns += self.ahead_ns
        for row in (row for part in reversed(self.parts) for row in part.index.backwards(at_ns)):
            if row.has_steps:
                newest = max(newest, row.last_step)
                if not steps_from_ns and row.last_step < newest - steps - steps // 4:
                    steps_from_ns = row.start_ns - self.ahead_ns
                if steps_from_ns and row.end_ns < at_ns - span_ns:
                    return row.start_ns - self.ahead_ns, steps_from_ns
        return 0, steps_from_ns

    def first_step(self) -> int:
        """Returns the number of its first step; 0 if no index lists them."""
        return min((steps[0] for part in self.parts if (steps := part.index.steps) is not None), default=0)

    def step_ns(self, number: int) -> int | None:
        """Returns the receive time of a step, or else of the next one; None if there is none."""
        frames = self.frames(Selection(number, context=False))
        return next((envelope.received_ns for message, envelope in frames if isinstance(message, Step)), None)

    @property
    def _is_continued(self) -> bool:
        return "continued" in self.newest.end


def received_earlier(frames: Iterable[Frame], by_ns: int) -> Iterator[Frame]:
    """Yields the frames with other receive times."""
    for message, envelope in frames:
        yield message, Envelope(envelope.seq, envelope.received_ns - by_ns, envelope.frame)


def with_one_wall_clock(chains: Sequence[PartChain]) -> list[PartChain]:
    """Puts receive times onto the wall clock of the first recording, where those of others differ by seconds.

    All ranks send the same step at about the same time.
    """
    starts = [chain.start_ns for chain in chains] if len(chains) > 1 else [0]
    if max(starts) - min(starts) <= WALL_CLOCKS_NS:
        return list(chains)
    return [chains[0], *(replace(chain, ahead_ns=_ahead_ns(chain, chains[0])) for chain in chains[1:])]


def _ahead_ns(chain: PartChain, other: PartChain) -> int:
    """Returns by how much the wall clock of one recording is ahead of another's; 0 if that is not clear."""
    return clock_difference_ns(steps_apart_ns(chain, other) or 0)


def clock_difference_ns(apart_ns: int) -> int:
    """Returns what of a difference of receive times wall clocks make: 0 if a network or a slow start explains it."""
    return apart_ns if abs(apart_ns) > WALL_CLOCKS_NS else 0


def steps_apart_ns(chain: PartChain, other: PartChain) -> int | None:
    """Returns by how much later one recording got a step than another one; None while they have no step in common."""
    number = max(chain.first_step(), other.first_step())
    at_ns, other_ns = chain.step_ns(number), other.step_ns(number)
    return None if at_ns is None or other_ns is None else at_ns - other_ns


def wall_clocks_note(ahead_ns: Sequence[int], first: Path) -> str:
    """Returns what users have to know of recordings whose wall clocks differ; empty if none do."""
    if not any(ahead_ns):
        return ""
    text = f"the wall clocks of these recordings differ by {(max(ahead_ns) - min(ahead_ns)) / 1e9:.0f} s"
    return f"{text}, as their steps show: receive times are those of {first}"


def foreign_ranks(chains: Sequence[PartChain]) -> list[frozenset[int]]:
    """Returns per recording the ranks that another one has, too, and has fewer of.

    A node's own recording beside the root's.
    """
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
    """Returns the id of the recording that a part belongs to; without one, its path."""
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
    """Returns the file and the older parts of the same recording in its directory."""
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
    """Returns the files of the run that started last, and a note on the other runs; empty if there are none."""
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
    """Returns the path that opens the run: its file, or the folder of its files."""
    return Path(os.path.commonpath([chain.newest.path for chain in chains_of(run)]))


def _escaped(stem: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", stem)
