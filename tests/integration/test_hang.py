"""Real ranks that hang: who is named, where each one is, what it cost; and a mismatch of collectives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ddpwatch.analysis.diagnosis.hangs.liveness import RankLiveness
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.wording import stack_lines
from ddpwatch.analysis.groups import Groups
from ddpwatch.recording.reader import Recording
from ddpwatch.sampling.stillness import is_of_hang
from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.wire.messages import Beat, Bye, Device, Group, Hello, Stack, Status, Step
from ddpwatch.wire.transport import Frame
from tests.support.jobs import SCRIPTS, Job, collector_pids, ddpwatch, live, the_run, wait_for

SCRIPT = SCRIPTS / "stuck.py"
RANKS, HANGS = 4, 20  # and the step in which rank 1 does
S = 1_000_000_000


def line_of(text: str) -> int:
    """The number of a line in the script."""
    return next(number for number, line in enumerate(SCRIPT.read_text().splitlines(), start=1) if text in line)


class Follower:
    """What is found in the frames so far."""

    def __init__(self) -> None:
        self.groups = Groups()
        self.liveness = RankLiveness(self.groups)
        self.now_ns = 0
        self.phases: dict[int, str] = {}

    def take(self, frames: Iterable[Frame]) -> None:
        for message, envelope in frames:
            at_ns = self.now_ns = max(self.now_ns, envelope.received_ns)
            if isinstance(message, (Hello, Group)):
                self.groups.apply_message(message)
            if isinstance(message, Hello):
                self.liveness.add_hello(message.rank, at_ns)
            elif isinstance(message, Beat):
                self.liveness.add_beat(message, at_ns)
                self.phases[message.rank] = message.phase
            elif isinstance(message, Step):
                self.liveness.add_step(message, at_ns)
            elif isinstance(message, Stack) and is_of_hang(message):
                self.liveness.add_stack(message)
            elif isinstance(message, Bye):
                self.liveness.add_bye(message, at_ns)
            elif isinstance(message, Device):
                self.liveness.note_collector(at_ns)
            elif isinstance(message, Status):
                self.liveness.pass_time(at_ns)

    def found(self, open: bool = True) -> list[Incident]:
        return [hang for hang in self.liveness.hangs(self.now_ns) if hang.open is open]

    def reads(self, source: LiveSource) -> int:
        """Takes what there is; returns how many ranks have sent a heartbeat so far."""
        self.take(source.read(0.1))
        return len(self.phases)

    def until(self, source: LiveSource, enough: Callable[[Incident], object], open: bool = True) -> Incident:
        """The first hang that satisfies the caller."""
        hits: list[Incident] = []

        def seen() -> bool:
            self.take(source.read(0.1))
            hits[:] = [one for one in self.found(open) if enough(one)]
            return bool(hits)

        wait_for(seen, "that hang is found")
        return hits[0]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The parameters of the same ranks, unwatched and undisturbed."""
    folder = tmp_path_factory.mktemp("control")
    (folder / "mismatch").touch()
    with Job(SCRIPT, str(folder), log=folder / "log", ranks=RANKS, DDPWATCH="0") as job:
        assert job.wait() == 0, job.output()
    return parameters(folder)


def parameters(folder: Path) -> list[str]:
    return [(folder / f"parameters{rank}").read_text() for rank in range(RANKS)]


