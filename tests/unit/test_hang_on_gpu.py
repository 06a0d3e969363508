"""A hang on NCCL, from the hooks to the incident: hosts run ahead of a GPU that waits, and nobody waits in ``sync``.

The heartbeats are like those of real jobs of two ranks on an H100. Rank 1 slept after step 39: rank 0's host ran ahead
until CUDA's queue of launches was full, in the backward of step 49; or, after step 40, it waited for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.probe.heartbeat import Heartbeat
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Beat, Message, Step
from tests.support.frames import EPOCH_NS, hello
from tests.support.simulated_gpu import MS, SimulatedJob

STEPS, BUCKETS = 40, 2  # that both ranks train, and of each step
BEAT_MS, BEATS = 650, 20


class Rank:
    """A rank, and what its sender would send."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.job = SimulatedJob(offset=rank * 1234 * MS)
        self.heartbeat = Heartbeat(rank, self.job.recorder, lambda: [self.job])
        self._sent = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.job.step()
            self.job.gpu.synchronise()

    def send(self) -> Iterator[Message]:
        """Steps that are settled, in order, and a heartbeat."""
        for record in self.job.records[self._sent :]:
            if not record.settled():
                break
            self._sent += 1
            yield record.message(self.rank, 0)
        yield self.heartbeat.beat(self.job.gpu.host, 0)


def hang(ahead: int, place: str) -> tuple[list[Message], list[Incident]]:
    """Rank 1 sleeps between two steps: what both ranks send meanwhile, and what is found.

    Args:
        ahead: Steps that rank 0 enqueues without rank 1.
        place: Where rank 0's host then stands still.
    """
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        rank.train(STEPS)
    waiting = ranks[0].job
    waiting.gpu.stuck = True  # in the first collective that rank 1 does not issue
    for _ in range(ahead):
        waiting.step()
    if place != "input":
        waiting.recorder.forward_begin()
        waiting.recorder.forward_end()
    if place == "backward":
        waiting.recorder.backward_begin()
    state, sent = RunState(), list[Message]()
    for rank in ranks:
        state.apply_message(hello(rank.rank, 2), EPOCH_NS)
    for beat in range(BEATS):
        for rank in ranks:
            rank.job.gpu.host += BEAT_MS * MS
            for message in rank.send():
                state.apply_message(message, EPOCH_NS + beat * BEAT_MS * MS)
                sent.append(message)
    return sent, state.diagnosis.incidents()


@pytest.mark.parametrize(
    ("ahead", "place", "step"),
    [
        (9, "backward", STEPS + 9),  # CUDA's queue of launches is full
        (1, "between", STEPS + 1),  # the loss is read before the backward
        (1, "input", STEPS + 1),  # or after the step
    ],
)
def test_the_rank_that_sleeps_between_its_steps_is_named(ahead: int, place: str, step: int) -> None:
    sent, found = hang(ahead, place)
    beats = {message.rank: message for message in sent if isinstance(message, Beat)}
    issued = {0: BUCKETS * (STEPS + ahead), 1: BUCKETS * STEPS}
    assert [(beat.step, beat.phase, beat.issued, beat.in_flight) for beat in beats.values()] == [
        (step, place, issued[0], []),
        (STEPS, "input", issued[1], []),
    ]
    one, *others = found
    assert {other.kind for other in others} <= {"exposed_comm"}
    assert (one.kind, one.ranks, one.phase, one.since_step, one.open) == ("hang", (1,), "between", STEPS, True)
    assert f"it has issued {issued[1]} collectives, the ranks that wait {issued[0]}" in one.message
    assert one.evidence.why == "behind"


def test_steps_that_the_gpu_has_not_passed_are_not_sent() -> None:
    """The report would say that rank 0 has trained them."""
    sent, _ = hang(ahead=9, place="backward")
    steps = [message.step for message in sent if isinstance(message, Step)]
    assert steps
    assert max(steps) < STEPS
