"""A run that gets slower and slower, on all ranks alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.late.streak import line_through
from ddpwatch.analysis.diagnosis.thresholds import KEEP_ENDED, LONGER_SHARE, OVER_SHARE
from ddpwatch.analysis.diagnosis.words.wording import longer_than

BLOCK_STEPS = 32  # of the steps whose median makes one point
FEWEST_BLOCKS, KEEP_BLOCKS = 8, 256
FIT = 0.9  # of the variance, that a straight line explains at least: of a jump's, it explains three quarters at most


class _StepBlock(NamedTuple):
    """Successive steps that count.

    Attributes:
        first, last: Of them.
        ns: What they take: the median of their rank-time that nobody is to blame for.
        start_ns: When the first one started, on the time line.
    """

    first: int
    last: int
    ns: float
    start_ns: int


class _StepBlocks:
    """Puts steps into blocks as they come.

    Args:
        size: Of a block, in steps; may be changed between two blocks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._steps: list[_StepBlock] = []

    def add_step(self, step: int, ns: int, start_ns: int) -> _StepBlock | None:
        """Takes the next step that counts; returns the block that is full with it."""
        self._steps.append(_StepBlock(step, step, ns, start_ns))
        if len(self._steps) < self.size:
            return None
        block = self._steps[0]._replace(last=step, ns=median(one.ns for one in self._steps))
        self._steps.clear()
        return block


class RunDrift:
    """Finds it as steps come.

    Args:
        devices: What may be why.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self._devices = devices
        self._gathered = _StepBlocks(BLOCK_STEPS)
        self._blocks: list[_StepBlock] = []
        self._lasting: Incident | None = None
        self._ended: deque[Incident] = deque(maxlen=KEEP_ENDED)

    def add_step(self, step: int, ns: int, start_ns: int) -> None:
        """Takes the next step that counts, the rank-time that nobody is to blame for, and when the step started."""
        block = self._gathered.add_step(step, ns, start_ns)
        if block is None:
            return
        self._blocks.append(block)
        if len(self._blocks) >= KEEP_BLOCKS:
            pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
            self._blocks = [one._replace(last=other.last, ns=fmean((one.ns, other.ns))) for one, other in pairs]
            self._gathered.size *= 2
        self._look(start_ns)

    def incidents(self) -> list[Incident]:
        """Returns those that are over, and the one that lasts."""
        return [*self._ended, *([] if self._lasting is None else [self._lasting])]

    def _look(self, now_ns: int) -> None:
        blocks, since = self._blocks, None
        if self._lasting is not None:
            since = self._lasting.since_step
            blocks = [block for block in blocks if block.last >= (since or 0)]
            if not _rises(blocks, OVER_SHARE):
                over = _sentence(self._lasting.evidence.growth or 0.0, is_open=False)
                self._ended.append(replace(self._lasting, message=over, open=False))
                self._lasting, self._blocks, self._gathered.size = None, [], BLOCK_STEPS
                return
        else:
            stretches = (blocks[-(KEEP_BLOCKS >> halved) :] for halved in range(5))  # it may have started later
            blocks = next(filter(_rises, stretches), [])
        if blocks:
            self._lasting = self._incident(blocks, blocks[0].first if since is None else since, now_ns)

    def _incident(self, blocks: Sequence[_StepBlock], since: int, now_ns: int) -> Incident:
        # What makes a run slower and slower is worse in the second half than before it.
        base = _base(blocks)
        gain = 1 - base / blocks[-1].ns
        cause = self._devices.cause(None, blocks[len(blocks) // 2].start_ns, now_ns, gain)
        growth = blocks[-1].ns / base - 1
        incident = Incident(
            kind="drift",
            severity="warning",
            message=(lasting := _sentence(growth, is_open=True)),
            lasting=lasting,
            since_step=since,
            until_step=blocks[-1].last,
            steps=len(blocks) * self._gathered.size,
            cost_ns=int(_excess(blocks, base)),
            gain=gain,
            open=True,
            evidence=Evidence(growth=growth),
        )
        return because(incident, cause)


def _base(blocks: Sequence[_StepBlock]) -> float:
    """Returns what a step took at first."""
    return min(block.ns for block in blocks[:2])


def _excess(blocks: Sequence[_StepBlock], base: float) -> float:
    """Returns what all steps took longer than at first: bare ones as much as the watched ones after them."""
    ends = [blocks[0].first - 1, *(block.last for block in blocks)]
    return sum(
        max(0.0, block.ns - base) * (last - before)
        for block, (before, last) in zip(blocks, pairwise(ends), strict=True)
    )


def _rises(blocks: Sequence[_StepBlock], share: float = 1.0) -> bool:
    """Returns whether steps get slower steadily, by that share of what is enough to start with."""
    if len(blocks) < FEWEST_BLOCKS or blocks[-1].ns < (1 + share * LONGER_SHARE) * _base(blocks):
        return False
    line = line_through([(block.last, block.ns) for block in blocks], blocks[-1].last)
    return line.slope > 0 and line.fit >= share * FIT


def _sentence(growth: float, is_open: bool) -> str:
    """Says that all ranks get slower and slower."""
    get, takes = ("get", "takes") if is_open else ("got", "took")
    return f"all ranks {get} slower and slower: a step {takes} {longer_than(1 + growth, 'at first')}"
