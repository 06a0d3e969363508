"""Checks what the soak makes of what it has seen on several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.seen import Viewer
from tests.soak.test_faults import Outcome, rows
from tests.support.network import SKEWS_S


@pytest.fixture
def viewer(tmp_path: Path) -> Viewer:
    """It has seen steps 1, 2 and 5 of rank 0, and 1 to 5 of rank 1, which ended every second, each on its own clock."""
    found = Viewer("ipc:///nowhere")
    for rank, steps in enumerate([(1, 2, 5), range(1, 6)]):
        found.seen.update((rank, step) for step in steps)
        ends = (int((100 + step + SKEWS_S[rank]) * 1e9) for step in range(8))
        (tmp_path / f"steps-{rank}").write_text("".join(f"{end}\n" for end in ends))
    return found


def test_steps_that_never_came_are_missing_between_the_first_and_the_last(viewer: Viewer, tmp_path: Path) -> None:
    assert viewer.missing(tmp_path, 2) == [103.0, 104.0]
    assert viewer.duplicates == 0
    viewer.seen[0, 5] += 1
    assert viewer.duplicates == 1


def test_a_run_is_complete_once_each_rank_has_sent_a_newer_step(viewer: Viewer) -> None:
    viewer.newest_s = {0: 105.0}
    assert not viewer.has_all_since(104.0, 2)
    viewer.newest_s[1] = 103.0
    assert not viewer.has_all_since(104.0, 2)
    viewer.newest_s[1] = 104.5
    assert viewer.has_all_since(104.0, 2)


def test_a_fault_has_a_row_with_what_was_lost_and_not_counted() -> None:
    outcomes = [
        Outcome("cut", 0, gone_s=30, end_s=31, lost=3, stated=3, ratio=1.0),
        Outcome("cut", 0, gone_s=30, end_s=36, twice=1, lost=2, stated=5, ratio=1.1),
    ]
    assert list(rows(outcomes)) == [["cut", "2", "1", "6.0", "6.0", "1", "5", "3", "1.050", "1.000 … 1.100"]]
