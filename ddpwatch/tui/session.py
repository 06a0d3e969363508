"""What the dashboard knows: the run's state, how its feed stands, and what the user looks at. Knows no widget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddpwatch.messages import Mark, Step
from ddpwatch.state import RunState, StepAcrossRanks
from ddpwatch.transport import Frame
from ddpwatch.tui.feed import BATCH
from ddpwatch.tui.models.log import JobOutput, RunLog
from ddpwatch.tui.models.overview import (
    SUMMARY_NS,
    Link,
    LinkState,
    Overview,
    OverviewBuilder,
    judge,
    paused_overview,
    pictured,
)

SLOW_STEP = 1.5  # times the median: a step worth jumping to


class ViewerSession:
    """One dashboard's state. `refresh` turns it into the `overview` that is drawn.

    Args:
        replay: Whether the frames come from a recording.

    Attributes:
        state: Everything known of the run.
        log: What happened in it.
        output: What the job prints, if we have started it.
        over: No frame will come any more.
        paused: The view is frozen.
        overview: What to draw, as of the last `refresh`.
        rank: The rank that the user has selected, if any.
        follow_slowest: Views keep the slowest rank in sight.
    """

    def __init__(self, replay: bool = False) -> None:
        self.replay = replay
        self.follow_slowest = False
        self.output = JobOutput()
        self._forget("")
        self._directory = self._job = ""
        self._attached = False
        self._ended_s: float | None = None

    def _forget(self, name: str) -> None:
        self.name = name
        self.paused = False
        self.rank: int | None = None
        self.overview = Overview(link=LinkState(name=name, replay=self.replay))
        self._filter = ""
        self._begin()

    def _begin(self) -> None:
        self.state = RunState()
        self.log = RunLog()
        self.over = False
        self._moving = False
        self._judged_ns = 0
        self._usual_ns: float | None = None
        self._builder = OverviewBuilder()
        self._judging = OverviewBuilder()  # another, for when the screen is drawn shall not matter
        self._frozen: Overview | None = None
        self._frozen_steps: list[StepAcrossRanks] = []
        self._selected: StepAcrossRanks | None = None
        self._drawn: tuple[object, ...] = ()

    # -- what the feed says ----------------------------------------------------------------------------------

    def wait(self, directory: str, job: str = "") -> None:
        """There is no run yet; ``job`` is the command that is to begin one."""
        self._directory, self._job = directory, job

    def attach(self, name: str, ended_s: float | None = None) -> None:
        """Another run begins, or one that ended then (seconds since the Unix epoch) is looked at."""
        self._forget(name)
        self._attached = True
        self._ended_s = ended_s

    def rewind(self) -> None:
        """A replay goes elsewhere: what is known is void. What the user looks at stays; so does the picture for now."""
        self._begin()
        self._moving = True

    def arrive(self, step: int | None) -> None:
        """A replay is where it was wanted; a frozen view shows that moment, and that step."""
        self._moving = False
        if self.paused:
            self.pause(False)
            self.pause(True)
            if step is not None:
                self.select(step)

    def apply(self, frames: Iterable[Frame]) -> None:
        """Takes frames. A short batch means that the view keeps up: then each step is worked out as it comes."""
        frames = list(frames)
        for message, envelope in frames:
            self.state.apply(message, envelope.received_ns)
            self.log.take(message, envelope.received_ns)
            if isinstance(message, Step) and len(frames) < BATCH:
                self._work_out(message)
            if self.replay and self.state.now_ns - self._judged_ns >= SUMMARY_NS:
                self._judge()

    def _judge(self) -> None:
        """Notes the finding that holds now. A replay does so by recorded time, so that its speed changes nothing."""
        self._judged_ns = self.state.now_ns
        summary, newest = self._judging.summary(self.state), self.state.newest_step()
        self._usual_ns = summary.step_ns
        self.log.judge(judge(self.state, summary), self.state.now_ns, newest.step if newest else None)

    def is_slow(self, number: int) -> bool:
        """Whether that step took much longer than usual, in a replay."""
        view = self.state.steps.get(number)
        return view is not None and _slow(view, self._usual_ns)

    def _work_out(self, step: Step) -> None:
        view = self.state.steps.get(step.step)
        if view is not None:
            view.facts_of(step.rank)

    def hear(self, lines: Iterable[str], begun: str, wall_s: float) -> None:
        """Takes lines that the job has printed, and the one that it has begun."""
        self.output.hear(lines, begun, int(wall_s * 1e9))

    def live_link(self, silent: bool, wall_s: float = 0.0) -> LinkState:
        """How a live feed stands; ``wall_s`` is the time of day, in seconds since the Unix epoch."""
        link = Link.LIVE
        if not self._attached:
            link = Link.WAITING
        elif self.over or self.state.end is not None:
            link = Link.ENDED
        elif silent:
            link = Link.GONE
        elif not self.state.frames:
            link = Link.ATTACHING
        ago = None if self._ended_s is None else int(max(wall_s - self._ended_s, 0) // 60)
        return LinkState(link, self.name, self._directory, job=self._job, paused=self.paused, ended_min=ago)

    def replay_link(self, speed: float, held: bool, position_s: float, length_s: float, loop: bool) -> LinkState:
        """How a replay stands."""
        link = Link.ENDED if self.over else Link.REPLAY
        place = (int(position_s), int(length_s))
        return LinkState(
            link, self.name, speed=speed, paused=self.paused or held, replay=True, position_s=place[0],
            length_s=place[1], loop=loop,
        )  # fmt: skip

    def refresh(self, link: LinkState) -> bool:
        """Brings the overview up to date. Returns whether it differs from the one before."""
        selected = self._selected.step if self._selected else None
        now = (
            link,
            self.state.version,
            selected,
            self._frozen is None,
            self._filter,
            self.output.version,
            self.follow_slowest,
        )
        if now == self._drawn or self._moving:
            return False
        self._drawn = now
        self.overview = replace(self._build(link), following=self.follow_slowest)
        return True

    def _build(self, link: LinkState) -> Overview:
        if self._frozen is None:
            overview = self._builder.build(self.state, link, self._filter)
            if not self.replay or self.over:
                self.log.judge(overview.verdict, self.state.now_ns, overview.newest_step)
            return overview
        newest = self.state.newest_step()
        now = replace(self._frozen, link=link, newest_step=newest.step if newest else None, end=self.state.end)
        timeline = self._builder.timeline(self._selected, self.state, self._filter) if self._selected else None
        return paused_overview(self._frozen, now, timeline)

    # -- what the user looks at ------------------------------------------------------------------------------

    @property
    def filter(self) -> str:
        """Which ranks are shown (see `ddpwatch.tui.rank_filter`)."""
        return self._filter

    @filter.setter
    def filter(self, text: str) -> None:
        self._filter = text
        if self._frozen is not None:
            self._freeze()

    def pause(self, paused: bool) -> None:
        """Freezes the view as it is, or lets it follow again."""
        if paused and not self.paused:
            self._freeze()
            self._selected = pictured(self.state)
        elif not paused:
            self._frozen = self._selected = None
            self._frozen_steps = []
        self.paused = paused

    def _freeze(self) -> None:
        built = self._builder.build(self.state, self.overview.link, self._filter)
        self._frozen = replace(built, ranks=tuple(built.ranks))
        self._frozen_steps = list(self.state.steps.values())

    @property
    def steps(self) -> Sequence[StepAcrossRanks]:
        """The steps kept, oldest first; those of the moment of the pause while there is one."""
        return self._frozen_steps if self._frozen is not None else list(self.state.steps.values())

    @property
    def view(self) -> StepAcrossRanks | None:
        """The step shown: the selected one, or the newest."""
        return self._selected or pictured(self.state)

    @property
    def at_newest(self) -> bool:
        """Whether the step shown is the newest."""
        return self._selected is None or self._selected is self.state.newest_step()

    @property
    def marks(self) -> Iterable[Mark]:
        """The run's marks."""
        return self.state.marks

    def shown(self, view: StepAcrossRanks) -> list[int]:
        """The ranks of a step that the filter lets through."""
        return self._builder.shown(self.state, view.members, self._filter)

    def followed_rank(self) -> int | None:
        """The slowest rank, if views are to keep it in sight."""
        slowest = self.overview.summary.straggler
        return slowest.rank if self.follow_slowest and slowest is not None else None

    def step(self, by: int) -> bool:
        """Selects the step that many after (before) the selected one, as far as there is one, and tells whether."""
        views = list(self.state.steps.values())
        if not views or self._selected is None:
            return False
        before, at = self._selected, sum(view.step < self._selected.step for view in views)
        self._selected = views[min(max(at + by, 0), len(views) - 1)]
        return self._selected is not before

    def select(self, number: int) -> bool:
        """Selects the step of that number, or the nearest kept. False if there is none at all."""
        views = list(self.state.steps.values())
        if views:
            self._selected = min(views, key=lambda view: abs(view.step - number))
        return bool(views)

    def select_oldest(self) -> None:
        """Selects the oldest step kept."""
        self._selected = next(iter(self.state.steps.values()), None)

    def slowest_step(self) -> int | None:
        """The number of the slowest step kept that belongs into statistics."""
        views = [view for view in self.state.steps.values() if view.counted]
        return max(views, key=lambda view: view.longest_ns).step if views else None

    def next_finding(self, by: int) -> int | None:
        """The next (or previous) step with something to see: a finding began or cleared, aborted, or far too long."""
        here = self.view.step if self.view is not None else -1
        found = [step for step in self._remarkable() if (step > here if by > 0 else step < here)]
        return (min(found) if by > 0 else max(found)) if found else None

    def _remarkable(self) -> set[int]:
        views = self.state.steps
        usual = self.overview.summary.step_ns
        slow = {view.step for view in views.values() if _slow(view, usual)}
        told = {event.step for event in self.log.events if event.step is not None and event.step in views}
        return slow | told


def _slow(view: StepAcrossRanks, usual_ns: float | None) -> bool:
    return bool(usual_ns) and view.counted and view.longest_ns > SLOW_STEP * (usual_ns or 0)
