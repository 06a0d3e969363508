"""All ranks are slower from a step on, and their devices show why.

A job may also change what it does: longer sequences, a larger batch. So a slowdown without a cause is no incident.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from ddpwatch.analysis.diagnosis.causes.device_signals import CPU_PRESSURE, DENIED
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCause, DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.rules.step_blocks import StepBlock, StepBlocks
from ddpwatch.analysis.diagnosis.thresholds import KEEP_ENDED

BLOCK_STEPS = 8
NEWEST = 4  # blocks, each of them slower
BEFORE = 16  # blocks before these, all but one of them faster: the slowdown may start in that
FEWEST_BEFORE = 4
SLOWER = 1.15  # a step takes so many times as long
OVER = 1.07  # below that, it is over
_BY_OTHERS = (*DENIED, CPU_PRESSURE.name)  # who had the cores, the CPU time or the memory


class SlowDevice:
    """Finds it as steps come.

    Args:
        devices: What may be why.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self._devices = devices
        self._gathered = StepBlocks(BLOCK_STEPS)
        self._blocks: deque[StepBlock] = deque(maxlen=BEFORE + NEWEST)
        self._lasting: _Slowdown | None = None
        self._ended: deque[Incident] = deque(maxlen=KEEP_ENDED)

    def add_step(self, step: int, ns: int, start_ns: int) -> None:
        """Takes the next step that counts, the rank-time that nobody is to blame for, and when the step started."""
        block = self._gathered.add_step(step, ns, start_ns)
        if block is None:
            return
        lasting = self._lasting
        if lasting is None:
            self._blocks.append(block)
            self._lasting = self._found(start_ns)
        elif block.ns >= OVER * lasting.base:
            lasting.count(block)
            lasting.cause = self._devices.cause(None, lasting.start_ns, start_ns) or lasting.cause
        else:
            self._ended.append(lasting.incident(is_open=False))
            self._lasting = None
            self._blocks.clear()

    def incidents(self) -> list[Incident]:
        """Returns those that are over, and the one that lasts."""
        return [*self._ended, *([] if self._lasting is None else [self._lasting.incident(is_open=True)])]

    def _found(self, now_ns: int) -> _Slowdown | None:
        """Returns whether the newest steps are slower, for a reason that was not there before."""
        blocks = list(self._blocks)
        before, newest = blocks[:-NEWEST], blocks[-NEWEST:]
        if len(before) < FEWEST_BEFORE:
            return None
        took = sorted(block.ns for block in before)
        base = median(took)
        if min(block.ns for block in newest) <= max(took[-2], SLOWER * base):
            return None
        cause = self._devices.cause(None, newest[0].start_ns, now_ns)
        if cause is None or cause.evidence.before is None:
            return None
        slow = [block for block in (before[-1], *newest) if block.ns > SLOWER * base]
        found = _Slowdown(slow[0], base, cause)
        for block in slow:
            found.count(block)
        return found


class _Slowdown:
    """One that lasts.

    Attributes:
        base: What a step took before (rank-time, ns).
        start_ns: Since when.
        cause: What devices did meanwhile.
    """

    def __init__(self, first: StepBlock, base: float, cause: DeviceCause) -> None:
        self.base, self.start_ns, self.cause = base, first.start_ns, cause
        self._since, self._until = first.first, first.first - 1
        self._watched, self._cost_ns = 0, 0.0

    def count(self, block: StepBlock) -> None:
        """Counts what a block takes longer, as do the bare steps before and in it."""
        self._cost_ns += (block.ns - self.base) * (block.last - self._until)
        self._watched += BLOCK_STEPS
        self._until = block.last

    def incident(self, is_open: bool) -> Incident:
        longer = self._cost_ns / (self._until - self._since + 1) / self.base
        incident = Incident(
            kind="slow_device",
            severity="info" if self.cause.evidence.cause in _BY_OTHERS else "warning",
            message=_sentence(longer, is_open),
            since_step=self._since,
            until_step=self._until,
            steps=self._watched,
            cost_ns=int(self._cost_ns),
            gain=1 - 1 / (1 + longer),
            open=is_open,
            evidence=Evidence(longer=longer),
        )
        return because(incident, self.cause)


def _sentence(longer: float, is_open: bool) -> str:
    """Says that all ranks are slower from a step on."""
    are, takes = ("are", "takes") if is_open else ("were", "took")
    return f"all ranks {are} slower: a step {takes} {100 * longer:.0f} % longer than before"
