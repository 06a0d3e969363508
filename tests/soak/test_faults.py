"""Checks what goes wrong between hosts, at random moments of a running job: ddpwatch is back, and counts what is lost.

``SOAK_TIMES`` in the environment: how often each fault strikes (3); ``SOAK_SEED``: of their moments. ddpwatch has a
link of its own, so that the training goes on. Prints a table:
    ≤ 5 s, p50 s, worst s    from the end of the cause until a viewer has a newer step of every rank
    twice                    steps that came twice
    lost, uncounted          steps that a viewer never got (of a full disk: frames that are not recorded), and by how
                             many ddpwatch's own count differs
    step                     the mean step while it lasts, to that before (`paired.hodges_lehmann`)
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ddpwatch.common.text import table
from ddpwatch.errors import DdpwatchError
from ddpwatch.probe.collector_process import RESTARTS
from ddpwatch.recording.reader import Recording
from tests.soak.seen import Viewer, ends
from tests.support.hosts import skip, why_not
from tests.support.network import START_S, TOOLS, Job, Network, network
from tests.support.paired import hodges_lehmann

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

TIMES, SEED = int(os.environ.get("SOAK_TIMES", "3")), int(os.environ.get("SOAK_SEED", "1"))
HOSTS, ROOT_HOST, AGENT_HOST = 2, 0, 1  # one rank on each
BEFORE_S, AT_LEAST_S, RANDOM_S = 5.0, 5.0, 2.0  # around a fault, in which the step is measured; up to the next one
STOPPED_S, CUT_S, FULL_S, SLOW_S, NOTHING_S = 20.0, 30.0, 10.0, 10.0, 5.0
ASLEEP_S, AWAKE_S = 0.45, 0.05  # of a slow root
GOAL_S, GIVE_UP_S = 5.0, 60.0
LOST_BEFORE_S = 3.0  # before a fault, a step may have ended that is lost with it
DISK_BYTES = 64 << 20
COLUMNS = (
    "fault", "times", "≤ 5 s", "p50 s", "worst s", "twice", "lost", "uncounted", "step", "95 % interval",
)  # fmt: skip


@dataclass
class Outcome:
    """One fault, on this machine's clock (s).

    Attributes:
        fault: Its name.
        start_s: When it struck.
        gone_s: When its cause was gone.
        end_s: When the run was complete again at a viewer.
        twice: Steps that came twice.
        lost: Frames lost.
        stated: How many ddpwatch says were lost.
        ratio: Of the mean step in the fault and in the time before.
    """

    fault: str
    start_s: float
    gone_s: float = 0.0
    end_s: float = 0.0
    twice: int = 0
    lost: int = 0
    stated: int = 0
    ratio: float = 1.0

    @property
    def took_s(self) -> float:
        """From the end of the cause to the recovery."""
        return self.end_s - self.gone_s


class Scene:
    """A job and its viewer."""

    def __init__(self, job: Job, viewer: Viewer, disk: Path, dice: random.Random) -> None:
        self.job, self.viewer, self.disk, self.dice = job, viewer, disk, dice

    def pause(self, seconds: float) -> None:
        """Lets it train."""
        self.job.pause(seconds)

    def collector(self, host: int) -> psutil.Process:
        """The one on a host."""
        found = self.job.collector(host)
        assert found is not None
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Waits for something that must come."""
        self.job.until(condition, GIVE_UP_S, what)


# -- faults: each returns when its cause is gone ----------------------------------------------------------------------


def agent_killed(scene: Scene) -> None:
    scene.collector(AGENT_HOST).kill()


def root_killed(scene: Scene) -> None:
    scene.collector(ROOT_HOST).kill()


def agent_stopped(scene: Scene) -> None:
    agent = scene.collector(AGENT_HOST)
    try:
        agent.send_signal(signal.SIGSTOP)
        scene.pause(STOPPED_S)
    finally:
        agent.send_signal(signal.SIGCONT)


