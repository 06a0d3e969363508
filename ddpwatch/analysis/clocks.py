"""Puts clocks of several hosts onto one time line, by what a collective cannot do: end before its last rank began it.

For two clocks a and b, every bucket that both reduced together bounds their difference from both sides: rank a's
``done`` is not before rank b's ``launch``, and the other way round. Many buckets leave a narrow bracket; its middle is
wrong by at most half its width, which is about the shortest transfer seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ddpwatch.messages import Hello, Step

Clock = tuple[str, str]


def clock_of(hello: Hello) -> Clock:
    """What names the clock that a rank stamps with: the boot of its host, and the time namespace."""
    return hello.boot_id or hello.host, hello.time_ns


@dataclass
class _Bracket:
    """Bounds of (reference - other) in ns."""

    low: int | None = None
    high: int | None = None

    def at_least(self, value: int) -> None:
        self.low = value if self.low is None else max(self.low, value)

    def at_most(self, value: int) -> None:
        self.high = value if self.high is None else min(self.high, value)


@dataclass
class ClockAligner:
    """Feed it steps; take offsets.

    Attributes:
        clocks: The clock of every rank.
    """

    clocks: dict[int, Clock] = field(default_factory=dict)
    _brackets: dict[Clock, _Bracket] = field(default_factory=dict)
    _received: dict[Clock, int] = field(default_factory=dict)

    def meet(self, hello: Hello) -> None:
        """Takes a rank's introduction."""
        self.clocks[hello.rank] = clock_of(hello)

    @property
    def needed(self) -> bool:
        """Whether there is more than one clock."""
        return len(set(self.clocks.values())) > 1

    def hear(self, step: Step, received_ns: int) -> None:
        """Notes when a frame came in: a coarse guess, for ranks that share no collective with the reference."""
        clock = self.clocks.get(step.rank)
        if clock is not None:
            delay = received_ns - step.start_ns - step.duration_ns
            self._received[clock] = min(delay, self._received.get(clock, delay))

    def compare(self, steps: Mapping[int, Step]) -> None:
        """Takes one step of several ranks."""
        if not self.needed or min(self.clocks) not in steps:
            return
        own = _launched(steps[min(self.clocks)])
        for rank, step in steps.items():
            clock = self.clocks.get(rank)
            if clock is not None and clock != self._reference:
                self._bound(self._brackets.setdefault(clock, _Bracket()), own, _launched(step))

    def offsets(self) -> dict[int, int]:
        """What to add to a rank's stamps (ns), so that all stand on the clock of the lowest rank."""
        return {rank: self._offset(clock) for rank, clock in self.clocks.items()}

    @property
    def _reference(self) -> Clock:
        return self.clocks[min(self.clocks)]

    @staticmethod
    def _bound(bracket: _Bracket, own: dict[object, tuple[int, int]], other: dict[object, tuple[int, int]]) -> None:
        for key in own.keys() & other.keys():
            (launch, done), (other_launch, other_done) = own[key], other[key]
            bracket.at_least(launch - other_done)
            bracket.at_most(done - other_launch)

    def _offset(self, clock: Clock) -> int:
        if clock == self._reference:
            return 0
        bracket = self._brackets.get(clock)
        if bracket is not None and bracket.low is not None and bracket.high is not None:
            return (bracket.low + bracket.high) // 2
        return self._received.get(clock, 0) - self._received.get(self._reference, 0)


def _launched(step: Step) -> dict[object, tuple[int, int]]:
    """Launch and done of every bucket, by module, index and which backward of the step."""
    seen: dict[tuple[int, int], int] = {}
    found: dict[object, tuple[int, int]] = {}
    rows: Iterable[tuple[int, int, int, int | None]] = zip(
        step.bucket_module, step.bucket_index, step.bucket_launch, step.bucket_done, strict=True
    )
    for module, index, launch, done in rows:
        turn = seen[module, index] = seen.get((module, index), -1) + 1
        if done is not None:
            found[module, index, turn] = (step.start_ns + launch, step.start_ns + done)
    return found
