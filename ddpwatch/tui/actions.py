"""What the keys of all views do."""

from __future__ import annotations

import time
from pathlib import Path

from textual.app import App

from ddpwatch.rundir import RunInfo
from ddpwatch.tui.feed import FileFeed, LiveFeed
from ddpwatch.tui.filters import HELP as FILTER_HELP
from ddpwatch.tui.palette import SCHEMES
from ddpwatch.tui.screens import AskScreen, HelpScreen, RunPicker
from ddpwatch.tui.session import Session
from ddpwatch.tui.text import clean
from ddpwatch.tui.views.base import RunView
from ddpwatch.tui.views.log import LogView

COMMANDS = (
    ("Pause or resume", "key space", "pause"),
    ("Slowest step", "key S", "slowest"),
    ("Next finding", "key n", "finding(1)"),
    ("Previous finding", "key N", "finding(-1)"),
    ("Go to a step", "key g", "go_to"),
    ("Filter ranks", "key /", "filter"),
    ("Follow the slowest rank", "key f", "follow"),
    ("Copy the finding", "key y", "copy"),
    ("Picture of the screen (SVG)", "key P", "svg"),
    ("Other colours", "key T", "theme"),
    ("ASCII only, or all characters", "key A", "ascii"),
    ("Choose another run", "key a", "runs"),
    ("Help", "key ?", "help"),
    ("Quit", "key q", "quit"),
)


class Actions(App[int]):
    """The app's keys: one method per action. What they act on is the app's (see `ddpwatch.tui.app`)."""

    session: Session
    feed: LiveFeed | FileFeed
    look: str
    ascii_only: bool

    @property
    def view(self) -> RunView:
        """The view shown."""
        raise NotImplementedError

    def show_view(self, key: str) -> None:
        """Shows another view."""
        raise NotImplementedError

    def tick(self) -> None:
        """Draws what is new."""
        raise NotImplementedError

    def dress(self) -> None:
        """Gives all views the colours and characters chosen."""
        raise NotImplementedError

    async def action_quit(self) -> None:
        """Leaves at once."""
        self.exit(0)

    def action_view(self, key: str) -> None:
        """Another view."""
        self.show_view(key)

    def action_pause(self) -> None:
        """Freezes the view of a live run; holds a recording."""
        self.pause(not self.session.paused)

    def pause(self, paused: bool) -> None:
        """Freezes the view, or lets it follow again."""
        self.session.pause(paused)
        if isinstance(self.feed, FileFeed):
            self.feed.pause(paused)
        self.tick()

    def action_step(self, by: int) -> None:
        """To the step before or after the one shown."""
        self.pause(True)
        self.session.step(by)
        self.tick()

    def action_oldest(self) -> None:
        """To the oldest step kept."""
        self.pause(True)
        self.session.select_oldest()
        self.tick()

    def action_newest(self) -> None:
        """Follows the newest step again; plays a recording to its end."""
        self.action_to_end()
        self.pause(False)

    def action_to_end(self) -> None:
        """Plays all that is left of a recording at once."""
        if isinstance(self.feed, FileFeed):
            self.session.pause(False)
            self.feed.jump_to_end()

    def action_to_step(self, number: int) -> None:
        """Pauses at a step, in the Timeline."""
        self._jump(number)
        self.show_view("2")

    def _jump(self, number: int | None) -> None:
        if number is None:
            self.notify("none found", timeout=2)
            return
        self.pause(True)
        self.session.select(number)
        self.tick()

    def action_slowest(self) -> None:
        """To the slowest step kept."""
        self._jump(self.session.slowest_step())

    def action_finding(self, by: int) -> None:
        """To the next, or previous, step with something to see."""
        self._jump(self.session.next_finding(by))

    def action_go_to(self) -> None:
        """Asks for a step's number."""
        self.push_screen(AskScreen("go to step", "a number", ""), self._go_to)

    def _go_to(self, text: str | None) -> None:
        if text and text.strip().isdecimal():
            self._jump(int(text))

    def action_filter(self) -> None:
        """Asks which ranks to show."""
        self.push_screen(AskScreen("show", FILTER_HELP, self.session.filter), self._filter)

    def _filter(self, text: str | None) -> None:
        if text is not None:
            self.session.filter = text.strip()
            self.tick()

    def action_follow(self) -> None:
        """Keeps the slowest rank in sight, or no longer."""
        self.session.follow_slowest = not self.session.follow_slowest
        self.tick()

    def action_copy(self) -> None:
        """Copies the finding, or the log's line, by the terminal's own means (OSC 52)."""
        line = self.view.current if isinstance(self.view, LogView) else None
        text = clean(line.text if line is not None else self.session.overview.verdict.text, 1000)
        self.copy_to_clipboard(text)
        self.notify("copied", timeout=2)

    def action_svg(self) -> None:
        """Saves the screen as SVG into the present directory."""
        name = f"ddpwatch-{clean(self.session.name, 60).replace('/', '-')}-{time.strftime('%H%M%S')}.svg"
        try:
            Path(name).write_text(self.export_screenshot(title=self.session.name), encoding="utf-8")
        except OSError as error:
            self.notify(f"not saved: {error.strerror}", severity="error")
        else:
            self.notify(f"saved {name}", timeout=4)

    def action_theme(self) -> None:
        """The next scheme of colours."""
        names = list(SCHEMES)
        self.look = names[(names.index(self.look) + 1) % len(names)]
        self.dress()

    def action_ascii(self) -> None:
        """ASCII characters only, or all."""
        self.ascii_only = not self.ascii_only
        self.dress()

    def action_speed(self, by: int) -> None:
        """Faster or slower, in a replay."""
        if isinstance(self.feed, FileFeed):
            self.feed.faster(by)
            self.tick()

    def action_scroll(self, by: int) -> None:
        """Other ranks, or other lines."""
        self.view.scroll_ranks(by)

    def action_help(self) -> None:
        """Keys, and what the view's figures mean."""
        self.push_screen(HelpScreen(self.view.NAME, self.view.DEFINITIONS))

    def action_runs(self) -> None:
        """Offers the live runs, and what ended ones have left."""
        if isinstance(self.feed, LiveFeed) and not isinstance(self.screen, RunPicker):
            self.push_screen(RunPicker(self.feed.runs(), self.feed.ended()), self._chosen)

    def _chosen(self, run: RunInfo | Path | None) -> None:
        if run is not None and isinstance(self.feed, LiveFeed):
            self.feed.choose(run)