def partition(scene: Scene) -> None:
    how = scene.dice.choice(("down", "silent"))
    try:
        scene.job.network.cut("mon0", AGENT_HOST, how)
        scene.pause(CUT_S)
    finally:
        scene.job.network.mend("mon0", AGENT_HOST, how)


def disk_full(scene: Scene) -> None:
    filler = scene.disk / "filler"
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        scene.pause(FULL_S)
    finally:
        filler.unlink()


def root_slow(scene: Scene) -> None:
    root, end_s = scene.collector(ROOT_HOST), time.monotonic() + SLOW_S
    try:
        while time.monotonic() < end_s:
            root.send_signal(signal.SIGSTOP)
            scene.pause(ASLEEP_S)
            root.send_signal(signal.SIGCONT)
            scene.pause(AWAKE_S)
    finally:
        root.send_signal(signal.SIGCONT)


def nothing(scene: Scene) -> None:
    scene.pause(NOTHING_S)


FAULTS: dict[str, Callable[[Scene], None]] = {
    "none": nothing,
    "agent killed": agent_killed,
    "root killed": root_killed,
    "agent stopped for 20 s": agent_stopped,
    "network cut for 30 s": partition,
    "root's disk full": disk_full,
    "root slow": root_slow,
}


# -- jobs -------------------------------------------------------------------------------------------------------------


def test_faults_are_survived_and_what_is_lost_is_counted() -> None:
    if why := why_not(*TOOLS):
        skip(why)
    dice = random.Random(SEED)
    left, outcomes = dict.fromkeys(FAULTS, TIMES), list[Outcome]()
    while any(left.values()):  # as few jobs as may have that many dead collectors
        plan = [name for name, count in left.items() for _ in range(min(count, RESTARTS))]
        left = {name: max(0, count - RESTARTS) for name, count in left.items()}
        outcomes += _one_job(dice.sample(plan, len(plan)), dice)
    print("\n".join(["", *table(COLUMNS, list(rows(outcomes)))]))
    assert [one for one in outcomes if one.twice or one.lost != one.stated] == []


def _one_job(plan: Sequence[str], dice: random.Random) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with network(HOSTS) as hosts, _watched(hosts) as job:
        disk = Path(f"/proc/{hosts.hosts[ROOT_HOST].pid}/root{_disk(hosts)}")
        with Viewer(job.look().publish) as viewer:
            scene = Scene(job, viewer, disk, dice)
            scene.until(lambda: viewer.has_all_since(0.0, HOSTS), "steps of all ranks")
            for name in plan:
                scene.pause(BEFORE_S + dice.uniform(0, RANDOM_S))
                outcomes.append(_strike(name, scene))
            (hosts.folder / "stop").touch()
            job.wait(START_S)
            _settle(outcomes, viewer, hosts.folder, disk)
    return outcomes


@contextlib.contextmanager
def _watched(hosts: Network) -> Iterator[Job]:
    """The job, with a small disk of its own for the recording, and a link of its own for what ddpwatch sends."""
    disk = _disk(hosts)
    disk.mkdir()
    (hosts.folder / "watch").touch()
    hosts.hosts[ROOT_HOST].run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk))
    arguments = (str(hosts.folder), str(disk / "run.mcap"))
    with hosts.job("tests/soak/hosts_job.py", *arguments, DDPWATCH_IFNAME="mon0") as job:
        yield job


def _disk(hosts: Network) -> Path:
    return hosts.folder / "disk"


def _strike(fault: str, scene: Scene) -> Outcome:
    viewer, outcome = scene.viewer, Outcome(fault, time.monotonic())
    twice, stated = viewer.duplicates, _stated(fault, viewer)
    FAULTS[fault](scene)
    outcome.gone_s = time.monotonic()
    scene.until(_recovery(outcome, viewer), f"its recovery: {fault}")
    outcome.end_s = time.monotonic()
    scene.pause(max(1.0, outcome.start_s + AT_LEAST_S - outcome.end_s))  # and for what may come twice
    outcome.twice, outcome.stated = viewer.duplicates - twice, _stated(fault, viewer) - stated
    return outcome


