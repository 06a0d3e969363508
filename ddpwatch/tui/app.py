"""The dashboard: one feed, one session, the views on it, and what the keys do."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.keys import format_key
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Tabs

from ddpwatch.common.text import percent
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.seek import parse_target
from ddpwatch.recording.selection import Selection
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.run.state_folder import state_folder
from ddpwatch.tui.bottom_bar import BAR_CSS, HEIGHTS, WIDTHS, BottomBar, bar_variables
from ddpwatch.tui.explaining import Explaining
from ddpwatch.tui.feed import AttachSpec, FeedSpec, LiveFeed, ReplayFeed, ReplaySpec, open_feed
from ddpwatch.tui.feed import events as posted
from ddpwatch.tui.interrupts import Interrupt, let_keys_interrupt
from ddpwatch.tui.keys import COMMANDS, LIVE_ONLY, NAVIGATION, REPLAY_ONLY
from ddpwatch.tui.models.overview import Link
from ddpwatch.tui.models.rank_filter import HELP as FILTER_HELP
from ddpwatch.tui.models.rank_filter import selecting
from ddpwatch.tui.models.whole import WholeRecording
from ddpwatch.tui.navigation import navigation_for
from ddpwatch.tui.paint.ascii import ascii_text
from ddpwatch.tui.paint.palette import SCHEMES
from ddpwatch.tui.runs import RUNS_CSS, RunPicker
from ddpwatch.tui.screens import MODAL_CSS, AskScreen, ExplainScreen, HelpScreen
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.settings import Settings, load_settings
from ddpwatch.tui.step_export import step_frames, write_step
from ddpwatch.tui.text import shorten_name
from ddpwatch.tui.views import RunView, Views
from ddpwatch.viewer.live_source import SILENCE_S

JOIN_S = 0.5


class DashboardApp(App[int]):
    """Shows one run at a time.

    Args:
        spec: Where the frames come from.
        clock: A monotonic clock in seconds; a collector that is silent for too long by it is gone.
        ticking: Whether the view repaints by itself; tests do it by hand.
        wall: The time of day, in seconds since the Unix epoch.
        settings: The user's settings.
        baseline: A recording to compare with.
    """

    CSS = f"""
    Screen {{ layers: base; overflow: hidden; background: $bar-background; }}
    ContentSwitcher {{ height: 1fr; }}
    Toast {{ width: auto; max-width: 100%; margin: 0; padding: 0 1; }}
    ToastRack {{ margin: 0; padding: 0; }}
    RunView {{ width: 100%; height: 100%; }}
    {BAR_CSS}{MODAL_CSS}{RUNS_CSS}
    """
    BINDINGS: ClassVar[list[BindingType]] = [*NAVIGATION, *COMMANDS]
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS
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
        self.theme_name = self.settings.resolved_theme()
        super().__init__(ansi_color=self.theme_name in ("none", "ansi"))
        self.ascii_only = self.settings.ascii
        self.session = ViewerSession(isinstance(spec, ReplaySpec), _whole_run(spec))
        self.session.follow_slowest = self.settings.follow_slowest
        self.feed = open_feed(spec, partial(self.call_later, self.take_event))
        self.navigation = navigation_for(self.session, self.feed)
        self.explaining = Explaining(self.session, self.feed.order_stacks, clock)
        self.views = Views(self.session, self.settings.timeline_seconds, self.show_step)
        self.view: RunView = next(view for view in self.views if view.id == self.settings.view)
        self.failure: Exception | None = None
        self._interrupt_job = spec.interrupt if isinstance(spec, AttachSpec) else None
        self._interrupts = 0  # on their way here
        self._leaving = False
        self._clock = clock
        self._wall = wall
        self._ticking = ticking
        self._last_frames_s = clock()
        self._baseline = baseline

    def compose(self) -> ComposeResult:
        """Yields all views, one of them visible."""
        with ContentSwitcher(initial=self.view.id):
            yield from self.views
        yield BottomBar(self.views.by_key, self.view)

    def on_mount(self) -> None:
        """Starts to read and to draw."""
        self.apply_theme()
        self.show_view(self.view)
        if self._ticking:
            self.set_interval(1 / self.settings.repaint_hz, self.tick)
        if self._baseline is not None:
            self.views.compare.compare_with(self._baseline)
        if self.session.whole is not None:
            self.session.whole.start()
        self.feed.start()

    def on_unmount(self) -> None:
        """Stops the threads, and waits at most `JOIN_S` for the feed."""
        self.views.compare.stop()
        self.views.whatif.stop()
        if self.session.whole is not None:
            self.session.whole.stop()
        self.feed.stop()
        self.feed.join(JOIN_S)

    # -- drawing ---------------------------------------------------------------------------------------------

    def show_view(self, view: RunView) -> None:
        """Shows another view."""
        self.view = view
        self.query_one(ContentSwitcher).current = view.id
        self.query_one(BottomBar).show_tab(view)
        self.screen_stack[0].set_focus(view)  # at once, not after the keys that are on their way
        view.invalidate()
        if view.size.height:
            view.repaint()

    def apply_theme(self) -> None:
        """Gives all views the chosen colours and characters."""
        self.theme = "textual-light" if self.theme_name == "light" else "textual-dark"
        for view in self.views:
            view.apply_theme(self.theme_name, self.ascii_only)

    def tick(self) -> None:
        """Draws what is new."""
        link = self.navigation.link(self._clock() - self._last_frames_s > SILENCE_S, self._wall())
        if self.session.refresh(link) or self.view.pending:
            self.view.repaint()

    # -- what the feed posts ---------------------------------------------------------------------------------

    def take_event(self, event: posted.FeedEvent) -> None:
        """Takes an event of the feed."""
        match event:
            case posted.Frames(frames):
                self._last_frames_s = self._clock()
                self.session.apply_frames(frames)
                self.feed.taken()
            case posted.Waiting(directory, job, why):
                self.session.wait(directory, job, why)
            case posted.Attached() as attached:
                self._attached(attached)
            case posted.Over(note):
                self.session.over = True
                if note:
                    self.notify(note)
            case posted.Trouble(text):
                self.session.trouble = text
            case posted.Note(text):
                self.session.add_note(text, self._wall())
            case posted.Rewound():
                self.session.rewind()
            case posted.Arrived(step):
                self._arrived(step)
            case posted.Missed(why):
                self.notify(why, timeout=4)
            case posted.Output(lines, unfinished):
                self.session.add_output(lines, unfinished, self._wall())
            case posted.Failed(error):
                self.failure = error
                self.exit(1, return_code=1)

    def _attached(self, event: posted.Attached) -> None:
        self._last_frames_s = self._clock()
        self.session.attach(event.name, event.ended_s)
        self.explaining.withdraw()
        for view in self.views:
            view.forget()
        if event.several:
            self.action_runs()

    def _arrived(self, step: int | None) -> None:
        self.session.arrive(step)
        for view in self.views:
            view.position_changed()
        self.tick()

    # -- moving through the run ------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Freezes the views, or lets them follow the run again."""
        self.navigation.pause(not self.session.paused)
        self.tick()

    def action_step(self, by: int) -> None:
        """Goes to the step before or after the one shown."""
        self.navigation.step(by)
        self.tick()

    def action_oldest(self) -> None:
        """Goes to the oldest step kept, or to the start of a recording."""
        self.navigation.oldest()
        self.tick()

    def action_newest(self) -> None:
        """Follows the newest step."""
        self.navigation.newest()
        self.tick()

    def action_play_to_end(self) -> None:
        """Plays all that is left of a recording at once."""
        self.navigation.play_to_end()

    def action_seek(self, seconds: int) -> None:
        """Moves a replay in time."""
        self.navigation.seek(seconds)

    def action_speed(self, by: int) -> None:
        """Makes a replay faster or slower."""
        self.navigation.change_speed(by)
        self.tick()

    def action_loop(self) -> None:
        """Lets a replay start again after its end, or not."""
        self.navigation.toggle_loop()
        self.tick()

    def action_slowest(self) -> None:
        """Goes to the slowest step kept."""
        self._moved(self.navigation.slowest())

    def action_finding(self, by: int) -> None:
        """Goes to the next, or previous, step that stands out."""
        self._moved(self.navigation.finding(by))

    def _moved(self, found: bool) -> None:
        if not found:
            progress = self.session.overview.diagnosed.progress
            self.notify(
                "none found" if progress is None else f"none found yet: diagnosing, {percent(progress)}", timeout=2
            )
        self.tick()

    def show_step(self, number: int, at_ns: int | None = None) -> None:
        """Pauses at a step, in the Timeline; at that moment of a recording that ends before it, in the Overview."""
        if not self.session.replay and number < min(self.session.state.steps, default=number):
            self.notify(f"step {number} is no longer in memory: a recording has it", timeout=4)
            return
        newest, whole = self.session.overview.newest_step, self.session.whole
        if not self.session.replay and newest is not None and number > newest:
            self.notify(f"step {number} did not end, so it has no timeline: this is step {newest}", timeout=4)
            number = newest
        self._moved(self.navigation.go_to_step(number, at_ns))
        ends = whole is None or not whole.ready or number <= whole.newest_step
        self.show_view(self.views.timeline if ends else self.views.overview)

    def action_go_to(self) -> None:
        """Asks for a step; in a replay also for a time."""
        self.push_screen(AskScreen("go to", self.navigation.target_hint, ""), self._go_to)

    def _go_to(self, text: str | None) -> None:
        if not text or not text.strip():
            return
        try:
            target = parse_target(text)
        except UsageError as error:
            self.notify(f"{error.message}: {error.hint}")
        else:
            self._moved(self.navigation.go_to(target))

    # -- what is shown ---------------------------------------------------------------------------------------

    def action_view(self, key: str) -> None:
        """Shows another view."""
        self.show_view(self.views.by_key[key])

    def action_scroll(self, by: int) -> None:
        """Scrolls to other ranks or lines."""
        self.view.scroll_ranks(by)

    def on_tabs_tab_activated(self, event: Tabs.TabActivated) -> None:
        """Shows the view whose tab is clicked on."""
        if event.tab.id == event.tabs.active != self.view.id:
            self.show_view(next(view for view in self.views if view.id == event.tab.id))

    def action_filter(self) -> None:
        """Asks which ranks to show."""
        self.push_screen(AskScreen("show", FILTER_HELP, self.session.filter), self._filter)

    def _filter(self, text: str | None) -> None:
        if text is None:
            return
        try:
            selecting(text, self.session.state.ranks, self.session.state.status_of)
        except UsageError as error:
            self.push_screen(AskScreen(f"{error.message}; show", error.hint, text), self._filter)
            return
        self.session.filter = text.strip()
        self.tick()

    def action_follow(self) -> None:
        """Keeps the slowest rank in sight, or not."""
        self.session.follow_slowest = not self.session.follow_slowest
        self.tick()

    def action_baseline(self) -> None:
        """Asks for a recording to compare with."""
        baseline = self.views.compare.baseline
        path = "" if baseline is None else str(baseline.path)
        self.push_screen(AskScreen("compare with", "the file of a recording", path), self._compare)

    def _compare(self, text: str | None) -> None:
        if text and text.strip():
            self.views.compare.compare_with(Path(text.strip()).expanduser())
            self.show_view(self.views.compare)

    def action_next_theme(self) -> None:
        """Switches to the next colour theme."""
        names = list(SCHEMES)
        self.theme_name = names[(names.index(self.theme_name) + 1) % len(names)]
        self.apply_theme()
        self.refresh_css(animate=False)

    def action_ascii(self) -> None:
        """Draws with ASCII characters only, or with all."""
        self.ascii_only = not self.ascii_only
        self.apply_theme()
        self.refresh_bindings()

    def action_runs(self) -> None:
        """Offers the live runs and the recordings of ended ones."""
        if isinstance(self.feed, LiveFeed) and not isinstance(self.screen, RunPicker):
            self.push_screen(RunPicker(self.feed.look, self.feed.runs(), self.feed.ended()), self._choose_run)

    def _choose_run(self, run: RunInfo | Path | None) -> None:
        if run is not None and isinstance(self.feed, LiveFeed):
            self.feed.choose(run)

    def action_explain(self, how: str = "stacks") -> None:
        """Explains why a rank is late, the one in question, or what a recording says of some; or another incident."""
        self.explaining.ask(self.view.rank_in_question, how == "profiler", self.view.incident_in_question)
        self.push_screen(ExplainScreen(self.explaining))

    def action_help(self) -> None:
        """Explains the keys and the view's figures."""
        self.push_screen(HelpScreen(self.view.NAME, self.view.DEFINITIONS))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Returns the entries of the command palette."""
        for key, view in self.views.by_key.items():
            yield SystemCommand(f"View: {view.NAME}", f"key {key}", lambda view=view: self.show_view(view))
        yield SystemCommand("Compare with a recording", "key 6, then b", self.action_baseline)
        for command in COMMANDS:
            run = command.action
            if self.check_action(run.partition("(")[0], ()):
                key = format_key(command.key.partition(",")[0])
                yield SystemCommand(
                    command.tooltip, f"key {key}", lambda run=run: self.run_worker(self.run_action(run))
                )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Takes the keys of a replay from a live run, and the other way round."""
        return action not in (LIVE_ONLY if isinstance(self.feed, ReplayFeed) else REPLAY_ONLY)

    def get_key_display(self, binding: Binding) -> str:
        shown = super().get_key_display(binding)
        return ascii_text(shown) if self.ascii_only else shown

    def get_css_variables(self) -> dict[str, str]:
        return {**super().get_css_variables(), **bar_variables(self.theme_name)}

    # -- what leaves the dashboard ---------------------------------------------------------------------------

    def notify(self, message: str, **options: Any) -> None:
        """Shows a message for a while: what is in it, such as a file's name, is only text."""
        super().notify(shorten_name(message, 1000), markup=False, **options)

    async def action_quit(self) -> None:
        """Leaves at once. A Ctrl-C on its way here was pressed after this key: it is the job's."""
        is_the_jobs = self._interrupts > 0 and not self._leaving
        self.exit(0)
        if is_the_jobs and self._interrupt_job is not None:
            self._interrupt_job()

    def action_interrupt(self) -> None:
        """Leaves by Ctrl-C; it is the job's if the dashboard is already closing."""
        if not self._leaving:
            if (self.focused or self.screen).post_message(Interrupt()):
                self._interrupts += 1
            else:  # what has the focus is closing
                self.exit(0)
        elif self._interrupt_job is not None:
            self._interrupt_job()

    def on_interrupt(self) -> None:
        """Leaves, unless a key that was pressed before did so."""
        self._interrupts -= 1
        if not self._leaving:
            self.exit(0)

    def exit(self, *arguments: Any, **options: Any) -> None:
        """Leaves. Whoever presses Ctrl-C from then on, while the dashboard closes, means the job."""
        if self._interrupt_job is not None and not self._leaving:
            let_keys_interrupt()
        self._leaving = True
        super().exit(*arguments, **options)

    def action_copy(self) -> None:
        """Copies the verdict, or the log's line, by the terminal's own means (OSC 52)."""
        text = self.views.log.text if self.view is self.views.log else None
        said = self.session.overview.verdict.with_others()
        self.copy_to_clipboard(shorten_name(said if text is None else text, 1000))
        self.notify("copied", timeout=2)

    def action_save_svg(self) -> None:
        """Saves the screen as SVG."""
        svg = self.export_screenshot(title=self.session.name)
        self._save(f"{time.strftime('%H%M%S')}.svg", lambda path: path.write_text(svg, encoding="utf-8"))

    def action_export_step(self) -> None:
        """Saves the step shown as a Chrome trace; in a thread, because a large job's step takes a second or two."""
        step = self.session.step_shown
        if step is None:
            self.notify("no step to export yet", timeout=2)
            return
        frames, name, ranks = step_frames(self.session.state, step), f"step{step.step}.json", len(step)
        note = ", opens in ui.perfetto.dev"
        self.run_worker(lambda: self._save(name, lambda path: write_step(frames, ranks, path), note), thread=True)

    def _save(self, end: str, write: Callable[[Path], object], note: str = "") -> None:
        """Writes a file named after the run to the user's state directory, and says where."""
        try:
            path = self._file(end)
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except DdpwatchError as error:
            self.notify(f"not saved: {error}", severity="error")
        except OSError as error:
            self.notify(f"not saved: {error.filename}: {error.strerror}", severity="error")
        else:
            self.notify(f"saved {path}{note}", timeout=6)

    def _file(self, end: str) -> Path:
        return state_folder("saved") / f"ddpwatch-{shorten_name(self.session.name, 60).replace('/', '-')}-{end}"


def _whole_run(spec: FeedSpec) -> WholeRecording | None:
    """Returns what diagnoses a recording, on a reader of its own."""
    if not isinstance(spec, ReplaySpec):
        return None
    recording = copy.copy(spec.recording)
    return WholeRecording(lambda: recording.select(Selection()), lambda: recording.span_ns)


def run_dashboard(
    spec: FeedSpec, theme: str | None = None, ascii_only: bool | None = None, baseline: Path | None = None
) -> str:
    """Shows a run, or a recording, until the user quits.

    Args:
        spec: Where the frames come from.
        theme: Overrides the settings' theme.
        ascii_only: Overrides the settings' ``ascii``.
        baseline: A recording to compare with.

    Returns:
        The live run that goes on without it; empty if there is none.

    Raises:
        DdpwatchError: There is no usable run directory, or a recording or the settings cannot be read.
    """
    if isinstance(spec, AttachSpec) and spec.endpoint is None:
        rundir.directory()
    if baseline is not None:
        Recording(baseline)  # a bad file fails here, not on the screen
    app = DashboardApp(spec, settings=load_settings().override(theme, ascii_only), baseline=baseline)
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.session.state.run_id if app.session.overview.link.link is Link.LIVE else ""
