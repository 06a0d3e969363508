"""Memory that each rank uses: of its host as the collector samples it, and of its GPU as heartbeats say.

It is what the rule on growing memory (`ddpwatch.analysis.diagnosis.rules.memory_growth`) reads.
"""

from __future__ import annotations

from msgspec.structs import replace

from ddpwatch.analysis.figures import RankMemory
from ddpwatch.wire.messages import Beat, Message, RankSample

NOT_MEASURED = RankMemory(None, None, None, None, None, None)


class Memory:
    """Takes what says how much memory ranks use."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankMemory] = {}

    def apply_message(self, message: Message) -> None:
        """Takes a heartbeat or a rank's sample; ignores all else."""
        if isinstance(message, RankSample) and (host := message.memory_bytes) is not None:
            known = self.of_rank(message.rank)
            host_peak = max(host, known.host_peak_bytes or 0)
            self._ranks[message.rank] = replace(known, host_bytes=host, host_peak_bytes=host_peak)
        elif isinstance(message, Beat) and (reserved := message.memory_reserved) is not None:
            known = self.of_rank(message.rank)
            allocated = message.memory_allocated
            peaks = (allocated, message.memory_peak, known.gpu_allocated_peak_bytes)
            self._ranks[message.rank] = replace(
                known,
                gpu_bytes=reserved,
                gpu_peak_bytes=max(reserved, known.gpu_peak_bytes or 0),
                gpu_allocated_bytes=allocated,
                gpu_allocated_peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
            )

    def of_rank(self, rank: int) -> RankMemory:
        """Returns what is known of a rank."""
        return self._ranks.get(rank, NOT_MEASURED)
