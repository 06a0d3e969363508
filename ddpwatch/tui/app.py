"""The dashboard: one feed, one session, and the views on it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from ddpwatch import rundir
from ddpwatch.recording.reader import Recording
from ddpwatch.sources import SILENCE_S
from ddpwatch.tui import feed
from ddpwatch.tui.controller import COMMANDS, Actions
from ddpwatch.tui.feed import AttachFeed, LiveFeed
from ddpwatch.tui.paint.header import Tab
from ddpwatch.tui.paint.palette import SCHEMES
from ddpwatch.tui.replay import FeedSpec, FileFeed, open_feed
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.settings import Settings, load_settings
from ddpwatch.tui.views import VIEWS, CompareView, RunView, TimelineView

JOIN_S = 0.5
# What is kept of a run is a million objects without a cycle: looking through all of them again and again would stop the
# screen for half a second each time. The young ones are looked through often, a few at a time.
GC_THRESHOLDS = (2_000, 5, 40_000)


class FeedMessage(Message):
    """Something the feed's thread has posted."""

    def __init__(self, event: feed.FeedEvent) -> None:
        super().__init__()
        self.event = event


class DashboardApp(Actions):
    """Shows one run at a time.

    Args:
        spec: Where the frames come from.
        clock: Seconds that only ever grow; tells when a collector has been silent for too long.
        ticking: Whether the view repaints by itself; tests do it by hand.
        wall: The time of day, in seconds since the Unix epoch.
        settings: How to begin.
        baseline: A recording to compare with.
    """

    CSS = """
    Screen { layers: base; overflow: hidden; }
    ContentSwitcher, RunView { width: 100%; height: 100%; }
    ModalScreen { align: center middle; background: $background 60%; overflow: hidden; }
    #help, #picker {
        width: 84; max-width: 100%; height: auto; max-height: 100%; padding: 0 2; border: round $foreground;
    }
    #picker OptionList { height: auto; max-height: 12; }
    AskScreen { align: left bottom; background: $background 0%; }
    #ask { height: auto; max-height: 4; border: round $foreground; }
    #ask Input { border: none; height: 1; padding: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
        *(Binding(key, f"view('{key}')", view.NAME) for key, view in VIEWS.items()),
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
        Binding("slash", "filter", "filter ranks"),
        Binding("f", "follow", "follow the slowest rank"),
        Binding("S", "slowest", "slowest step"),
        Binding("n", "finding(1)", "next finding"),
        Binding("N", "finding(-1)", "previous finding"),
        Binding("g", "go_to", "go to a step or time"),
        Binding("less_than_sign,ctrl+left", "seek(-5)", "back in time"),
        Binding("greater_than_sign,ctrl+right", "seek(5)", "forward in time"),
        Binding("O", "loop", "over and over"),
        Binding("y", "copy", "copy the finding"),
        Binding("T", "theme", "colours"),
        Binding("A", "ascii", "ASCII only"),
        Binding("P", "svg", "picture (SVG)"),
        Binding("E", "trace", "export the step (Chrome trace)"),
        Binding("colon,ctrl+p", "command_palette", "commands"),
    ]
    TITLE = "ddpwatch"

    def __init__(
        self,
        spec: FeedSpec,
        clock: Callable[[], float] = time.monotonic,
        ticking: bool = True,
        wall: Callable[[], float] = time.time,
        settings: Settings | None = None,
        baseline: Path | None = None,
    ) -> None:
        self.settings = settings or Settings(theme="dark")
        self.look = self.settings.resolved_theme()
        super().__init__(ansi_color=self.look in ("none", "ansi"))
        self.ascii_only = self.settings.ascii
        self.session = ViewerSession(replay=not isinstance(spec, AttachFeed))
        self.session.follow_slowest = self.settings.follow_slowest
        self.feed: LiveFeed | FileFeed = open_feed(spec, self._post)
        self.views: dict[str, RunView] = {key: view(self.session) for key, view in VIEWS.items()}
        self.failure: Exception | None = None
        self._here = next(key for key, view in VIEWS.items() if view.NAME.lower() == self.settings.view)
        self._clock = clock
        self._wall = wall
        self._ticking = ticking
        self._heard = clock()
        self._baseline = baseline

    def _post(self, event: feed.FeedEvent) -> None:
        self.post_message(FeedMessage(event))

    def compose(self) -> ComposeResult:
        """All views; one of them is seen."""
        with ContentSwitcher(initial=self.view.id):
            yield from self.views.values()

    def on_mount(self) -> None:
        """Starts to read and to draw."""
        timeline = self.views["2"]
        assert isinstance(timeline, TimelineView)
        timeline.span_s = self.settings.timeline_seconds
        self.dress()
        self.show_view(self._here)
        if self._ticking:
            self.set_interval(1 / self.settings.repaint_hz, self.tick)
        if self._baseline is not None:
            self.comparison.compare_with(self._baseline)
        self.feed.start()

    def on_unmount(self) -> None:
        """Lets the feed end; it needs one poll, and nobody waits for more than `JOIN_S`."""
        self.comparison.stop()
        self.feed.stop()
        self.feed.join(JOIN_S)

    # -- drawing ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> RunView:
        """The view shown."""
        return self.views[self._here]

    @property
    def comparison(self) -> CompareView:
        """The view that compares."""
        view = self.views["6"]
        assert isinstance(view, CompareView)
        return view

    def show_view(self, key: str) -> None:
        """Shows another view."""
        self._here = key
        self.view.tabs = tuple(Tab(other, view.NAME, other == key) for other, view in VIEWS.items())
        self.query_one(ContentSwitcher).current = self.view.id
        self.view.focus()
        if self.view.size.height:
            self.view.repaint()

    def dress(self) -> None:
        """Gives all views the colours and characters chosen."""
        scheme = SCHEMES[self.look]
        self.screen.styles.background = scheme.background if scheme is not None else "ansi_default"
        self.theme = "textual-light" if self.look == "light" else "textual-dark"
        for view in self.views.values():
            view.look(self.look, self.ascii_only)

    def tick(self) -> None:
        """Draws what is new."""
        live = self.session.live_link(self._clock() - self._heard > SILENCE_S, self._wall())
        if isinstance(self.feed, FileFeed):
            replay = self.feed
            place = (replay.position_s, replay.length_s)
            live = self.session.replay_link(replay.speed, replay.paused, *place, replay.loop)
        if self.session.refresh(live) or self.view.pending:
            self.view.repaint()

    # -- what the feed says ----------------------------------------------------------------------------------

    def on_feed_message(self, message: FeedMessage) -> None:
        """Applies what the feed has posted."""
        event = message.event
        if isinstance(event, feed.Frames):
            self._heard = self._clock()
            self.session.apply(event.frames)
            self.feed.taken()
        elif isinstance(event, feed.Waiting):
            self.session.wait(event.directory, event.job)
        elif isinstance(event, feed.Attached):
            self._attached(event)
        elif isinstance(event, feed.Over):
            self.session.over = True
            if event.note:
                self.notify(event.note)
        elif isinstance(event, feed.Rewound):
            self.session.rewind()
        elif isinstance(event, feed.Arrived):
            self._arrived(event)
        elif isinstance(event, feed.Missed):
            self.notify(event.why, timeout=4, markup=False)
        elif isinstance(event, feed.Output):
            self.session.hear(event.lines, event.begun, self._wall())
        else:
            self.failure = event.error
            self.exit(1, return_code=1)

    def _attached(self, event: feed.Attached) -> None:
        self._heard = self._clock()
        self.session.attach(event.name, event.ended_s)
        for view in self.views.values():
            view.forget()
        if event.several:
            self.action_runs()

    def _arrived(self, event: feed.Arrived) -> None:
        self.session.arrive(event.step)
        for view in self.views.values():
            view.moved()
        self.tick()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel."""
        self.view.scroll_ranks(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel."""
        self.view.scroll_ranks(-1)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the command palette offers."""
        for key, view in VIEWS.items():
            yield SystemCommand(f"View: {view.NAME}", f"key {key}", lambda key=key: self.show_view(key))
        for title, help_text, action in COMMANDS:
            yield SystemCommand(title, help_text, lambda action=action: self.run_worker(self.run_action(action)))


def run_dashboard(
    spec: FeedSpec, theme: str | None = None, ascii_only: bool | None = None, baseline: Path | None = None
) -> int:
    """Shows a run, or a recording, until the user quits.

    Args:
        spec: Where the frames come from.
        theme: Overrides the settings' theme.
        ascii_only: Overrides the settings' ``ascii``.
        baseline: A recording to compare with.

    Returns:
        The exit code.

    Raises:
        DdpwatchError: There is no usable rendezvous directory, or a recording or the settings cannot be read.
    """
    if isinstance(spec, AttachFeed) and spec.endpoint is None:
        rundir.directory()
    if baseline is not None:
        Recording(baseline)  # what is no recording is said here, not on the screen
    app = DashboardApp(spec, settings=load_settings().override(theme, ascii_only), baseline=baseline)
    gc.set_threshold(*GC_THRESHOLDS)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.return_code or 0
