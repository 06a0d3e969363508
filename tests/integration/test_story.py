"""The story that the dashboard is for: a real job gets into trouble, the overview says which, and that it is over.

Other load on the machine is trouble as well, and the dashboard is right to say so. So no claim is held against what was
injected alone, but against what the ranks themselves have printed of the same steps, and only as far as one stamp has
to lie before another whatever else runs. How soon a claim comes or goes is counted in the recording's steps, not while
the screen is being drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.recording.reader import Recording
from ddpwatch.run import rundir
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import AttachSpec
from ddpwatch.viewer.state import RunState
from tests.support.dashboards import screen_text, until
from tests.support.jobs import PATIENCE_S, ROOT, Job

pytestmark = pytest.mark.same_everywhere

SCRIPT = ROOT / "demo" / "story_job.py"
SOON = 20  # steps until trouble is named, and until it is no longer
PATIENCE = (PATIENCE_S, 1.0)  # seconds in all, and between two looks, each of which paints the screen
HEALTHY = 120  # steps without trouble
INJECTED_MS = 80  # of lateness, or more
CHANCE_MS = 4  # of lateness without trouble: it counts as noise, and the more of that, the later a rank is named
ENOUGH = 8  # steps that show what a median of 16 says
# What an incident is worth: a tenth of the step exposed, 4 % spent on input, a pause of 250 ms, 3 s without progress.
# Half of that has to be in the ranks' stamps; and a quarter of the lateness that a finding adds up to, as it may be the
# lateness of a phase, of which half has to make the rank late.
SHARE, STUCK_NS, PAUSE_NS, LATE_PART = 0.02, 1.5e9, 125e6, 0.25

LATE_BY = r"late by \d+ ms in (?:each step|\d+ of \d+ timed steps)"
SLOW_BACKWARD = re.compile(
    rf"rank 1 is {LATE_BY}: its backward takes \d+ ms longer, "
    r"from (?:4\.weight|4\.bias|bucket \d+ \(4\.bias\)) on.*; without the wait for it, a step would be \d+ % shorter"
)
SLOW_INPUT = re.compile(rf"rank 0 is {LATE_BY}: its wait for data takes \d+ ms longer")


@dataclass(frozen=True)
class Fact:
    """One step of one rank, by its own clock (monotonic ns, the same for all ranks of a host)."""

    start: int
    forward: int
    layers: tuple[int, ...]  # reached by the backward, the last first
    backward_end: int
    end: int

    @classmethod
    def of(cls, stamps: list[int]) -> Fact:
        """From the stamps in the order in which they were printed."""
        start, forward, *layers, backward_end, end = stamps
        return cls(start, forward, tuple(layers), backward_end, end)

    @property
    def step_ns(self) -> int:
        """How long the step took, as the rank sees it."""
        return self.end - self.start

    def late_ns(self, others: Iterable[Fact]) -> int:
        """How long after the first rank this one reached a layer, at most."""
        return max(own - min(first) for own, *first in zip(self.layers, *(f.layers for f in others), strict=True))

    def latest_ns(self, other: Fact) -> int:
        """How much later than the other rank this one can have launched its last bucket.

        The other one cannot have done so before its last layer, and this one not after the end of its backward.
        """
        return max(0, self.backward_end - other.layers[-1])


class Facts:
    """What the ranks have printed."""

    def __init__(self, output: str) -> None:
        self.steps: dict[int, dict[int, Fact]] = {}
        self.trouble: dict[int, str] = {}
        for rank, step, trouble, stamps in re.findall(r"^rank (\d+) step (\d+) (\S+): ([\d ]+)$", output, re.MULTILINE):
            self.steps.setdefault(int(step), {})[int(rank)] = Fact.of([int(stamp) for stamp in stamps.split()])
            self.trouble[int(step)] = trouble

    def both(self, trouble: str) -> list[int]:
        """The steps with that trouble that both ranks have printed."""
        return [step for step, ranks in self.steps.items() if len(ranks) == 2 and self.trouble[step] == trouble]

    def first(self, trouble: str, after: int = 0) -> int:
        """The first step with that trouble."""
        return min(step for step, name in self.trouble.items() if name == trouble and step > after)

    def late_ms(self, step: int, rank: int) -> float:
        """How late a rank was in that step; 0 if a rank has not printed it."""
        ranks = self.steps.get(step, {})
        return ranks[rank].late_ns(ranks.values()) / 1e6 if len(ranks) == 2 else 0.0

    def latest_ns(self, step: int, rank: int) -> int:
        """How late the rank can have been in that step; 0 if a rank has not printed it."""
        ranks = self.steps.get(step, {})
        return ranks[rank].latest_ns(ranks[1 - rank]) if len(ranks) == 2 else 0

    def is_disturbed(self, step: int) -> bool:
        """Whether chance made a rank late, or almost as late as the one that the trouble strikes."""
        late = [self.late_ms(step, rank) for rank in (0, 1)]
        struck = {"slow-backward": 1, "slow-input": 0}.get(self.trouble.get(step, "none"))
        return max(late) > CHANCE_MS if struck is None else late[struck] < INJECTED_MS

    def longest_ns(self, first: int, last: int) -> int:
        """From one step's backward to the end of the next one, at most: no step that the probe sees is longer."""
        steps = [self.steps.get(number, {}) for number in range(first - 2, last + 3)]
        pairs = [(before[rank], after[rank]) for before, after in pairwise(steps) for rank in {*before} & {*after}]
        return max((after.end - before.backward_end for before, after in pairs), default=0)

    def waits_for_both(self, step: int) -> bool:
        """Whether each rank's backward lasted until the other one's last layer: to a step timer, they look alike."""
        ranks = self.steps[step].values()
        return min(fact.backward_end for fact in ranks) >= max(fact.layers[-1] for fact in ranks)

    def bear_out(self, incident: Incident) -> bool:
        """Whether what an incident says is in the ranks' own stamps."""
        first, last = incident.since_step or 0, incident.until_step or max(self.steps)
        near = [fact for n in range(first - 1, last + 3) for fact in self.steps.get(n, {}).values()]
        if incident.evidence.late_ms is not None:
            latest = sum(self.latest_ns(step, incident.ranks[0]) for step in range(first, last + 1))
            return latest > LATE_PART * incident.steps * incident.evidence.late_ms * 1e6
        if incident.kind == "pause":  # a step took far longer than others
            return self.longest_ns(first, last) > PAUSE_NS
        if incident.phase == "gc":  # again and again, a collection made others wait
            return self.longest_ns(first, last) > incident.evidence.longest_ms * 1e6
        if incident.kind == "hang":  # a rank was stuck, or silent
            return self.longest_ns(first, last) > STUCK_NS
        if incident.kind == "slow_input":
            return sum(fact.forward - fact.start > SHARE * fact.step_ns for fact in near) >= ENOUGH
        if incident.kind in ("exposed_comm", "slow_link"):
            return sum(fact.backward_end - fact.layers[-1] > SHARE * fact.step_ns for fact in near) >= ENOUGH
        if incident.kind == "drift":
            return max(fact.step_ns for fact in near) > min(fact.step_ns for fact in near)
        return False


