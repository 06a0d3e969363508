"""What the dashboard knows: the run's state, how its feed stands, and what the user looks at. Knows no widget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddpwatch.messages import Mark, Step
from ddpwatch.state import RunState, StepView
from ddpwatch.tui.events import Event, EventLog
from ddpwatch.tui.feed import BATCH, Frame
from ddpwatch.tui.model import Link, LinkState, Overview, OverviewBuilder, paused_overview

SLOW_STEP = 1.5  # times the median: a step worth jumping to


class Session:
    """One dashboard's state. `refresh` turns it into the `overview` that is drawn.

    Args:
        replay: Whether the frames come from a recording.

    Attributes:
        state: Everything known of the run.
        log: What happened in it.
        over: No frame will come any more.
        paused: The view is frozen.
        overview: What to draw, as of the last `refresh`.
        rank: The rank that the user has selected, if any.
        follow_slowest: Views keep the slowest rank in sight.
    """

    def __init__(self, replay: bool = False) -> None:
        self.replay = replay
        self.follow_slowest = False
        self._forget("")
        self._directory = ""
        self._attached = False
        self._ended_s: float | None = None

    def _forget(self, name: str) -> None:
        self.name = name
        self.state = RunState()
        self.log = EventLog()
        self.over = False
        self.paused = False
        self.rank: int | None = None
        self.overview = Overview(link=LinkState(name=name, replay=self.replay))
        self._filter = ""
        self._builder = OverviewBuilder()
        self._frozen: Overview | None = None
        self._frozen_steps: list[StepView] = []
        self._selected: StepView | None = None
        self._drawn: tuple[object, ...] = ()

    # -- what the feed says ----------------------------------------------------------------------------------

    def wait(self, directory: str) -> None:
        """There is no run yet."""
        self._directory = directory

    def attach(self, name: str, ended_s: float | None = None) -> None:
        """Another run begins, or one that ended then (seconds since the Unix epoch) is looked at."""
        self._forget(name)
        self._attached = True
        self._ended_s = ended_s

    def apply(self, frames: Iterable[Frame]) -> None:
        """Takes frames. A short batch means that the view keeps up: then each step is worked out as it comes."""
        frames = list(frames)
        for message, envelope in frames:
            self.state.apply(message, envelope.received_ns)
            self.log.take(message, envelope.received_ns)
            if isinstance(message, Step) and len(frames) < BATCH:
                self._work_out(message)

    def _work_out(self, step: Step) -> None:
        view = self.state.steps.get(step.step)
        if view is not None:
            view.facts_of(step.rank)

    def hear(self, lines: Iterable[str], wall_s: float) -> None:
        """Takes lines that the job has printed."""
        for line in lines:
            self.log.add(Event(int(wall_s * 1e9), "output", line))
            self.log.heard += 1

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
        return LinkState(link, self.name, self._directory, paused=self.paused, ended_min=ago)

    def replay_link(self, speed: float, held: bool) -> LinkState:
        """How a replay stands."""
        link = Link.ENDED if self.over else Link.REPLAY
        return LinkState(link, self.name, speed=speed, paused=self.paused or held, replay=True)

    def refresh(self, link: LinkState) -> bool:
        """Brings the overview up to date. Returns whether it differs from the one before."""
        selected = self._selected.step if self._selected else None
        now = (
            link,
            self.state.version,
            selected,
            self._frozen is None,
            self._filter,
            self.log.heard,
            self.follow_slowest,
        )
        if now == self._drawn:
            return False
        self._drawn = now
        self.overview = replace(self._build(link), following=self.follow_slowest)
        return True

    def _build(self, link: LinkState) -> Overview:
        if self._frozen is None:
            overview = self._builder.build(self.state, link, self._filter)
            self.log.judge(overview.verdict, self.state.now_ns, overview.newest_step)
            return overview
        newest = self.state.newest_step()
        now = replace(self._frozen, link=link, newest_step=newest.step if newest else None, end=self.state.end)
        timeline = self._builder.timeline(self._selected, self.state, self._filter) if self._selected else None
        return paused_overview(self._frozen, now, timeline)

    # -- what the user looks at ------------------------------------------------------------------------------

    @property
    def filter(self) -> str:
        """Which ranks are shown (see `ddpwatch.tui.filters`)."""
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
            self._selected = self.state.newest_step()
        elif not paused:
            self._frozen = self._selected = None
            self._frozen_steps = []
        self.paused = paused

    def _freeze(self) -> None:
        built = self._builder.build(self.state, self.overview.link, self._filter)
        self._frozen = replace(built, ranks=tuple(built.ranks))
        self._frozen_steps = list(self.state.steps.values())

    @property
    def steps(self) -> Sequence[StepView]:
        """The steps kept, oldest first; those of the moment of the pause while there is one."""
        return self._frozen_steps if self._frozen is not None else list(self.state.steps.values())

    @property
    def view(self) -> StepView | None:
        """The step shown: the selected one, or the newest."""
        return self._selected or self.state.newest_step()

    @property
    def marks(self) -> Iterable[Mark]:
        """The run's marks."""
        return self.state.marks

    def shown(self, view: StepView) -> list[int]:
        """The ranks of a step that the filter lets through."""
        return self._builder.shown(self.state, view.members, self._filter)

    def followed_rank(self) -> int | None:
        """The slowest rank, if views are to keep it in sight."""
        slowest = self.overview.summary.slowest
        return slowest.rank if self.follow_slowest and slowest is not None else None

    def step(self, by: int) -> None:
        """Selects the step that many after (before) the selected one, as far as there are any."""
        views = list(self.state.steps.values())
        if not views or self._selected is None:
            return
        at = sum(view.step < self._selected.step for view in views)
        self._selected = views[min(max(at + by, 0), len(views) - 1)]

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
        slow = {v.step for v in views.values() if usual and v.counted and v.longest_ns > SLOW_STEP * usual}
        told = {event.step for event in self.log.events if event.step is not None and event.step in views}
        return slow | told
