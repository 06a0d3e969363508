"""What the keys of all views do."""

from __future__ import annotations

import time
from pathlib import Path

from textual.app import App

from ddpwatch.errors import UsageError
from ddpwatch.recording.seek import HINT, SeekTarget, parse_target
from ddpwatch.rundir import RunInfo
from ddpwatch.transport import Frame
from ddpwatch.tui.feed import LiveFeed
from ddpwatch.tui.paint.palette import SCHEMES
from ddpwatch.tui.rank_filter import HELP as FILTER_HELP
from ddpwatch.tui.replay import FileFeed
from ddpwatch.tui.screens import AskScreen, HelpScreen, RunPicker
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.step_export import step_frames, write_step
from ddpwatch.tui.text import clean
from ddpwatch.tui.views.base import RunView
from ddpwatch.tui.views.compare import CompareView
from ddpwatch.tui.views.log import LogView

COMMANDS = (
    ("Pause or resume", "key space", "pause"),
    ("Slowest step", "key S", "slowest"),
    ("Next finding", "key n", "finding(1)"),
    ("Previous finding", "key N", "finding(-1)"),
    ("Go to a step, or in a replay to a time", "key g", "go_to"),
    ("Replay: 5 seconds back", "key <", "seek(-5)"),
    ("Replay: 5 seconds forward", "key >", "seek(5)"),
    ("Replay: from the begin", "key Home", "oldest"),
    ("Replay: to the end", "key .", "to_end"),
    ("Replay: faster", "key +", "speed(1)"),
    ("Replay: slower", "key -", "speed(-1)"),
    ("Replay: over and over, or once", "key O", "loop"),
    ("Filter ranks", "key /", "filter"),
    ("Follow the slowest rank", "key f", "follow"),
    ("Copy the finding", "key y", "copy"),
    ("Picture of the screen (SVG)", "key P", "svg"),
    ("Compare with a recording", "key 6, then b", "baseline"),
    ("Export the step as a Chrome trace", "key E", "trace"),
    ("Other colours", "key T", "theme"),
    ("ASCII only, or all characters", "key A", "ascii"),
    ("Choose another run", "key a", "runs"),
    ("Help", "key ?", "help"),
    ("Quit", "key q", "quit"),
)


class Actions(App[int]):
    """The app's keys: one method per action. What they act on is the app's (see `ddpwatch.tui.app`)."""

    session: ViewerSession
    feed: LiveFeed | FileFeed
    look: str
    ascii_only: bool

    @property
    def comparison(self) -> CompareView:
        """The view that compares."""
        raise NotImplementedError

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
        """To the step before or after the one shown; a replay goes there if that is not kept."""
        self.pause(True)
        if not self.session.step(by) and isinstance(self.feed, FileFeed):
            shown = self.session.view
            self.feed.go_to_neighbour(shown.step if shown is not None else -1, by)
        self.tick()

    def action_oldest(self) -> None:
        """To the oldest step kept; a replay begins anew."""
        if isinstance(self.feed, FileFeed):
            self.feed.go_to(SeekTarget(seconds=0))
            return
        self.pause(True)
        self.session.select_oldest()
        self.tick()

    def action_seek(self, seconds: int) -> None:
        """A replay goes forwards or backwards."""
        if isinstance(self.feed, FileFeed):
            self.feed.go_by(seconds)

    def action_loop(self) -> None:
        """A replay goes on for ever, or ends with the recording."""
        if isinstance(self.feed, FileFeed):
            self.feed.toggle_loop()
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
        if isinstance(self.feed, FileFeed) and number not in self.session.state.steps:
            self.feed.go_to(SeekTarget(step=number))
        self.session.select(number)
        self.tick()

    def action_slowest(self) -> None:
        """To the slowest step kept."""
        self._jump(self.session.slowest_step())

    def action_finding(self, by: int) -> None:
        """To the next, or previous, step with something to see: among those kept, in a replay in all of it."""
        if not isinstance(self.feed, FileFeed):
            self._jump(self.session.next_finding(by))
            return
        self.pause(True)
        shown = self.session.view
        self.feed.go_to_finding(by, shown.step if shown is not None and not self.session.at_newest else None)

    def action_go_to(self) -> None:
        """Asks for a step, in a replay also for a time."""
        hint = HINT if isinstance(self.feed, FileFeed) else "a step's number"
        self.push_screen(AskScreen("go to", hint, ""), self._go_to)

    def _go_to(self, text: str | None) -> None:
        if not text or not text.strip():
            return
        try:
            spot = parse_target(text)
        except UsageError as error:
            self.notify(f"{error.message}: {error.hint}", markup=False)
            return
        if isinstance(self.feed, FileFeed):
            self.pause(self.session.paused or spot.step is not None)
            self.feed.go_to(spot)
        else:
            self._jump(spot.step)

    def action_filter(self) -> None:
        """Asks which ranks to show."""
        self.push_screen(AskScreen("show", FILTER_HELP, self.session.filter), self._filter)

    def _filter(self, text: str | None) -> None:
        if text is not None:
            self.session.filter = text.strip()
            self.tick()

    def action_baseline(self) -> None:
        """Asks for a recording to compare with."""
        known = self.comparison.baseline
        before = "" if known is None else str(known.path)
        self.push_screen(AskScreen("compare with", "the file of a recording", before), self._compare)

    def _compare(self, text: str | None) -> None:
        if text and text.strip():
            self.comparison.compare_with(Path(text.strip()).expanduser())
            self.show_view("6")

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
        path = self._file(f"{time.strftime('%H%M%S')}.svg")
        try:
            path.write_text(self.export_screenshot(title=self.session.name), encoding="utf-8")
        except OSError as error:
            self._not_saved(path, error)
        else:
            self.notify(f"saved {path}", timeout=4, markup=False)

    def _file(self, end: str) -> Path:
        """A file in the present directory, named after the run."""
        return Path(f"ddpwatch-{clean(self.session.name, 60).replace('/', '-')}-{end}")

    def _not_saved(self, path: Path, error: OSError) -> None:
        self.notify(f"not saved: {path.absolute().parent}: {error.strerror}", severity="error", markup=False)

    def action_trace(self) -> None:
        """Saves the step shown as a Chrome trace into the present directory."""
        view = self.session.view
        if view is None:
            self.notify("no step to export yet", timeout=2)
            return
        frames, path = step_frames(self.session.state, view), self._file(f"step{view.step}.json")
        self.run_worker(lambda: self._save_trace(frames, len(view), path), thread=True)

    def _save_trace(self, frames: list[Frame], ranks: int, path: Path) -> None:
        """A large job's step takes a second or two, in a thread of its own."""
        try:
            events = write_step(frames, ranks, path)
        except OSError as error:
            self._not_saved(path, error)
        else:
            self.notify(f"saved {path}: {events} events, opens in ui.perfetto.dev", timeout=6, markup=False)

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
