"""HSDP, whose ranks are in two groups each: whom they are compared with, and what the table of groups has."""

from __future__ import annotations

import pytest

from ddpwatch.analysis.buckets import BucketTable, bucket_steps
from ddpwatch.viewer.state import StepAcrossRanks
from tests.support.frames import MS, state_of
from tests.support.sharded import BLOCKS, NBYTES, TRANSFER_MS, WORLD, hsdp_run

LATE_MS = 20


@pytest.fixture(scope="module")
def across() -> StepAcrossRanks:
    found = state_of([*hsdp_run(3, LATE_MS)]).newest_step()
    assert found is not None
    return found


def test_each_rank_is_compared_within_the_group_of_its_first_collective(across: StepAcrossRanks) -> None:
    assert across.skew.peers == {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def test_the_other_replica_waits_in_the_all_reduce(across: StepAcrossRanks) -> None:
    assert across.skew.wait == {rank: 0 if rank == WORLD - 1 else LATE_MS * MS for rank in range(WORLD)}
    late = {key[4] for key, skew in across.skew.buckets.items() if skew.last - skew.first == LATE_MS * MS}
    assert late == {"reduce_scatter", "all_reduce"}


def test_every_use_of_a_group_has_its_bandwidth(across: StepAcrossRanks) -> None:
    per_s = NBYTES / 2 / TRANSFER_MS * 1e3  # (n-1)/n of it; for the all-reduce of a shard, twice that of half of it
    known = [row.busbw for (_, group, *_), row in bucket_steps(across).items() if group]
    assert known == [pytest.approx(per_s)] * 4 * BLOCKS


def test_the_table_follows_a_group_through_the_step(across: StepAcrossRanks) -> None:
    table = BucketTable()
    assert table.update([across])
    rows = [(row.index, row.use) for row in table.rows(state_of([*hsdp_run(3, LATE_MS)]).layouts)]
    uses = ("all_gather", "all_gather_backward", "reduce_scatter", "all_reduce")
    root = ("all_gather", "reduce_scatter", "all_reduce")
    assert rows == [(0, use) for use in root] + [(block, use) for block in range(1, BLOCKS + 1) for use in uses]
