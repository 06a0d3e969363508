"""The sixth view: the run beside a recording of another."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.tui.models.compare import Baseline, LiveSeries, setups
from ddpwatch.tui.models.overview import Link
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.compare import Comparison, paint_compare
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView

EVERY_NS = 2_000_000_000


class CompareView(RunView):
    """Figures of the run and of a recording side by side."""

    NAME = "Compare"
    KEYS = (("b", "baseline"),)
    DEFINITIONS = """\
  b         asks for a recording to compare with (--baseline FILE at the
            start); its newest 500 steps against this run's newest 200
  change    between medians of blocks of steps, means over the ranks; with
            the interval in which it lies with 99 % confidence, as in
            ddpwatch compare
  ▲ ▼       more, less, beyond chance and by more than 1 % of a step
            (overlap: 2 points); in colour whether that is good or bad"""
    BINDINGS: ClassVar[list[BindingType]] = [Binding("b", "app.baseline", "a recording to compare with")]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.baseline: Baseline | None = None
        self.forget()

    def forget(self) -> None:
        """See `RunView.forget`."""
        self.live = LiveSeries()
        self._of = self.session.state
        self._complete = True
        self._handed = -1
        self._handed_ns = 0
        self._seen = -1

    def compare_with(self, path: Path) -> None:
        """Has another baseline read."""
        self.stop()
        self.baseline = Baseline(path)
        self._handed, self._seen = -1, -1
        self.baseline.start()

    def stop(self) -> None:
        """Lets the baseline go."""
        if self.baseline is not None:
            self.baseline.stop()

    @property
    def pending(self) -> bool:
        """See `PaintedView.pending`: the baseline is read, and compared, in the background."""
        if self.baseline is None:
            return False
        return self.baseline.version != self._seen or self.baseline.busy or not self._complete

    def body(self, width: int, height: int) -> list[Row]:
        """See `RunView.body`."""
        return paint_compare(self._model(), width, height)

    def _model(self) -> Comparison:
        baseline = self.baseline
        if baseline is None:
            return Comparison()
        self._seen = baseline.version
        self._take(baseline)
        return Comparison(
            name=baseline.name,
            failure=baseline.failure,
            reading=None if baseline.ready else baseline.steps,
            steps=len(self.live.series.step),
            compared=baseline.compared,
            setups=setups(baseline.hello, self.session.overview.hello),
        )

    def _take(self, baseline: Baseline) -> None:
        """Takes what the run has done meanwhile, and has it compared every two seconds, or at once where it rests."""
        if self._of is not self.session.state:
            self.forget()
        state = self.session.state
        self._complete = self.live.update(self.session.steps, len(state.ranks))
        if not baseline.ready or baseline.busy or not self._complete or self.live.newest == self._handed:
            return
        resting = self.session.paused or self.session.overview.link.link is Link.ENDED
        if resting or not 0 <= state.now_ns - self._handed_ns < EVERY_NS:
            self._handed, self._handed_ns = self.live.newest, state.now_ns
            baseline.hand(self.live.series)
