"""The sixth view: the run beside a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.analysis.compare import setup_of
from ddpwatch.tui.models.compare import Baseline, CompareModel, LiveSeries, recordings_in, setups
from ddpwatch.tui.models.overview import Link
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.compare import paint_compare
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView

COMPARE_EVERY_NS = 2_000_000_000


class CompareView(RunView):
    """Figures of the run and of the baseline side by side."""

    NAME = "Compare"
    DEFINITIONS = """\
  b         asks for a recording to compare with (or use --baseline
            FILE): its newest 500 steps, and the newest 200 of this run
  change    between the means, with its 99 % confidence interval, as in
            ddpwatch compare
  ▲ ▼       more, less: beyond chance and by more than 1 % of a step
            (overlap: 2 points); the colour says whether that is good"""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("b", "app.baseline", "baseline")]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.baseline: Baseline | None = None
        self._directory = Path().absolute()
        self._recordings = recordings_in(self._directory)
        self.forget()

    def forget(self) -> None:
        self.live = LiveSeries()
        self._state = self.session.state
        self._complete = True
        self._requested_step = -1
        self._requested_ns = 0
        self._version_shown = -1

    def compare_with(self, path: Path) -> None:
        """Starts to read another baseline."""
        self.stop()
        self.baseline = Baseline(path)
        self._requested_step, self._version_shown = -1, -1
        self.baseline.start()

    def stop(self) -> None:
        """Stops the baseline's thread."""
        if self.baseline is not None:
            self.baseline.stop()

    @property
    def pending(self) -> bool:
        """See `PaintedView.pending`. The baseline is read, and compared, in the background."""
        if self.baseline is None:
            return False
        return self.baseline.version != self._version_shown or self.baseline.busy or not self._complete

    def body(self, width: int, height: int) -> list[Row]:
        return paint_compare(self._model(), width, height)

    def _model(self) -> CompareModel:
        baseline = self.baseline
        if baseline is None:
            return CompareModel(directory=str(self._directory), offered=self._offered())
        self._version_shown = baseline.version
        self._update(baseline)
        return CompareModel(
            name=baseline.name,
            failure=baseline.failure,
            reading=None if baseline.ready else baseline.steps,
            steps=len(self.live.series.step),
            result=baseline.result,
            setups=setups(baseline.hello, self.session.overview.hello),
        )

    def _offered(self) -> list[str]:
        """Returns the recordings here but for the run's own."""
        status = self.session.state.status
        own = self._directory / status.recording if status is not None else None
        return [name for name in self._recordings if self._directory / name != own]

    def _update(self, baseline: Baseline) -> None:
        """Adds the run's new steps and requests a comparison: every two seconds, or at once if the run is at rest."""
        if self._state is not self.session.state:
            self.forget()
        state = self.session.state
        self._complete = self.live.update(self.session.steps, len(state.ranks))
        self.live.series.setup = setup_of(self.session.overview.hello)
        if not baseline.ready or baseline.busy or not self._complete or self.live.newest == self._requested_step:
            return
        at_rest = self.session.paused or self.session.overview.link.link is Link.ENDED
        if at_rest or not 0 <= state.now_ns - self._requested_ns < COMPARE_EVERY_NS:
            self._requested_step, self._requested_ns = self.live.newest, state.now_ns
            baseline.request(self.live.series)
