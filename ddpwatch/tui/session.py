"""What the dashboard knows: the run's state, how its feed stands, and what the user looks at. Knows no widget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ddpwatch.state import RunState, StepView
from ddpwatch.tui.feed import Frame
from ddpwatch.tui.lanes import Timeline
from ddpwatch.tui.model import Link, LinkState, Overview, OverviewBuilder, paused_overview


class Session:
    """One dashboard's state. `refresh` turns it into the `overview` that is drawn.

    Args:
        replay: Whether the frames come from a recording.

    Attributes:
        state: Everything known of the run.
        over: No frame will come any more.
        paused: The view is frozen.
        overview: What to draw, as of the last `refresh`.
    """

    def __init__(self, replay: bool = False) -> None:
        self.replay = replay
        self._forget("")
        self._directory = ""
        self._attached = False

    def _forget(self, name: str) -> None:
        self.name = name
        self.state = RunState()
        self.over = False
        self.paused = False
        self.overview = Overview(link=LinkState(name=name, replay=self.replay))
        self._builder = OverviewBuilder()
        self._frozen: Overview | None = None
        self._selected: StepView | None = None
        self._drawn: tuple[object, ...] = ()

    # -- what the feed says ----------------------------------------------------------------------------------

    def wait(self, directory: str) -> None:
        """There is no run yet."""
        self._directory = directory

    def attach(self, name: str) -> None:
        """Another run begins."""
        self._forget(name)
        self._attached = True

    def apply(self, frames: Iterable[Frame]) -> None:
        """Takes frames."""
        for message, envelope in frames:
            self.state.apply(message, envelope.received_ns)

    def live_link(self, silent: bool) -> LinkState:
        """How a live feed stands."""
        link = Link.LIVE
        if not self._attached:
            link = Link.WAITING
        elif self.over or self.state.end is not None:
            link = Link.ENDED
        elif silent:
            link = Link.GONE
        elif not self.state.frames:
            link = Link.ATTACHING
        return LinkState(link, self.name, self._directory, paused=self.paused)

    def replay_link(self, speed: float, held: bool) -> LinkState:
        """How a replay stands."""
        link = Link.ENDED if self.over else Link.REPLAY
        return LinkState(link, self.name, speed=speed, paused=self.paused or held, replay=True)

    def refresh(self, link: LinkState) -> bool:
        """Brings the overview up to date. Returns whether it differs from the one before."""
        selected = self._selected.step if self._selected else None
        now = (link, self.state.version, selected, self._frozen is None)
        if now == self._drawn:
            return False
        self._drawn = now
        self.overview = self._build(link)
        return True

    def _build(self, link: LinkState) -> Overview:
        if self._frozen is None:
            return self._builder.build(self.state, link)
        newest = self.state.newest_step()
        now = replace(self._frozen, link=link, newest_step=newest.step if newest else None, end=self.state.end)
        return paused_overview(self._frozen, now, self._timeline())

    def _timeline(self) -> Timeline | None:
        return self._builder.timeline(self._selected, self.state) if self._selected else None

    # -- what the user looks at ------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Freezes the view as it is, or lets it follow again."""
        if paused and not self.paused:
            self._frozen = self._builder.build(self.state, self.overview.link)
            self._selected = self.state.newest_step()
        elif not paused:
            self._frozen = self._selected = None
        self.paused = paused

    def step(self, by: int) -> None:
        """Selects the step that many after (before) the selected one, as far as there are any."""
        views = list(self.state.steps.values())
        if not views or self._selected is None:
            return
        at = sum(view.step < self._selected.step for view in views)
        self._selected = views[min(max(at + by, 0), len(views) - 1)]

    def select_oldest(self) -> None:
        """Selects the oldest step kept."""
        self._selected = next(iter(self.state.steps.values()), None)