def newest(app):
    return app.session.overview.newest_step or 0


def verdict(app):
    return app.session.overview.verdict


def words(app):
    """The verdict in one line, if the screen shows it by now; else nothing. The next step may change it."""
    said = " ".join(verdict(app).text.split())
    return said if said in " ".join(screen_text(app).split()) else ""


def late(slowest: Incident | None, rank: int) -> bool:
    """Whether that rank is called late, by something like what was injected."""
    return slowest is not None and slowest.ranks == (rank,) and slowest.evidence.late_ms > INJECTED_MS


def due_to(slowest: Incident | None, rank: int, phase: str) -> bool:
    """Whether that rank is called late because of that phase. By how much is another matter: if chance made it late in
    the same phase before, those steps count, too.
    """
    return slowest is not None and (slowest.ranks, slowest.phase) == ((rank,), phase)


def called_late(app, rank):
    return late(app.session.overview.slowest, rank)


def warned(app):
    """The kinds and ranks of all warnings so far, whether or not they still hold."""
    found = app.session.overview.diagnosed.incidents
    return [incident for incident in found if incident.severity != "info"]


def judged(file: Path) -> Iterator[tuple[int, Incident | None]]:
    """Each step of a recording, and which rank is called late once it is there."""
    state, before = RunState(), -1
    for message, envelope in Recording(file):
        state.apply_message(message, envelope.received_ns)
        view = state.newest_step()
        if view is not None and view.step > before:
            before = view.step
            yield view.step, state.diagnosis.slowest()


