"""The What if view's model: predictions from the full steps that are kept, made in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.errors import UsageError
from ddpwatch.viewer.state import RunState
from ddpwatch.whatif.answer import Prediction, WhatIf, WhatIfAnswer
from ddpwatch.whatif.recorded import FULL, RecordedBuilder
from ddpwatch.whatif.scenarios import Change
from ddpwatch.wire.messages import Hello, Layout, Message

MOST_RANKS = 256  # with more, an answer would take many seconds
ASKED = FULL._replace(rank_steps=1024)  # full steps in one request
REST_S = 0.002  # after each change, as the screen shares the interpreter
PAUSE_S = 4.0  # at least, after an answer
WORK_SHARE = 0.2  # of the time that the thread may work


class Observed(NamedTuple):
    """What a prediction is made from: a copy, which no other thread changes.

    Attributes:
        hellos: Of all ranks.
        layouts: As if the lowest rank had sent them, oldest first.
        steps: The newest full steps of all ranks, and the newest step, oldest first.
    """

    hellos: Sequence[Hello]
    layouts: Sequence[Layout]
    steps: Sequence[StepAcrossRanks]


def observed_in(state: RunState, steps: Iterable[StepAcrossRanks]) -> Observed:
    """Copies from the steps (oldest first) as many as one request may have."""
    hellos = [rank.hello for rank in state.ranks.values() if rank.hello is not None]
    lowest = min((hello.rank for hello in hellos), default=0)
    complete = [across for across in steps if len(across) >= max(len(state.ranks), 1)]
    full = [across for across in complete if across.full]
    starting = [across for across in complete[:1] if not across.counted]  # the warm-up, which shows the order
    chosen = [*starting, *full[-ASKED.of(len(state.ranks)) :]] if full else complete[-1:]
    if len(state.ranks) > MOST_RANKS:
        chosen = []
    layouts = sorted(state.layouts.values(), key=lambda layout: layout.epoch)
    return Observed(
        hellos, [replace(layout, rank=lowest) for layout in layouts], [across.detached() for across in chosen]
    )


@dataclass(frozen=True, slots=True)
class Scenario:
    """One prediction. ``kind`` is ``fault`` (that is mended), ``cap``, ``hook``, ``option``, ``other`` or ``bound``."""

    kind: str
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought.

    Attributes:
        measured_ms: The mean step.
        exposed_ms: Of that, what the mean rank waits for buckets, as replayed.
        error: By how much the replay of the recorded setting is off, as a share.
        steps: How many full steps all that rests on.
        scenarios: Faults, caps by size, hooks, their bound, options, then what changes the training.
        refused: Why caps and hooks are missing; empty if they are not.
    """

    measured_ms: float
    exposed_ms: float
    error: float
    steps: int
    scenarios: Sequence[Scenario]
    refused: str

    @property
    def best(self) -> Scenario | None:
        """The change of code to the same training that gains most, at the low end of the gain's interval, above 0."""
        return _surest(self.of_code)

    @property
    def larger(self) -> Scenario | None:
        """The fault without which most is gained, if that is more: what is to be looked at first."""
        most = _surest([scenario for scenario in self.scenarios if scenario.kind == "fault"])
        least = 0.0 if self.best is None else self.best.prediction.gain_low_ms
        return most if most is not None and most.prediction.gain_low_ms > least else None

    @property
    def of_code(self) -> Sequence[Scenario]:
        """The changes of code to the same training."""
        return [scenario for scenario in self.scenarios if scenario.kind in _OF_CODE]

    def index_of(self, change: str | None) -> int:
        """Returns the place of a change among the scenarios; that of the best one, or the first, if it is not there."""
        names = [scenario.prediction.change for scenario in self.scenarios]
        if change in names:
            return names.index(change)
        return 0 if self.best is None else self.scenarios.index(self.best)


