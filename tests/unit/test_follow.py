"""Runs that come one after the other are each followed once."""

from __future__ import annotations

import threading

from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.follow import new_runs
from tests.support.dashboards import FakeJobs


def test_each_run_comes_once_the_newest_first_and_none_is_missed_at_the_end() -> None:
    jobs, over, idle = FakeJobs("first"), threading.Event(), list[int]()

    def wait() -> None:
        idle.append(len(jobs.runs))
        jobs.start(f"run {len(idle)}")
        if len(idle) == 3:  # the one that starts now ends before the next look
            over.set()

    assert [info.run_id for info in new_runs(lambda: jobs.runs, over, wait)] == ["first", "run 1", "run 2", "run 3"]
    assert idle == [1, 2, 3]


def test_a_list_that_has_changed_meanwhile_counts() -> None:
    """Following a run takes hours: those that came and went meanwhile are not followed."""
    jobs, over, followed = FakeJobs("first", "gone"), threading.Event(), list[RunInfo]()
    for info in new_runs(lambda: jobs.runs, over):
        followed.append(info)
        over.set()
        jobs.runs[:] = [one for one in jobs.runs if one.run_id == info.run_id]
    assert len(followed) == 1
