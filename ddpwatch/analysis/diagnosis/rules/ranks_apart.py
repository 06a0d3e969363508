"""A rank that leaves out a backward: it goes on to its next batch, and averages its gradients with those of others'."""

from __future__ import annotations

from collections import deque

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.thresholds import KEEP_ENDED
from ddpwatch.analysis.step import phase_starts
from ddpwatch.wire.messages import Step


class RanksApart:
    """Finds it in watched steps: a rank computed a forward more than others of its group, and as many backwards."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, int, int]] = deque(maxlen=KEEP_ENDED)  # rank, step, and how many it left out
        self._until = 0

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        across = facts.across
        self._until = across.step
        if not across.counted or len(across) < 2:
            return
        alone = {rank: _lone_forwards(step) for rank, step in across.ranks.items()}
        for rank, count in alone.items():
            if not count:  # nearly always
                continue
            peers = [alone[peer] for peer in across.skew.peers.get(rank, ()) if peer in alone and peer != rank]
            if peers and count > max(peers):
                self._found.append((rank, across.step, count - max(peers)))

    def incidents(self) -> list[Incident]:
        """Returns one for each rank: what it has left out stays left out."""
        first: dict[int, int] = {}
        left_out: dict[int, int] = {}
        for rank, step, count in self._found:
            first.setdefault(rank, step)
            left_out[rank] = left_out.get(rank, 0) + count
        return [self._incident(rank, first[rank], count) for rank, count in left_out.items()]

    def _incident(self, rank: int, since: int, count: int) -> Incident:
        several = f"{count} backwards" if count > 1 else "a backward"
        ahead = f"{count} batch{'es' if count > 1 else ''} ahead"
        return Incident(
            kind="ranks_apart",
            severity="warning",
            message=f"rank {rank} left out {several} (step {since}): if it skipped a batch, it is {ahead} since then",
            ranks=(rank,),
            phase="backward",
            since_step=since,
            until_step=self._until,
            steps=self._until - since + 1,
            open=True,
        )


def _lone_forwards(step: Step) -> int:
    """Returns how many forwards no backward has followed. One that waits for buffers first has no length until then."""
    phases = [span.phase for span in step.spans if span.end > span.start]
    if phases.count("forward") < 2 and "backward" in phases:  # nearly always
        return 0
    return max(0, len(phase_starts(step, "forward")) - len(phase_starts(step, "backward")))
