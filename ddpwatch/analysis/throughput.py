"""What a job gets done: samples, tokens and FLOPs, of all ranks together, and the share of its GPUs' peak (MFU).

Ranks say what they have counted (`ddpwatch.wire.messages.Trained`). Those that train on the same
samples count once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from ddpwatch.analysis.figures import ThroughputFigures
from ddpwatch.analysis.groups import Groups
from ddpwatch.common.peak_flops import peak_of
from ddpwatch.common.text import percent, short_count
from ddpwatch.common.units import NS_PER_S
from ddpwatch.wire.messages import Beat, Hello, Message, Trained

NEWEST = 16  # heartbeats of a rank, of which live figures are
FLOPS_PER_TOKEN = 6  # and parameter: 2 in the forward, 4 in the backward


_FIGURES = tuple(map(attrgetter, ("samples", "tokens", "flops")))


@dataclass(slots=True)
class _Rank:
    """What a rank has said: its first count, and the newest, at most one per step."""

    first: Trained
    newest: deque[Trained]


class Throughput:
    """Takes what ranks say, and adds it up.

    Args:
        groups: The run's process groups.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._hellos: dict[int, Hello] = {}
        self._ranks: dict[int, _Rank] = {}

    def apply_message(self, message: Message) -> None:
        """Takes a hello or a heartbeat; ignores all else."""
        if isinstance(message, Hello):
            self._hellos[message.rank] = message
        elif isinstance(message, Beat) and message.trained is not None:
            self._add_trained(message.rank, message.trained)

    def _add_trained(self, rank: int, trained: Trained) -> None:
        known = self._ranks.get(rank)
        if known is None or _counted(known.first) != _counted(trained):
            self._ranks[rank] = _Rank(trained, deque([trained], NEWEST))
        elif trained.step > known.newest[-1].step:
            known.newest.append(trained)

    def figures(self, step_ns: float | None, newest: bool = False) -> ThroughputFigures | None:
        """Returns what a mean step gets done, and what that is in a second; None if nothing is counted.

        Args:
            step_ns: What the mean step takes.
            newest: Whether only the newest steps count, not all.
        """
        if not self._ranks:
            return None
        replicas = self._groups.replicas(self._hellos.keys() | self._ranks.keys())
        samples, tokens, flops = (_total(replicas, self._per_step(get, newest)) for get in _FIGURES)
        by_formula = flops is None and tokens is not None and len(replicas) == len(set(replicas.values()))
        parameters = max((hello.parameters for hello in self._hellos.values()), default=0)
        if by_formula and tokens is not None and parameters:
            flops = FLOPS_PER_TOKEN * parameters * tokens
        rate = NS_PER_S / step_ns if step_ns else None
        peak = self._peak()
        flops_s = None if flops is None or rate is None else flops * rate
        return ThroughputFigures(
            ranks=len(self._ranks),
            samples_per_step=samples,
            tokens_per_step=tokens,
            flops_per_step=flops,
            flops_by="" if flops is None else "6 × parameters × tokens" if by_formula else "count()",
            samples_s=None if samples is None or rate is None else samples * rate,
            tokens_s=None if tokens is None or rate is None else tokens * rate,
            flops_s=flops_s,
            peak_flops_s=peak,
            mfu=None if flops_s is None or peak is None else flops_s / peak,
        )

    def _per_step(self, get: Callable[[Trained], float | None], newest: bool) -> dict[int, float]:
        """Returns how much of a figure each rank counts in a mean step; without those that do not."""
        ends = ((rank, one.newest[0] if newest else one.first, one.newest[-1]) for rank, one in self._ranks.items())
        spans = ((rank, get(first), get(last), last.step - first.step) for rank, first, last in ends)
        return {
            rank: (now - before) / steps
            for rank, before, now, steps in spans
            if steps and before is not None and now is not None
        }

    def _peak(self) -> float | None:
        """Returns what all devices of the job can do together; None if that is not known of one."""
        peaks = [hello.peak_flops or peak_of(hello.device_name) for hello in self._hellos.values()]
        known = [peak for peak in peaks if peak]
        return sum(known) if known and len(known) == max(len(peaks), self._groups.world_size) else None


def _counted(trained: Trained) -> tuple[bool, ...]:
    """Returns which of the figures a rank counts."""
    return tuple(get(trained) is not None for get in _FIGURES)


def _total(replicas: Mapping[int, int], counted: Mapping[int, float]) -> float | None:
    """Adds up what ranks count, that of a replica once."""
    most: dict[int, float] = {}
    for rank, value in counted.items():
        most[replicas[rank]] = max(value, most.get(replicas[rank], 0.0))
    return sum(most.values()) if most else None


def throughput_text(found: ThroughputFigures | None) -> str:
    """Returns tokens per second, or samples, and the MFU, in short; empty if nothing is known."""
    if found is None:
        return ""
    rate, unit = (found.samples_s, "samples/s") if found.tokens_s is None else (found.tokens_s, "tokens/s")
    mfu = "" if found.mfu is None else f"MFU {percent(found.mfu, 1)}"
    return ", ".join(filter(None, (f"{short_count(rate)} {unit}" if rate is not None else "", mfu)))