def watcher():
    return DashboardApp(AttachSpec(list_ended=rundir.last_views), ticking=False)


@pytest.mark.seconds(50)
async def test_trouble_is_named_in_words_and_clears(run_directory, tmp_path):
    trouble, file = tmp_path / "trouble", tmp_path / "run.mcap"
    trouble.write_text("none")
    app = watcher()
    async with app.run_test(size=(200, 50)) as pilot:
        with Job(SCRIPT, str(trouble), "--record", str(file), log=tmp_path / "job.log") as job:
            await until(pilot, lambda: newest(app) >= HEALTHY, *PATIENCE)
            trouble.write_text("slow-backward")
            await until(pilot, lambda: called_late(app, 1) and SLOW_BACKWARD.fullmatch(words(app)), *PATIENCE)
            trouble.write_text("none")
            await until(pilot, lambda: not called_late(app, 1), *PATIENCE)

            trouble.write_text("slow-input")
            await until(pilot, lambda: called_late(app, 0) and SLOW_INPUT.match(words(app)), *PATIENCE)
            trouble.write_text("stop")
            assert job.wait() == 0, job.output()
        await until(pilot, lambda: "ENDED: finished" in screen_text(app), *PATIENCE)
    facts = Facts(job.output())
    assert all(map(facts.waits_for_both, facts.both("slow-backward")))  # so no step timer would have named a rank
    for incident in warned(app):  # while nothing was injected and nothing else ran: none
        assert facts.bear_out(incident), incident
    check_steps(list(judged(file)), facts)


def check_steps(steps: list[tuple[int, Incident | None]], facts: Facts) -> None:
    """Each trouble is named within `SOON` steps, and no longer than that after its end.

    Only those steps count in which the ranks saw what was injected, and nothing that came on top. What came on top
    before is noise: it takes as many steps more to tell trouble from it.
    """

    def soon(after: int, what: Callable[[Incident | None], bool], counts: Callable[[int], bool]) -> bool:
        named = next(step for step, slowest in steps if step >= after and what(slowest))
        return sum(map(counts, range(after, named))) <= SOON + sum(map(facts.is_disturbed, range(named)))

    slow = facts.first("slow-backward")
    over = facts.first("none", after=slow)
    wait = facts.first("slow-input")
    assert soon(slow, lambda found: due_to(found, 1, "backward"), lambda step: facts.late_ms(step, 1) > INJECTED_MS)
    assert soon(over, lambda found: not late(found, 1), lambda step: facts.late_ms(step, 1) < INJECTED_MS / 2)
    assert soon(wait, lambda found: due_to(found, 0, "data"), lambda step: facts.late_ms(step, 0) > INJECTED_MS)
    for step, slowest in steps:
        assert slowest is None or facts.bear_out(slowest), (step, slowest)


async def test_the_bucket_that_nothing_hides_is_named(run_directory, tmp_path):
    trouble = tmp_path / "trouble"
    trouble.write_text("none")
    app = watcher()
    async with app.run_test(size=(200, 50)) as pilot:
        with Job(SCRIPT, str(trouble), "--wide", log=tmp_path / "job.log") as job:
            exposed = r"exposed transfer: .* take \d+ % of a step, most of it the last bucket \d+ \(0\.\w+\).*$"
            await until(pilot, lambda: verdict(app).kind == "exposed_comm" and re.match(exposed, words(app)), *PATIENCE)
            trouble.write_text("stop")
            assert job.wait() == 0, job.output()
