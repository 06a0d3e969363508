"""The dashboard: one feed, one state, and the view on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message

from ddpwatch import rundir
from ddpwatch.rundir import RunInfo
from ddpwatch.sources import SILENCE_S
from ddpwatch.tui import feed
from ddpwatch.tui.feed import AttachFeed, FeedSpec, FileFeed, LiveFeed, open_feed
from ddpwatch.tui.palette import BACKGROUND
from ddpwatch.tui.screens import HelpScreen, RunPicker
from ddpwatch.tui.session import Session
from ddpwatch.tui.views import OverviewView

REPAINT_S = 0.1
JOIN_S = 0.5


class FeedEvent(Message):
    """Something the feed's thread has posted."""

    def __init__(self, event: feed.Event) -> None:
        super().__init__()
        self.event = event


class DashboardApp(App[int]):
    """Shows one run at a time.

    Args:
        spec: Where the frames come from.
        clock: Seconds that only ever grow; tells when a collector has been silent for too long.
        ticking: Whether the view repaints by itself ten times a second; tests do it by hand.
    """

    CSS = f"""
    Screen {{ background: {BACKGROUND}; layers: base; overflow: hidden; }}
    PaintedView {{ width: 100%; height: 100%; }}
    ModalScreen {{ align: center middle; background: $background 60%; overflow: hidden; }}
    #help, #picker {{
        width: 84; max-width: 100%; height: auto; max-height: 100%; padding: 0 2;
        background: #161b22; color: #c9d1d9; border: round #8b949e;
    }}
    #picker OptionList {{ height: auto; max-height: 12; background: #161b22; }}
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
        Binding("space", "pause", "pause"),
        Binding("left,h,left_square_bracket", "step(-1)", "back"),
        Binding("right,l,right_square_bracket", "step(1)", "forward"),
        Binding("home", "oldest", "oldest"),
        Binding("end", "newest", "newest"),
        Binding("down,j", "scroll(1)", "down"),
        Binding("up,k", "scroll(-1)", "up"),
        Binding("pagedown", "scroll(10)", "page down"),
        Binding("pageup", "scroll(-10)", "page up"),
        Binding("question_mark", "help", "help"),
        Binding("a", "runs", "runs"),
        Binding("plus,equals_sign", "speed(1)", "faster"),
        Binding("minus", "speed(-1)", "slower"),
        Binding("full_stop", "to_end", "to the end"),
    ]
    TITLE = "ddpwatch"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, spec: FeedSpec, clock: Callable[[], float] = time.monotonic, ticking: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.session = Session(replay=not isinstance(spec, AttachFeed))
        self.feed: LiveFeed | FileFeed = open_feed(spec, self._post)
        self.view = OverviewView(self.session, id="overview")
        self.failure: Exception | None = None
        self._clock = clock
        self._ticking = ticking
        self._heard = clock()

    def _post(self, event: feed.Event) -> None:
        self.post_message(FeedEvent(event))

    def compose(self) -> ComposeResult:
        """The one view there is."""
        yield self.view

    def on_mount(self) -> None:
        """Starts to read and to draw."""
        if self._ticking:
            self.set_interval(REPAINT_S, self.tick)
        self.feed.start()

    def on_unmount(self) -> None:
        """Lets the feed end; it needs one poll, and nobody waits for more than `JOIN_S`."""
        self.feed.stop()
        self.feed.join(JOIN_S)

    def tick(self) -> None:
        """Draws what is new."""
        live = self.session.live_link(self._clock() - self._heard > SILENCE_S)
        if isinstance(self.feed, FileFeed):
            live = self.session.replay_link(self.feed.speed, self.feed.paused)
        if self.session.refresh(live):
            self.view.repaint()

    # -- what the feed says ----------------------------------------------------------------------------------

    def on_feed_event(self, message: FeedEvent) -> None:
        """Applies what the feed has posted."""
        event = message.event
        if isinstance(event, feed.Frames):
            self._heard = self._clock()
            self.session.apply(event.frames)
            self.feed.taken()
        elif isinstance(event, feed.Waiting):
            self.session.wait(event.directory)
        elif isinstance(event, feed.Attached):
            self._heard = self._clock()
            self.session.attach(event.name)
            if event.several:
                self.action_runs()
        elif isinstance(event, feed.Over):
            self.session.over = True
        else:
            self.failure = event.error
            self.exit(1, return_code=1)

    # -- keys ------------------------------------------------------------------------------------------------

    async def action_quit(self) -> None:
        """Leaves at once."""
        self.exit(0)

    def action_pause(self) -> None:
        """Freezes the view of a live run; holds a recording."""
        self._pause(not self.session.paused)

    def _pause(self, paused: bool) -> None:
        self.session.pause(paused)
        if isinstance(self.feed, FileFeed):
            self.feed.pause(paused)
        self.tick()

    def action_step(self, by: int) -> None:
        """To the step before or after the one shown."""
        self._pause(True)
        self.session.step(by)
        self.tick()

    def action_oldest(self) -> None:
        """To the oldest step kept."""
        self._pause(True)
        self.session.select_oldest()
        self.tick()

    def action_newest(self) -> None:
        """Follows the newest step again; plays a recording to its end."""
        self.action_to_end()
        self._pause(False)

    def action_to_end(self) -> None:
        """Plays all that is left of a recording at once."""
        if isinstance(self.feed, FileFeed):
            self.session.pause(False)
            self.feed.jump_to_end()

    def action_speed(self, by: int) -> None:
        """Faster or slower, in a replay."""
        if isinstance(self.feed, FileFeed):
            self.feed.faster(by)
            self.tick()

    def action_scroll(self, by: int) -> None:
        """Other ranks."""
        self.view.scroll_ranks(by)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel."""
        self.action_scroll(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel."""
        self.action_scroll(-1)

    def action_help(self) -> None:
        """Keys and definitions."""
        self.push_screen(HelpScreen())

    def action_runs(self) -> None:
        """Offers the live runs."""
        if isinstance(self.feed, LiveFeed) and not isinstance(self.screen, RunPicker):
            self.push_screen(RunPicker(self.feed.runs()), self._chosen)

    def _chosen(self, run: RunInfo | None) -> None:
        if run is not None and isinstance(self.feed, LiveFeed):
            self.feed.choose(run)


def run_dashboard(spec: FeedSpec) -> int:
    """Shows a run, or a recording, until the user quits.

    Args:
        spec: Where the frames come from.

    Returns:
        The exit code.

    Raises:
        DdpwatchError: There is no usable rendezvous directory, or a recording cannot be read.
    """
    if isinstance(spec, AttachFeed) and spec.endpoint is None:
        rundir.directory()
    app = DashboardApp(spec)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0
