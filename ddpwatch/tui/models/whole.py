"""The diagnosis of a whole recording, made in the background while it is replayed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.explain.explanation import Explanation
from ddpwatch.analysis.run import Run
from ddpwatch.tui.models.incidents import Diagnosed
from ddpwatch.tui.models.steps import is_slow
from ddpwatch.wire.transport import Frame

WORK_S, REST_S = 0.004, 0.002  # the screen shares the interpreter with this thread
SHOWS_NS = 1_000_000_000  # after it was found: by then, a look at all ranks finds it wherever reading started


class Place(NamedTuple):
    """A step worth a look; ``at_ns`` (receive time) is when, if the recording ends before that step."""

    step: int
    at_ns: int | None = None

    def is_after(self, step: int, now_ns: int) -> bool:
        """Returns whether it comes after a position, where that step is shown."""
        return self.step > step if self.at_ns is None else self.at_ns > now_ns

    def is_before(self, step: int, now_ns: int) -> bool:
        """Returns whether it comes before that position."""
        return self.step < step if self.at_ns is None else self.at_ns < now_ns


class WholeRecording:
    """Reads a recording in a thread, once, and diagnoses it as a report does.

    Args:
        frames: Gives all frames, oldest first.
        span_ns: Receive time of the first and the last.

    Attributes:
        result: The diagnosis, once it is ready; until then, how far it has come.
        newest_step: The newest that any rank has ended.
        unusual: Steps that were aborted or slow.
        explanations: Those that the recording holds, as far as it is read.
    """

    def __init__(self, frames: Callable[[], Iterable[Frame]], span_ns: Callable[[], tuple[int, int]]) -> None:
        self.result = Diagnosed(progress=0.0)
        self.unusual: deque[int] = deque(maxlen=10_000)
        self.explanations: Sequence[Explanation] = ()
        self._frames, self._span_ns = frames, span_ns
        self.newest_step = -1
        self._last_ns = 0
        self._durations: deque[int] = deque(maxlen=64)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name="ddpwatch-diagnosis", daemon=True)

    def start(self) -> None:
        """Starts to read."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end."""
        self._stopped.set()

    @property
    def ready(self) -> bool:
        """Whether the diagnosis is complete."""
        return self.result.whole

    def places(self) -> list[Place]:
        """Returns the places worth a look, in order: where an incident starts, and unusual steps."""
        found = {place for incident in self.result.incidents if (place := self.place_of(incident)) is not None}
        return sorted(found.union(map(Place, self.unusual)), key=lambda place: (place.step, place.at_ns or 0))

    def place_of(self, incident: Incident) -> Place | None:
        """Returns where an incident starts; None if that is in no step."""
        if incident.since_step is None:
            return None
        if incident.found_ns is None or incident.since_step <= self.newest_step:
            return Place(incident.since_step)
        return Place(incident.since_step, min(incident.found_ns + SHOWS_NS, self._last_ns))

    def _guarded(self) -> None:
        try:
            self._read()
        except Exception:  # a file may hold anything; the replay itself reports what is wrong with it
            self.result = Diagnosed()

    def _read(self) -> None:
        run = Run()
        run.diagnosis.places.read_from("")
        first_ns, last_ns = self._span_ns()
        self._last_ns = last_ns
        rest_at = time.monotonic() + WORK_S
        for message, envelope in self._frames():
            for across in run.apply_message(message, envelope.received_ns, envelope.frame):
                self._note_unusual(across)
            if time.monotonic() >= rest_at:
                progress = (envelope.received_ns - first_ns) / max(last_ns - first_ns, 1)
                self.result = Diagnosed(progress=round(progress, 2))
                self.explanations = run.explanations.all()
                if self._stopped.wait(REST_S):
                    return
                rest_at = time.monotonic() + WORK_S
        for across in run.rest():
            self._note_unusual(across)
        self.explanations = run.explanations.all()
        self.result = Diagnosed(tuple(run.diagnosis.incidents()), run.diagnosis.lost(), whole=True)

    def _note_unusual(self, across: StepAcrossRanks) -> None:
        self.newest_step = max(self.newest_step, across.step)
        usual = median(self._durations) if self._durations else None
        if is_slow(across, usual) or any(step.status == "aborted" for step in across.ranks.values()):
            self.unusual.append(across.step)
        if across.counted:
            self._durations.append(across.longest_ns)
