"""Moves through the run that the dashboard shows: among the steps kept of a live run, or anywhere in a recording."""

from __future__ import annotations

from ddpwatch.recording.seek import HINT, SeekTarget
from ddpwatch.tui.feed import LiveFeed, ReplayFeed
from ddpwatch.tui.models.overview import LinkState
from ddpwatch.tui.session import ViewerSession


class Navigation:
    """Moves among the steps kept of a live run. What only a replay can do, does nothing.

    The methods that return a bool say whether there was somewhere to go.
    """

    target_hint = "a step number"

    def __init__(self, session: ViewerSession) -> None:
        self.session = session

    def link(self, silent: bool, wall_s: float) -> LinkState:
        """Returns the state of the feed (see `ViewerSession.live_link`)."""
        return self.session.live_link(silent, wall_s)

    def pause(self, paused: bool) -> None:
        """Freezes the views, or lets them follow again. A live run goes on."""
        self.session.pause(paused)

    def step(self, by: int) -> None:
        """Goes to the step before or after the one shown."""
        self.pause(True)
        self.session.select_neighbour(by)

    def oldest(self) -> None:
        """Goes to the oldest step kept."""
        self.pause(True)
        self.session.select_oldest()

    def newest(self) -> None:
        """Follows the newest step again."""
        self.pause(False)

    def go_to(self, target: SeekTarget) -> bool:
        """Goes to a step; in a replay also to a time."""
        return self.go_to_step(target.step)

    def go_to_step(self, number: int | None, at_ns: int | None = None) -> bool:
        """Goes to a step, or the nearest kept; in a recording that ends before that step, to a moment."""
        if number is None:
            return False
        self.pause(True)
        self.session.select(number)
        return True

    def slowest(self) -> bool:
        """Goes to the slowest step kept."""
        return self.go_to_step(self.session.slowest_step())

    def finding(self, by: int) -> bool:
        """Goes to the next, or previous, step that stands out."""
        return self.go_to_step(self.session.next_finding(by))

    def seek(self, seconds: int) -> None:
        """Moves a replay forwards or backwards in time."""

    def play_to_end(self) -> None:
        """Plays all that is left of a recording at once."""

    def change_speed(self, by: int) -> None:
        """Makes a replay faster or slower."""

    def toggle_loop(self) -> None:
        """Lets a replay start again after its end, or not."""


class ReplayNavigation(Navigation):
    """Moves through a recording, also to steps that are no longer kept."""

    target_hint = HINT

    def __init__(self, session: ViewerSession, feed: ReplayFeed) -> None:
        super().__init__(session)
        self.feed = feed

    def link(self, silent: bool, wall_s: float) -> LinkState:
        """Returns the state of the replay."""
        feed = self.feed
        return self.session.replay_link(feed.speed, feed.paused, feed.position_s, feed.length_s, feed.loop)

    def pause(self, paused: bool) -> None:
        """Freezes the views and holds the recording, or resumes both."""
        super().pause(paused)
        self.feed.pause(paused)

    def step(self, by: int) -> None:
        """Goes to the step before or after the one shown, whether or not it is kept."""
        self.pause(True)
        if not self.session.select_neighbour(by):
            shown = self.session.step_shown
            self.feed.go_to_neighbour(shown.step if shown is not None else -1, by)

    def oldest(self) -> None:
        """Goes to the start of the recording."""
        self.feed.go_to(SeekTarget(seconds=0))

    def newest(self) -> None:
        """Plays the recording to its end, and follows it."""
        self.play_to_end()
        self.pause(False)

    def go_to(self, target: SeekTarget) -> bool:
        """Goes to a step and pauses there, or to a time."""
        self.pause(self.session.paused or target.step is not None)
        self.feed.go_to(target)
        return True

    def go_to_step(self, number: int | None, at_ns: int | None = None) -> bool:
        """Goes to a step, whether or not it is kept; if the recording ends before it, to that moment."""
        if number is not None and number not in self.session.state.steps:
            self.pause(True)
            self.feed.go_to(SeekTarget(step=number, at_ns=at_ns))
            return True
        return super().go_to_step(number)

    def finding(self, by: int) -> bool:
        """Goes to the next, or previous, place of the recording that stands out."""
        place = self.session.next_place(by, self.feed.position_ns)
        return place is not None and self.go_to_step(*place)

    def seek(self, seconds: int) -> None:
        """Moves forwards or backwards in time."""
        self.feed.go_by(seconds)

    def play_to_end(self) -> None:
        """Plays all that is left at once."""
        self.session.pause(False)
        self.feed.play_to_end()

    def change_speed(self, by: int) -> None:
        """Makes the replay faster or slower."""
        self.feed.change_speed(by)

    def toggle_loop(self) -> None:
        """Lets the replay start again after its end, or not."""
        self.feed.toggle_loop()


def navigation_for(session: ViewerSession, feed: LiveFeed | ReplayFeed) -> Navigation:
    """Returns the navigation for that kind of feed."""
    return ReplayNavigation(session, feed) if isinstance(feed, ReplayFeed) else Navigation(session)
