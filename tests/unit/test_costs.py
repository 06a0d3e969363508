"""What must not grow faster than a run does: counted where that is possible, else compared at two sizes."""

from __future__ import annotations

import pytest

from ddpwatch.analysis import across_ranks
from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.late.cause import REFERENCE_RANKS, _delays
from tests.support import frames


class TestLateRanks:
    def test_of_a_packed_step_few_frames_are_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own, and those of some peers, however many there are."""
        world = 200
        across = StepAcrossRanks(3)
        for rank in range(world):
            across.add(frames.step(rank, 3, late_ms=40 if rank == 7 else 0))
        across.pack()
        read = []
        decode = across_ranks.decode
        monkeypatch.setattr(across_ranks, "decode", lambda frame: read.append(frame) or decode(frame))
        delays = _delays(across, 7, range(world))
        assert {param: at // frames.MS for param, at in delays.items()} == {3: 0, 2: 0, 1: 40, 0: 40}
        assert len(read) == 1 + REFERENCE_RANKS