@pytest.mark.seconds(25)
@pytest.mark.usefixtures("run_directory")
def test_who_hangs_is_named_with_the_line_it_is_at(tmp_path: Path, control: list[str]) -> None:
    follower, file = Follower(), tmp_path / "run.mcap"
    os.mkfifo(tmp_path / "go")
    with Job(SCRIPT, str(tmp_path), str(file), log=tmp_path / "log", ranks=RANKS) as job:
        info = the_run(job)
        with live(info) as source:
            wait_for(lambda: follower.reads(source) == RANKS, "all ranks are seen")
            (tmp_path / "watched").touch()  # not before, so that live and replay see the same
            hang = follower.until(source, lambda one: stuck(one) and len(ranks_seen(one)) == RANKS)
            check_stuck(hang)
            shown = ddpwatch("explain", info.run_id)
            assert f"ranks 0, 2, 3 wait at {hang.evidence.call_sites[0]}" in shown.stdout, shown
            open(tmp_path / "go", "w").close()
            past = follower.until(source, stuck, open=False)
            assert (past.since_step, past.until_step) == (hang.since_step, hang.since_step)
            assert past.cost_ns >= hang.cost_ns > 2 * 3 * S
            assert past.evidence.call_sites == hang.evidence.call_sites
            check_stopped(job, follower, source)
            (tmp_path / "mismatch").touch()
            check_mismatch(follower.until(source, lambda one: mismatch(one) and len(ranks_seen(one)) == RANKS))
            assert all(int((tmp_path / f"stacks{rank}").read_text()) > 10 for rank in range(RANKS))
        job.kill_everything()
        wait_for(lambda: not collector_pids(info.run_id), "the collector ends")
    assert parameters(tmp_path) == control
    replayed = Follower()
    replayed.take(Recording(file))
    assert at_step(HANGS, replayed) == at_step(HANGS, follower)
    assert any(one.message.startswith("ranks waited in different calls for ") for one in replayed.found(open=False))


def stuck(one: Incident) -> bool:
    """Whether it is the hang that is meant: on a busy machine, ranks may have stood still before."""
    return (one.ranks, one.since_step) == ((1,), HANGS)


def ranks_seen(one: Incident) -> set[int]:
    """The ranks that have sent their stack."""
    return {rank for group in one.evidence.stacks or () for rank in group.ranks}


def mismatch(one: Incident) -> bool:
    return bool(one.evidence.why == "mismatch")


def at_step(step: int, follower: Follower) -> list[Incident]:
    return [one for one in follower.found(open=False) if one.since_step == step]


def check_stuck(hang: Incident) -> None:
    """Rank 1 is in its forward, as its stack says, and the others wait for it in their backwards."""
    assert hang.severity == "error"
    assert hang.message.startswith("rank 1 is stuck in ")
    held_up, waiting = line_of('open(FOLDER / "go")'), line_of(".square().sum().backward()")
    assert hang.evidence.call_sites == {
        1: f"stuck.py:{held_up} in held_up", 0: f"stuck.py:{waiting} in train",
    }  # fmt: skip
    blamed, others = hang.evidence.stacks
    assert (blamed.ranks, others.ranks) == ([1], [0, 2, 3])
    assert blamed.frames[0].endswith(f"stuck.py:{held_up} in held_up")
    assert len(set(hang.evidence.issued.values())) == 2
    assert hang.evidence.issued[1] < hang.evidence.issued[0]
    assert stack_lines(hang.ranks, hang.evidence)[:2] == [
        f"rank 1 holds up the others at stuck.py:{held_up} in held_up",
        f"ranks 0, 2, 3 wait at stuck.py:{waiting} in train (_engine_run_backward)",
    ]


def check_stopped(job: Job, follower: Follower, source: LiveSource) -> None:
    """A rank that is stopped sends nothing, and so no stack."""
    victim = job.ranks()[2]
    victim.send_signal(signal.SIGSTOP)
    try:
        hang = follower.until(
            source, lambda one: one.ranks == (2,) and one.message.startswith("rank 2 has been silent for ")
        )
    finally:
        victim.send_signal(signal.SIGCONT)
    # On a busy machine, it may have stood still before, and sent its stack.
    assert (2 in hang.evidence.no_stack) is (2 not in ranks_seen(hang))
    follower.until(source, lambda one: one.ranks == (2,), open=False)


def check_mismatch(hang: Incident) -> None:
    gathers, trains = line_of("dist.all_gather("), line_of(".square().sum().backward()")
    assert hang.ranks == (1,)
    assert f"rank 1 at stuck.py:{gathers} in main" in hang.message
    assert f"rank 0 at stuck.py:{trains} in train" in hang.message
