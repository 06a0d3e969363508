"""Loops without a wrapper: they compute the same bits, and have their steps, their phases and their collectives."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

from ddpwatch.analysis.step import comm_of
from ddpwatch.recording.reader import Recording
from ddpwatch.wire.messages import Group, Layout, Step
from tests.integration.scripts.own_loops import LOOPS, UPDATES
from tests.support.jobs import SCRIPTS, Job

pytestmark = [pytest.mark.xdist_group("own loops"), pytest.mark.seconds(10)]  # one job for all, and its unwatched twin
# What each watched step but the first issues, on each rank
ISSUES: dict[str, dict[str, int]] = {
    "all_reduce": {"all_reduce": 4},
    "own_optimizer": {"reduce_scatter": 4, "all_gather": 4},
    "within_backward": {"all_reduce": 4},
    "experts": {"all_to_all": 2},
    "pipeline": {"send": 1, "recv": 1},
}
SEES = sys.version_info >= (3, 12) or tuple(map(int, version("torch").split(".")[:2])) >= (2, 14)
sees = pytest.mark.skipif(not SEES, reason="this torch and Python only count collectives")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The watched job's, and its twin's."""

    def run(watched: bool) -> Path:
        folder = tmp_path_factory.mktemp("watched" if watched else "twin")
        environment = {"DDPWATCH_DETAIL": "full"} if watched else {"DDPWATCH": "0"}
        with Job(SCRIPTS / "own_loops.py", str(folder), log=folder / "log", streams=folder, **environment) as job:  # type: ignore[arg-type] # fmt: skip
            assert job.wait() == 0, [(folder / str(rank) / "stderr.log").read_text() for rank in (0, 1)]
        return folder

    return run(True), run(False)


def steps_of(folder: Path, name: str, rank: int = 0) -> list[Step]:
    return [m for m, _ in Recording(folder / name) if isinstance(m, Step) and m.rank == rank]


def test_it_computes_and_says_the_same(folders: tuple[Path, Path]) -> None:
    for rank in ("0", "1"):
        for stream in ("stdout.log", "stderr.log"):
            watched, twin = ((folder / rank / stream).read_text() for folder in folders)
            assert watched == twin


@pytest.mark.parametrize("name", LOOPS)
def test_each_update_is_a_step(name: str, folders: tuple[Path, Path]) -> None:
    for rank in (0, 1):
        steps = steps_of(folders[0], name, rank)
        assert [step.step for step in steps] == list(range(UPDATES))
        assert [step.status for step in steps] == ["warmup", *["ok" if SEES else "shadow"] * (UPDATES - 1)]
        for before, after in itertools.pairwise(steps):
            assert after.start_ns == before.start_ns + before.duration_ns
        for step in steps[1:]:
            assert {"forward", "backward", "optimizer"} <= {span.phase for span in step.spans}


@sees
@pytest.mark.parametrize("name", ISSUES)
def test_each_collective_is_seen_with_its_time(name: str, folders: tuple[Path, Path]) -> None:
    for rank in (0, 1):
        for step in steps_of(folders[0], name, rank)[1:]:
            assert Counter(step.comm_op) == ISSUES[name]
            columns = step.comm_launch, step.comm_done, step.comm_bytes
            for launch, done, size in zip(*columns, strict=True):
                assert size > 0
                if sys.version_info >= (3, 12):
                    assert done is not None
                    assert 0 <= launch <= done <= step.duration_ns


@pytest.mark.skipif(sys.version_info < (3, 12), reason="what functions return is seen by events")
def test_of_collectives_that_are_waited_for_later_it_is_seen_when_they_are(folders: tuple[Path, Path]) -> None:
    for step in steps_of(folders[0], "own_optimizer")[1:]:
        columns = step.comm_op, step.comm_launch, step.comm_wait_begin, step.comm_wait_end
        later = [row for op, *row in zip(*columns, strict=True) if op == "all_gather"]
        assert all(launch < begin <= end for launch, begin, end in later)
        assert later[0][1] > later[-1][0]  # all are issued before the first one is waited for
        assert comm_of(step) is not None


@sees
def test_a_collective_has_the_place_that_issues_it(folders: tuple[Path, Path]) -> None:
    source = (SCRIPTS / "own_loops.py").read_text().splitlines()
    messages = [message for message, _ in Recording(folders[0] / "all_reduce")]
    newest = [message for message in messages if isinstance(message, Layout)][-1]
    assert newest.kind == "call"
    file, line = newest.buckets[0].name.split(":")
    assert (file, source[int(line) - 1].strip()) == ("own_loops.py", "dist.all_reduce(gradient)")


@sees
def test_groups_of_the_jobs_own_are_known(folders: tuple[Path, Path]) -> None:
    groups = {m.id: m for m, _ in Recording(folders[0] / "experts") if isinstance(m, Group)}
    used = {group for step in steps_of(folders[0], "experts")[1:] for group in step.comm_group}
    assert len(used) == 1
    assert groups[used.pop()].ranks == [0, 1]


@sees
def test_numbers_of_collectives_are_those_of_their_group(folders: tuple[Path, Path]) -> None:
    """So ranks' steps belong together, and what nobody has seen would show as a gap."""
    for rank in (0, 1):
        seen = [
            step.comm_first_seq + offset
            for step in steps_of(folders[0], "all_reduce", rank)[1:]
            if step.comm_first_seq is not None
            for offset in step.comm_seq
        ]
        assert seen == list(range(seen[0], seen[0] + 4 * (UPDATES - 1)))


def test_micro_batches_may_change_and_skipped_ones_are_part_of_the_next_step(folders: tuple[Path, Path]) -> None:
    assert [s.micro_steps for s in steps_of(folders[0], "micro_batches")[1:]] == [1 + i % 3 for i in range(1, UPDATES)]
    assert [s.micro_steps for s in steps_of(folders[0], "skipped")[1:]] == [1, *[2, 1] * 5]


def test_waits_for_data_are_seen(folders: tuple[Path, Path]) -> None:
    assert all(step.data for step in steps_of(folders[0], "all_reduce")[1:])
    assert all(step.data is None for step in steps_of(folders[0], "gan")[1:])
