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
from ddpwatch.whatif.answer import Prediction, WhatIf, WhatIfAnswer, ranked
from ddpwatch.whatif.recorded import FULL, RecordedBuilder
from ddpwatch.whatif.summary import best, gain_text
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
        incident_since: The step since which the verdict's incident lasts; None without one.
    """

    hellos: Sequence[Hello]
    layouts: Sequence[Layout]
    steps: Sequence[StepAcrossRanks]
    incident_since: int | None


def observed_in(state: RunState, steps: Iterable[StepAcrossRanks], incident_since: int | None = None) -> Observed:
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
        hellos,
        [replace(layout, rank=lowest) for layout in layouts],
        [across.detached() for across in chosen],
        incident_since,
    )


@dataclass(frozen=True, slots=True)
class WhatIfModel:
    """What the view draws: the newest answer, or why there is none (empty while it is under way)."""

    answer: WhatIfAnswer | None = None
    failure: str = ""


def no_gain_last(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Returns changes whose gain is 0.00 after all others: they would push these out of sight."""
    none = gain_text(0.0)
    return sorted(predictions, key=lambda found: found.kind != "bound" and gain_text(abs(found.gain_ms)) == none)


def selected_index(answer: WhatIfAnswer, change: str | None) -> int:
    """Returns the row of a change; that of the best one, or the first, if it is in none."""
    names = [found.change for found in answer.scenarios]
    chosen = best(answer.scenarios)
    if change not in names and chosen is not None:
        change = chosen.change
    return names.index(change) if change in names else 0


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

    def _answer(self, observed: Observed) -> WhatIfAnswer:
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
        asked = WhatIf(builder.build(observed.incident_since))
        asked.note_what_is_missing()
        found: list[Prediction] = []
        for change in asked.default_changes():
            found += asked.ask([change])
            if self._stopped.wait(REST_S):
                break
        return asked.answer(no_gain_last(ranked(found)))