def _surest(scenarios: Iterable[Scenario]) -> Scenario | None:
    """Returns the one that gains most at the low end of the interval, of those that are sure to gain."""
    found = (scenario for scenario in scenarios if scenario.prediction.sure)
    return max(found, key=lambda scenario: scenario.prediction.gain_low_ms, default=None)


_OF_CODE = ("cap", "hook", "option")
_ORDER = ("fault", "cap", "hook", "bound", "option", "other")


@dataclass(frozen=True, slots=True)
class WhatIfModel:
    """What the view draws: the newest answer, or why there is none (empty while it is under way)."""

    answer: Answer | None = None
    failure: str = ""


class Predictor:
    """Answers requests in a thread, one at a time.

    Args:
        clock: A monotonic clock in seconds.

    Attributes:
        version: Grows with every change of ``model``.
        busy: Whether a request is under way.
        model: The newest answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.version = 0
        self.busy = False
        self.model = WhatIfModel()
        self._clock = clock
        self._not_before_s = clock()
        self._requests: queue.SimpleQueue[Observed | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpwatch-whatif", daemon=True)

    @property
    def rested(self) -> bool:
        """Whether it may be asked again."""
        return not self.busy and self._clock() >= self._not_before_s

    def request(self, observed: Observed) -> None:
        """Asks what these steps predict. Only while not busy."""
        if not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()
        self.busy = True
        self._requests.put(observed)

    def stop(self) -> None:
        """Asks the thread to end."""
        self._stopped.set()
        self._requests.put(None)

    def _run(self) -> None:
        while (observed := self._requests.get()) is not None and not self._stopped.is_set():
            started = self._clock()
            try:
                self.model = WhatIfModel(self._answer(observed))
            except UsageError as error:
                self.model = WhatIfModel(failure=error.message + (f": {error.hint}" if error.hint else ""))
            except Exception as error:  # frames may hold anything, and nothing else reports what ends a thread
                self.model = WhatIfModel(failure=f"{type(error).__name__}: {error}")
            now = self._clock()
            self._not_before_s = now + max(PAUSE_S, (now - started) / WORK_SHARE)
            self.version += 1
            self.busy = False

    def _answer(self, observed: Observed) -> Answer:
        if len(observed.hellos) > MOST_RANKS:
            raise UsageError(
                f"not shown for more than {MOST_RANKS} ranks", "ddpwatch whatif RUN takes its time for them"
            )
        builder = RecordedBuilder()
        messages: list[Message] = [*observed.hellos, *observed.layouts]
        for message in messages:
            builder.apply_message(message)
        for across in observed.steps:
            across.unpack()
            builder.add_step(across)
        asked = WhatIf(builder.build())
        asked.note_what_is_missing()
        found = []
        for change in asked.default_changes():
            found += [Scenario(_kind(change), prediction) for prediction in asked.ask([change])]
            if self._stopped.wait(REST_S):
                break
        return _answer_of(asked.answer([]), found)


def _kind(change: Change) -> str:
    if change.perfect:
        return "bound"
    if change.no_input or change.without_rank is not None:
        return "fault"
    if change.moves_buckets and not change.static_graph:
        return "cap"
    if change.hook:
        return "hook"
    return "option" if change.bucket_view or change.static_graph else "other"


def _answer_of(asked: WhatIfAnswer, found: Sequence[Scenario]) -> Answer:
    replayed = asked.replayed
    return Answer(
        measured_ms=replayed.measured_ms,
        exposed_ms=replayed.exposed_ms,
        error=replayed.error,
        steps=asked.steps,
        scenarios=sorted(found, key=_place),
        refused="; ".join(f"{refused.change}: {refused.why}" for refused in asked.refused),
    )


def _place(scenario: Scenario) -> tuple[int, bool, float]:
    """Sorts caps from the smallest on, those with another first bucket last; all else as it was asked."""
    prediction = scenario.prediction
    return _ORDER.index(scenario.kind), "first" in prediction.change, prediction.cap_mib or 0.0
