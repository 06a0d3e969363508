"""How many collectives a process group has issued, where it also counts what one rank does alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from ddpwatch.probe import issue_counts
from ddpwatch.probe.issue_counts import issued_by, see_own_counts

RANKS = 3
C10D = """
class ProcessGroup: pass
class GroupMember: WORLD = None
def isend(tensor, group=None): return (group or GroupMember.WORLD).count(1)
def irecv(tensor, group=None): return (group or GroupMember.WORLD).count(1)
def send(tensor, group=None): return isend(tensor, group=group)
def monitored_barrier(group=None, during=None):
    group = group or GroupMember.WORLD
    for number in range(2 * (group.size() - 1) if group.rank == 0 else 2):
        group.count(1)
        if during is not None:
            during(number)
"""


class Gloo:
    """As Gloo counts: each send and receive, too."""

    def __init__(self, rank: int) -> None:
        self.rank, self._counted = rank, 0

    def size(self) -> int:
        return RANKS

    def count(self, collectives: int) -> None:
        self._counted += collectives

    def _get_sequence_number_for_group(self) -> int:
        return self._counted


def fail(error: Exception) -> None:
    raise error


@pytest.fixture
def c10d(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module like torch's, whose functions are seen."""
    monkeypatch.setattr(issue_counts, "_seen", [])  # torch's own may be
    made: Any = ModuleType("c10d")
    exec(C10D, made.__dict__)
    made.ProcessGroup = Gloo
    end = see_own_counts(made, fail)
    yield made
    end()


@pytest.mark.parametrize("default", [True, False])
def test_a_monitored_barrier_is_one_collective_of_all_ranks(c10d: Any, default: bool) -> None:
    """It was 4 of rank 0's and 2 of each other one's: steps were matched with others', and a wrong rank was named."""
    for rank in range(RANKS):
        group = Gloo(rank)
        c10d.GroupMember.WORLD = group if default else None
        seen = list[int | None]()

        def look(number: int, group: Gloo = group, seen: list[int | None] = seen) -> None:
            seen.append(issued_by(group))

        for _ in range(2):
            group.count(5)
            c10d.monitored_barrier(group=None if default else group, during=look)
        assert issued_by(group) == 12
        assert set(seen) == {6, 12}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls cannot be seen")
@pytest.mark.parametrize("name", ["isend", "irecv", "send"])
def test_what_two_ranks_do_among_themselves_is_no_collective_of_all(c10d: Any, name: str) -> None:
    group = Gloo(0)
    group.count(1)
    for _ in range(3):
        getattr(c10d, name)(None, group=group)
        assert issued_by(group) == 1
    group.count(1)
    assert issued_by(group) == 2


def test_after_a_barrier_that_raises_the_count_goes_on(c10d: Any) -> None:
    group = Gloo(1)

    def time_out(number: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        c10d.monitored_barrier(group=group, during=time_out)
    group.count(20)
    known = issued_by(group)
    assert known == 21
    c10d.monitored_barrier(group=group)
    assert issued_by(group) == known + 1


def test_nothing_is_left_of_it(c10d: Any) -> None:
    function: Callable[..., None] = c10d.monitored_barrier
    see_own_counts(c10d, fail)()  # seen already: that is not its to end
    assert c10d.monitored_barrier is function
    group = Gloo(0)
    c10d.monitored_barrier(group=group)
    assert issued_by(group) == 1


def test_a_group_that_does_not_count() -> None:
    assert issued_by(object()) is None