def _recovery(outcome: Outcome, viewer: Viewer) -> Callable[[], bool]:
    """All ranks have sent a step that ended since; after a full disk, the recording grows, too."""
    nbytes = viewer.status.recording_bytes or 0 if viewer.status is not None else 0

    def recorded() -> bool:
        return viewer.status is not None and (viewer.status.recording_bytes or 0) > nbytes

    def recovered() -> bool:
        return viewer.has_all_since(outcome.gone_s, HOSTS) and (outcome.fault != "root's disk full" or recorded())

    return recovered


def _stated(fault: str, viewer: Viewer) -> int:
    """What ddpwatch says is missing: of a full disk in the recording, else in what the viewer sees."""
    if fault != "root's disk full":
        return viewer.stated_missing
    found = re.search(r"(\d+) frames lost", viewer.status.recording_error if viewer.status is not None else "")
    return int(found[1]) if found else 0


# -- afterwards -------------------------------------------------------------------------------------------------------


def _settle(outcomes: Sequence[Outcome], viewer: Viewer, folder: Path, disk: Path) -> None:
    """Adds to the outcomes what shows only at the job's end: what was really lost, and how long steps took."""
    missing, ended = sorted(viewer.missing(folder, HOSTS)), ends(folder, ROOT_HOST)
    recorded = _recorded(disk / "run.mcap")
    for number, outcome in enumerate(outcomes):
        after = outcomes[number + 1 :]
        until_s = after[0].start_s - LOST_BEFORE_S if after else ended[-1]
        since_s = outcome.start_s - LOST_BEFORE_S
        if outcome.fault == "root's disk full":
            outcome.lost = _unrecorded(viewer, recorded, outcome)
        else:
            outcome.lost = bisect_left(missing, until_s) - bisect_left(missing, since_s)
        in_fault = _mean_step(ended, outcome.start_s, max(outcome.end_s, outcome.start_s + AT_LEAST_S))
        outcome.ratio = in_fault / _mean_step(ended, outcome.start_s - BEFORE_S, outcome.start_s)


def _recorded(file: Path) -> set[int]:
    """The receive times of the frames in the recording, which name them."""
    with contextlib.suppress(DdpwatchError, OSError):
        return {envelope.received_ns for _, envelope in Recording(file)}
    return set()


def _unrecorded(viewer: Viewer, recorded: set[int], outcome: Outcome) -> int:
    """How many frames that the viewer got at that time are not in the recording."""
    frames = viewer.arrived_s.items()
    return sum(outcome.start_s - 1 < at_s < outcome.end_s and frame not in recorded for frame, at_s in frames)


def _mean_step(ended: Sequence[float], since_s: float, until_s: float) -> float:
    first, last = bisect_left(ended, since_s), bisect_left(ended, until_s) - 1
    return (ended[last] - ended[first]) / (last - first)


def rows(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    """The table's rows; of faults that took place."""
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        of_it = [outcome for outcome in outcomes if outcome.fault == name]
        yield [name, str(len(of_it)), *_cells(of_it)]


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    took = sorted(outcome.took_s for outcome in outcomes)
    step = hodges_lehmann([outcome.ratio for outcome in outcomes])
    return [
        str(sum(seconds <= GOAL_S for seconds in took)),
        f"{took[len(took) // 2]:.1f}",
        f"{took[-1]:.1f}",
        str(sum(outcome.twice for outcome in outcomes)),
        str(sum(outcome.lost for outcome in outcomes)),
        str(sum(abs(outcome.lost - outcome.stated) for outcome in outcomes)),
        f"{step.value:.3f}",
        f"{step.low:.3f} … {step.high:.3f}",
    ]
