"""The eighth view: how long a step would take with other bucket caps and comm hooks."""

from __future__ import annotations

from ddpwatch.tui.models.overview import Link
from ddpwatch.tui.models.whatif import Predictor, WhatIfModel, observed_in, selected_index
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.whatif import paint_whatif
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView
from ddpwatch.whatif.recorded import since_of


class WhatIfView(RunView):
    """Predictions from the full steps that are kept. They are made only while the view is shown."""

    NAME = "What if"
    DEFINITIONS = """\
  measured  the mean of the full steps that are kept, only of those
            since an incident changed their length if they are 5;
            the header's step is of all steps
  gain      measured, less predicted; the verdict's is of the steps
            that the incident struck, and of a slow rank what others
            wait for it until the next rank launches
  interval  holds the gain nine times of ten; the surest gain is on
            top, and where the interval holds 0, figures are dim
  ◀         the change of code that is surest to gain
  ╱         exposed communication, as replayed: ranks wait for it
  ≤         the bound: if communication took no time at all
  A prediction is made at most every few seconds, in the background;
  ddpwatch whatif RUN asks for others (docs/whatif.md)."""

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.predictor = Predictor()
        self.forget()

    def forget(self) -> None:
        self._state = self.session.state
        self._model = WhatIfModel()
        self._asked_step = self._version_shown = -1
        self.selected: str | None = None

    def stop(self) -> None:
        """Stops the thread."""
        self.predictor.stop()

    def position_changed(self) -> None:
        self._asked_step = -1

    @property
    def pending(self) -> bool:
        """See `PaintedView.pending`."""
        return self.predictor.busy or self.predictor.version != self._version_shown

    def body(self, width: int, height: int) -> list[Row]:
        if self._state is not self.session.state:
            self.forget()
        self._take_answer()
        self._ask()
        model = self._model if self.session.steps else WhatIfModel(failure="no step yet")
        return paint_whatif(model, width, height, self.selected)

    def _take_answer(self) -> None:
        """Takes the newest answer."""
        predictor = self.predictor
        if predictor.busy or predictor.version == self._version_shown:
            return
        self._version_shown = predictor.version
        if self._asked_step >= 0:  # or else it is about another run, or another place in a replay
            self._model = predictor.model

    def _ask(self) -> None:
        """Asks when there is a new step: every few seconds, or at once if the run is at rest or nothing is known."""
        steps = self.session.steps
        if not steps or steps[-1].step == self._asked_step or self.predictor.busy:
            return
        at_rest = self.session.paused or self.session.overview.link.link is Link.ENDED
        if at_rest or self._asked_step < 0 or self.predictor.rested:
            self._asked_step = steps[-1].step
            since = since_of(self.session.overview.diagnosed.incidents)
            self.predictor.request(observed_in(self.session.state, steps, since))

    def scroll_ranks(self, by: int) -> None:
        """Selects another change."""
        answer = self._model.answer
        if answer is not None and answer.scenarios:
            index = selected_index(answer, self.selected) + by
            self.selected = answer.scenarios[min(max(index, 0), len(answer.scenarios) - 1)].change
            self.repaint()
