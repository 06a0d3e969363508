"""What the dashboard asks a run to explain, and the explanation that it shows."""

from __future__ import annotations

from collections.abc import Callable

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.kinds import KINDS
from ddpwatch.analysis.diagnosis.words.incident_news import message_text
from ddpwatch.analysis.diagnosis.words.next_steps import on_screen
from ddpwatch.analysis.explain.explanation import Explanation, explain_hang
from ddpwatch.analysis.explain.sentences import EARLIER
from ddpwatch.common.text import clean
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.report.explained import tables_below
from ddpwatch.sampling.stack_order import StackOrder
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.text import wrap
from ddpwatch.viewer.explain import NOBODY_LATE, StackRequest, do_samples_say_why, fatal_to, hang_of, request_of

CHOOSE = "choose one in view 4 (ranks), then press x"
MOST_LINES = 6  # of the sentence
NO_MORE = "there is nothing to explain any more: Esc closes this, and x asks again"


class Explaining:
    """Asks one thing at a time; among the explanations, the newest is shown unless another is chosen.

    Args:
        session: The run.
        order_stacks: Passes an order on to the run; None withdraws it.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self, session: ViewerSession, order_stacks: Callable[[StackOrder | None], object], clock: Callable[[], float]
    ) -> None:
        self._session = session
        self._order_stacks = order_stacks
        self._clock = clock
        self._request: StackRequest | None = None
        self._asked_s = 0.0
        self._back = 0  # from the newest
        self._failure = ""

    def ask(self, rank: int | None, profiler: bool = False, incident: Incident | None = None) -> None:
        """Asks a live run why a rank is late; None: the late one. Of others, there is what was asked then.

        It samples stacks, or profiles. In a hang, there is nothing to ask: ranks have said where they are. If nothing
        can be asked, and nothing was asked before, what is under way says why. Of an incident that samples of time
        say nothing of, as growing memory, or one of all ranks, it says what helps.
        """
        self.withdraw()
        self._back = 0
        if hang_of(self._session.overview.diagnosed.incidents) is not None:
            return
        if incident is None and not self._is_live:
            incident = fatal_to(self._session.overview.diagnosed.incidents, rank)
        if incident is not None and not do_samples_say_why(incident):
            if self._is_live or not self._found:
                self._failure = _advice(incident)
            return
        try:
            self._request = self._request_of(rank, profiler)
        except UsageError as error:
            if not self._found:
                self._failure = f"{error.message}: {error.hint}"
                if error.message == NOBODY_LATE:
                    self._failure = "; ".join(filter(None, (f"{NOBODY_LATE}: {CHOOSE}", self._worst)))
        else:
            self._asked_s = self._clock()
            self._order_stacks(self._request.order)

    def _request_of(self, rank: int | None, profiler: bool) -> StackRequest:
        if not self._is_live and not any(map(do_samples_say_why, self._session.overview.diagnosed.incidents)):
            raise UsageError("no stacks were sampled", "no rank was late")
        if not self._is_live:
            raise UsageError("no stacks were sampled", EARLIER)
        return request_of(self._session.state, rank, clock=self._clock, profiler=profiler)

    @property
    def _is_live(self) -> bool:
        session = self._session
        return not (session.replay or session.over or session.state.end is not None)

    @property
    def _worst(self) -> str:
        """The next step of the worst incident that lasts; empty without one."""
        lasting = (one for one in self._session.overview.diagnosed.incidents if one.open)
        return next(map(_advice, lasting), "")

    def withdraw(self) -> None:
        """Asks for nothing more."""
        if self._request is not None:
            self._order_stacks(None)
        self._request, self._failure = None, ""

    def choose(self, by: int) -> None:
        """Chooses a newer explanation, or an older one."""
        self._back = min(max(self._back - by, 0), max(len(self._found) - 1, 0))

    @property
    def under_way(self) -> str:
        """The request under way, and for how long it has been; or why there is nothing to show; empty if there is."""
        if self._request is None:
            return self._failure or ("" if self._found else NO_MORE)
        if not self._request.is_over(self._session.state):
            return f"{self._request.text}: {self._clock() - self._asked_s:.0f} s so far"
        request = self._request
        self.withdraw()
        try:
            request.answer(self._session.state)
        except DdpwatchError as error:
            self._failure = f"{error.message}: {error.hint}"
        return self._failure

    def lines(self, width: int) -> tuple[list[str], list[str]]:
        """Returns the explanation chosen: the sentence, and what is below it, fitted to that width."""
        shown = self._found[-1 - min(self._back, len(self._found) - 1)]
        tables = tables_below(shown, width)
        text = f"{shown.text}. Next: {on_screen(shown.next_step)}" if shown.next_step else shown.text
        return wrap(clean(text), max(map(len, tables)), MOST_LINES), ["", *tables]

    @property
    def place(self) -> str:
        """Which of several it is; empty if it is the only one."""
        several = len(self._found)
        return f"← explanation {several - self._back} of {several} →" if several > 1 else ""

    @property
    def _found(self) -> list[Explanation]:
        """What is known, oldest first; a hang that lasts is the newest."""
        hang = hang_of(self._session.overview.diagnosed.incidents)
        return [*self._session.explanations, *([] if hang is None else [explain_hang(hang)])]


def _advice(incident: Incident) -> str:
    following = f". Next: {on_screen(incident.next_step)}" if incident.next_step else ""
    return f"{KINDS[incident.kind].name}: {message_text(incident)}{following}"
