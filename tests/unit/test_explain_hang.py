"""``ddpwatch explain`` asked at the moment at which a hang shows, or once the run has ended."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.incident import Evidence, Incident, StackGroup
from ddpwatch.analysis.explain.explanation import explain_hang
from ddpwatch.errors import UsageError
from ddpwatch.sampling.stack_order import FIRST_INCIDENT
from ddpwatch.viewer.explain import explain_live
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire.messages import Message, Stack, StackSamples
from tests.support.dashboards import FakeSource
from tests.support.frames import beat, bye, hello, run, status
from tests.support.sampled import a_pair

MISMATCH = Evidence(why="mismatch", stacks=[StackGroup([0], "job.py:11 in f", "", [])])
LINES = ("waits.py:7 in f", "waits.py:7 in f", "held.py:9 in g")


def stack(rank: int) -> Stack:
    file, _, rest = LINES[rank].partition(":")
    line, _, function = rest.partition(" in ")
    text = f'Thread 0x1 (most recent call first):\n  File "{file}", line {line} in {function}\n'
    one = beat(rank, for_s=4.0)
    return Stack(rank=rank, at_ns=one.at_ns, since_ns=one.since_ns, step=0, text=text)


def test_stacks_that_come_a_moment_later_are_waited_for() -> None:
    source = FakeSource()
    held = beat(2, 5, "forward", 4.0)
    beats = [beat(0, 5, "sync", 4.0, in_flight=[1]), beat(1, 5, "sync", 4.0, in_flight=[1]), held]
    hellos = [hello(rank, world=3) for rank in range(3)]
    snapshot: list[Message] = [*hellos, *beats, stack(2), status(), *beats, status()]
    source.put(snapshot, every_ms=300)
    source.put([stack(0), stack(1), status()], every_ms=300)  # the snapshot shows a hang, but not where 0 and 1 are
    found, _ = explain_live(cast("LiveSource", source), None, None, None, lambda line: None)
    assert "ranks 0, 1 wait at waits.py:7 in f" in found.text
    assert "rank 2 holds up the others at held.py:9 in g" in found.text


@pytest.mark.parametrize("last", [[bye()], []], ids=["run", "rank"])
def test_what_was_sampled_is_shown_once_the_rank_has_ended(last: list[Message]) -> None:
    """It said that no rank of that number is watched."""
    of_rank_1 = [replace(each, rank=each.rank // 3, explained=1) for each in a_pair()]
    frames = [*run(12), *of_rank_1, bye(0), bye(1), *last, status()]
    found, _ = explain_live(source_of(frames), 1, None, None, pytest.fail)
    assert found.text.startswith("rank 1 spends ")
    with pytest.raises(UsageError, match="has ended") as refused:
        explain_live(
            source_of([each for each in frames if not isinstance(each, StackSamples)]), 1, None, None, pytest.fail
        )
    assert FIRST_INCIDENT in refused.value.hint


@pytest.mark.parametrize("rank", [None, 1])
def test_who_asks_after_a_death_is_told_of_it(rank: int | None) -> None:
    """It said to ask as soon as a rank is late, and none was."""
    killed = replace(bye(1), reason="killed", detail="SIGKILL", signal=9)
    with pytest.raises(UsageError, match=r"ended: rank 1 was killed \(SIGKILL\)") as refused:
        explain_live(source_of([*run(12), killed, bye(0), bye(), status()]), rank, None, None, pytest.fail)
    assert "dmesg" in refused.value.hint


def test_ranks_in_different_calls_are_not_said_to_be_held_up() -> None:
    found = Incident("hang", "error", "", (0,), next_step="look why", evidence=MISMATCH)
    assert explain_hang(found).next_step == "look why"


def source_of(frames: list[Message]) -> LiveSource:
    source = FakeSource()
    source.put(frames)
    return cast("LiveSource", source)
