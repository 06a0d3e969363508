"""How large a Chrome trace would be, counted before it is written: browsers open no trace of many GB."""

from __future__ import annotations

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.errors import UsageError
from ddpwatch.recording.selection import Selection
from ddpwatch.wire.messages import Step

MOST_BYTES = 1_000_000_000
_STEP, _STRETCH, _HOOK, _COLLECTIVE = 280, 115, 135, 250  # bytes of events
_TOGETHER = 320  # of a collective's wait, transfer and arrow, where several ranks are in it


class TraceSize:
    """Adds up the size of a trace.

    Args:
        most: Bytes that a trace may have.

    Attributes:
        nbytes: Of all steps so far.
        is_too_large: These alone are more than a trace may have.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.nbytes = 0
        self.is_too_large = False
        self._most = most
        self._first: int | None = None
        self._last = 0  # of the steps that fit
        self._ranks: set[int] = set()

    def add_step(self, across: StepAcrossRanks) -> None:
        """Adds a step of all its ranks."""
        collective = _COLLECTIVE + (_TOGETHER if len(across) > 1 else 0)
        self.nbytes += sum(_bytes_of(step, collective) for step in across.ranks.values())
        self._ranks |= across.members
        if self._first is None:
            self._first = across.step
        if self.nbytes > self._most:
            self.is_too_large = True
        else:
            self._last = across.step

    def refusal(self, recorded: tuple[int, int] | None, selection: Selection) -> UsageError:
        """Says how large the trace would be, and what would fit.

        Args:
            recorded: First and last step of the recording; None if they are not known.
            selection: What of it was asked for.
        """
        first = self._first or 0
        stop = first + 1 if recorded is None else recorded[1] + 1
        if selection.stop is not None:
            stop = min(stop, selection.stop)
        fit = max(self._last + 1 - first, 0)
        expected = self.nbytes * max((stop - first) / (fit + 1), 1.0)
        fits = [f"--steps {first}:{first + fit}"] if fit else []
        ranks = sorted(self._ranks)[: int(len(self._ranks) * self._most / expected)]
        if ranks and ranks[-1] - ranks[0] < len(ranks):
            fits.append(f"--ranks {ranks[0]}-{ranks[-1]}")
        return UsageError(
            f"the trace would take some {expected / 1e9:.2g} GB: more than {self._most / 1e9:.2g} GB are not written",
            f"give fewer steps or ranks: {' or '.join(fits)} would fit" if fits else "give fewer steps and ranks",
        )


def _bytes_of(step: Step, collective: int) -> int:
    """Returns the size of one rank's events, roughly."""
    stretches = len(step.spans) + len(step.data or ())
    return _STEP + _STRETCH * stretches + _HOOK * len(step.hook_param) + collective * len(step.comm_launch)
