"""The state of the dashboard: the run, the state of its feed, and the user's choices. Knows no widget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddpwatch.analysis.diagnosis.words.why_unwatched import NOT_KNOWN, Why
from ddpwatch.analysis.explain.explanation import Explanation
from ddpwatch.tui.feed.events import BATCH
from ddpwatch.tui.models.incidents import Diagnosed
from ddpwatch.tui.models.log import JobOutput, LogLine, RunLog
from ddpwatch.tui.models.overview import (
    Link,
    LinkState,
    Overview,
    OverviewBuilder,
    filtered,
    paused_overview,
    step_to_show,
)
from ddpwatch.tui.models.steps import is_slow
from ddpwatch.tui.models.verdict_facts import of_whole
from ddpwatch.tui.models.whole import Place, WholeRecording
from ddpwatch.viewer.state import RunState, StepAcrossRanks
from ddpwatch.wire.messages import Step
from ddpwatch.wire.transport import Frame


class ViewerSession:
    """One dashboard's state. `refresh` turns it into the `overview` that the views draw.

    Args:
        replay: Whether the frames come from a recording.
        whole: The diagnosis of that recording.

    Attributes:
        state: Everything known of the run.
        log: The run's log.
        output: What the job prints, if ddpwatch launched it.
        over: No more frames will come.
        seeking: A replay jumps: the frames so far are void, and the overview is that of before.
        paused: The views are frozen.
        overview: What to draw, as of the last `refresh`.
        rank: The rank that the user has selected, if any.
        trouble: Why no frames come, if the feed knows.
        follow_slowest: Views keep the slowest rank in sight.
    """

    def __init__(self, replay: bool = False, whole: WholeRecording | None = None) -> None:
        self.replay = replay
        self.whole = whole
        self.follow_slowest = False
        self.output = JobOutput()
        self._forget_run("")
        self._directory = self._job = ""
        self._why = NOT_KNOWN
        self._attached = False
        self._ended_s: float | None = None
        self._found: Diagnosed | None = None  # of `whole`, as of the last `refresh`

    def _forget_run(self, name: str) -> None:
        self.name = name
        self.trouble = ""
        self.paused = False
        self.rank: int | None = None
        self.overview = Overview(link=LinkState(name=name, replay=self.replay))
        self._filter = ""
        self._forget_frames()

    def _forget_frames(self) -> None:
        self.state = RunState()
        if self.replay:
            self.state.diagnosis.places.read_from("")
        self.log = RunLog()
        self.over = False
        self.seeking = False
        self._builder = OverviewBuilder()
        self._frozen: Overview | None = None
        self._frozen_steps: list[StepAcrossRanks] = []
        self._selected: StepAcrossRanks | None = None
        self._drawn: tuple[object, ...] = ()

    # -- what the feed posts ---------------------------------------------------------------------------------

    def wait(self, directory: str, job: str = "", why: Why = NOT_KNOWN) -> None:
        """Waits for a run; ``job`` is the command that should start one, and ``why`` how far that has come."""
        self._directory, self._job, self._why = directory, job, why

    def attach(self, name: str, ended_s: float | None = None) -> None:
        """Shows another run: a live one, or one that ended at that time (seconds since the Unix epoch)."""
        self._forget_run(name)
        self._attached = True
        self._ended_s = ended_s

    def rewind(self) -> None:
        """Voids the frames, as a replay jumps. The user's choices stay, and for now so does the overview."""
        self._forget_frames()
        self.seeking = True

    def arrive(self, step: int | None) -> None:
        """Shows the new position, and that step, in a frozen view, as a replay has arrived."""
        self.seeking = False
        if self.paused:
            self.pause(False)
            self.pause(True)
            if step is not None:
                self.select(step)

    def apply_frames(self, frames: Iterable[Frame]) -> None:
        """Takes frames. A short batch means that the dashboard keeps up; then it works out each step at once.

        A replay logs incidents twice a second of recorded time, so that its log does not depend on its speed.
        """
        frames = list(frames)
        keeps_up = len(frames) < BATCH
        for message, envelope in frames:
            self.state.apply_message(message, envelope.received_ns, envelope.frame)
            self.log.take_message(message, envelope.received_ns)
            if keeps_up and isinstance(message, Step):
                step = self.state.steps.get(message.step)
                if step is not None and message.rank in step.ranks:  # the rank's own step may still be held back
                    step.facts_of(message.rank)
            if self.replay and self._builder.due(self.state):
                self._log_incidents()

    def _log_incidents(self) -> None:
        """Logs what has started and ended since the last look."""
        found = self._builder.diagnosis(self.state)
        self.log.log_incidents(found.incidents, self.state.now_ns, found.unit)

    def add_output(self, lines: Iterable[str], unfinished: str, wall_s: float) -> None:
        """Takes lines of the job's output (see `JobOutput.add_output`)."""
        self.output.add_output(lines, unfinished, int(wall_s * 1e9))

    def add_note(self, text: str, wall_s: float) -> None:
        """Logs what the user has to know of the frames."""
        self.log.add_line(LogLine(int(wall_s * 1e9), "run", f"note: {text}", "warn"))

    # -- what the views draw ---------------------------------------------------------------------------------

    def live_link(self, silent: bool, wall_s: float = 0.0) -> LinkState:
        """Returns the state of a live feed; ``wall_s`` is the time of day, in seconds since the Unix epoch."""
        link = Link.LIVE
        if not self._attached:
            link = Link.WAITING
        elif self.over or self.state.end is not None:
            link = Link.ENDED
        elif self.trouble or silent:
            link = Link.GONE
        elif not self.state.frames:
            link = Link.ATTACHING
        ago = None if self._ended_s is None else int(max(wall_s - self._ended_s, 0) // 60)
        return LinkState(
            link, self.name, self._directory, job=self._job, why=self._why, paused=self.paused, ended_min=ago,
            trouble=self.trouble,
        )  # fmt: skip

    def replay_link(self, speed: float, held: bool, position_s: float, length_s: float, loop: bool) -> LinkState:
        """Returns the state of a replay."""
        return LinkState(
            Link.SEEKING if self.seeking else Link.ENDED if self.over else Link.REPLAY,
            self.name,
            speed=speed,
            paused=self.paused or held,
            replay=True,
            position_s=int(position_s),
            length_s=int(length_s),
            loop=loop,
        )

    def refresh(self, link: LinkState) -> bool:
        """Brings the overview up to date. Returns whether it has changed."""
        found = None if self.whole is None else self.whole.result
        now = (
            link,
            self.state.version,
            self._selected.step if self._selected else None,
            self._frozen is None,
            self._filter,
            self.output.version,
            self.follow_slowest,
            found,
        )
        if now == self._drawn:
            return False
        self._drawn = now
        if self.seeking:
            self.overview = replace(self.overview, link=link)
            return True
        if found is not self._found:
            self._found = found
            if self._frozen is not None and found is not None and found.whole:
                self._freeze()
        built = replace(self._build(link), following=self.follow_slowest)
        self.overview = built if found is None else self._with_whole(built, found)
        return True

    def _build(self, link: LinkState) -> Overview:
        if self._frozen is None:
            overview = self._builder.build(self.state, link, self._filter, self._found)
            if not self.replay or self.over:
                self._log_incidents()
            return overview
        newest = self.state.newest_step()
        now = replace(self._frozen, link=link, newest_step=newest.step if newest else None, end=self.state.end)
        lanes = self._builder.lanes(self._selected, self.state, self._filter) if self._selected else None
        return paused_overview(self._frozen, now, lanes)

    def _with_whole(self, overview: Overview, whole: Diagnosed) -> Overview:
        """Returns the overview with the incidents of the whole recording, or how far their search has come."""
        slowest, facts = overview.slowest, overview.facts
        if facts is not None:
            facts = of_whole(facts, whole, overview.newest_step, self.state)
        found = whole if whole.whole else replace(overview.diagnosed, progress=whole.progress)
        return replace(overview, diagnosed=replace(found, slowest=slowest, unit=self.state.unit), facts=facts)

    @property
    def steps(self) -> Sequence[StepAcrossRanks]:
        """The steps kept, oldest first; during a pause those kept when it began."""
        return self._frozen_steps if self._frozen is not None else list(self.state.steps.values())

    @property
    def step_shown(self) -> StepAcrossRanks | None:
        """The selected step, or else the newest; None if there is none, or there was none when a pause began."""
        live = self._selected is None and self._frozen is None
        return step_to_show(self.state, self.overview.verdict.incident) if live else self._selected

    @property
    def explanations(self) -> Sequence[Explanation]:
        """Why ranks were late, as far as somebody has asked, oldest first; of a recording, all that it holds."""
        return self.state.explanations.all() if self.whole is None else self.whole.explanations

    def ranks_of(self, step: StepAcrossRanks) -> list[int]:
        """Returns the ranks of a step that the filter selects."""
        return filtered(self.state, step.members, self._filter)

    def followed_rank(self) -> int | None:
        """Returns the slowest rank, if views are to keep it in sight."""
        slowest = self.overview.slowest
        return slowest.ranks[0] if self.follow_slowest and slowest is not None else None

    def rank_in_sight(self, ranks: Sequence[int]) -> int | None:
        """Returns of these ranks the followed one, the selected one, the first that the verdict names, or the first."""
        wanted = (self.followed_rank(), self.rank, *self.overview.verdict.ranks[:1], *ranks[:1])
        return next((rank for rank in wanted if rank in ranks), None)

    # -- what the user chooses -------------------------------------------------------------------------------

    @property
    def filter(self) -> str:
        """Which ranks are shown (see `ddpwatch.tui.models.rank_filter`)."""
        return self._filter

    @filter.setter
    def filter(self, text: str) -> None:
        self._filter = text
        if self._frozen is not None:
            self._freeze()

    def pause(self, paused: bool) -> None:
        """Freezes the views as they are, or lets them follow the run again."""
        if paused and not self.paused:
            self._freeze()
            self._selected = step_to_show(self.state, self.overview.verdict.incident)
        elif not paused:
            self._frozen = self._selected = None
            self._frozen_steps = []
        self.paused = paused

    def _freeze(self) -> None:
        built = self._builder.build(self.state, self.overview.link, self._filter, self._found)
        self._frozen = replace(built, ranks=tuple(built.ranks))
        self._frozen_steps = list(self.state.steps.values())

    def select_neighbour(self, by: int) -> bool:
        """Selects the step that many after (before) the selected one. Returns whether that is another step."""
        steps = list(self.state.steps.values())
        if not steps or self._selected is None:
            return False
        before, index = self._selected, sum(step.step < self._selected.step for step in steps)
        self._selected = steps[min(max(index + by, 0), len(steps) - 1)]
        return self._selected is not before

    def select(self, number: int) -> None:
        """Selects the step of that number, or the nearest kept."""
        steps = self.state.steps.values()
        self._selected = min(steps, key=lambda step: abs(step.step - number), default=self._selected)

    def select_oldest(self) -> None:
        """Selects the oldest step kept."""
        self._selected = next(iter(self.state.steps.values()), None)

    def slowest_step(self) -> int | None:
        """Returns the number of the slowest step kept that belongs in statistics."""
        steps = [step for step in self.state.steps.values() if step.counted]
        return max(steps, key=lambda step: step.longest_ns).step if steps else None

    def next_finding(self, by: int) -> int | None:
        """Returns the next (or previous) step that stands out: an incident starts there, or it was slow or aborted."""
        here = self.step_shown.step if self.step_shown is not None else -1
        found = [step for step in self._steps_that_stand_out() if (step > here if by > 0 else step < here)]
        return (min(found) if by > 0 else max(found)) if found else None

    def _steps_that_stand_out(self) -> set[int]:
        steps, median_ns = self.state.steps, self.overview.summary.step_p50_ns
        slow = {step.step for step in steps.values() if is_slow(step, median_ns)}
        odd = {line.step for line in self.log.lines if line.kind == "step"}
        odd |= {incident.since_step for incident in self.overview.diagnosed.incidents}
        return slow | {step for step in odd if step is not None and step in steps}

    def next_place(self, by: int, now_ns: int) -> Place | None:
        """Returns the next (or previous) place of a recording that stands out, whether or not its step is kept.

        ``now_ns`` is the position (receive time).
        """
        here = self.step_shown.step if self.step_shown is not None else -1
        found = [] if self.whole is None else self.whole.places()
        beyond = Place.is_after if by > 0 else Place.is_before
        return next((place for place in found[::by] if beyond(place, here, now_ns)), None)

    @property
    def newest_shown_ns(self) -> int:
        """The receive time up to which the views show the run; 0 where an older step was chosen than the newest."""
        newest = step_to_show(self.state)
        return 0 if self.paused and self._selected is not newest else self.state.now_ns
