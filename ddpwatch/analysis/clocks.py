"""Puts the clocks of several hosts onto one time line: no collective ends on any rank before its last rank launches it.

For two clocks a and b, every bucket that both reduced bounds their difference from both sides: rank a's ``done`` is not
before rank b's ``launch``, and the other way round. Many buckets leave a narrow bracket. Its middle is off by at most
half its width, which is about the shortest transfer seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ddpwatch.analysis.step import BucketKey, bucket_keys
from ddpwatch.messages import Hello, Step

Clock = tuple[str, str]
_Stamps = dict[BucketKey, tuple[int, int]]  # launch and done per bucket, absolute


def clock_of(hello: Hello) -> Clock:
    """The clock that a rank stamps with, named by the boot of its host and the time namespace."""
    return hello.boot_id or hello.host, hello.time_ns


def same_clock(hellos: Iterable[Hello]) -> bool:
    """Whether all ranks stamp with the same clock: same boot of the same host, same time namespace."""
    return len({clock_of(hello) for hello in hellos}) <= 1


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
    """Takes steps and computes what to add to each rank's stamps.

    Attributes:
        clocks: The clock of every rank.
    """

    clocks: dict[int, Clock] = field(default_factory=dict)
    _brackets: dict[Clock, _Bracket] = field(default_factory=dict)
    _received: dict[Clock, int] = field(default_factory=dict)

    def add_rank(self, hello: Hello) -> None:
        """Notes a rank's clock."""
        self.clocks[hello.rank] = clock_of(hello)

    @property
    def needed(self) -> bool:
        """Whether there is more than one clock."""
        return len(set(self.clocks.values())) > 1

    def note_delay(self, step: Step, received_ns: int) -> None:
        """Notes when a frame arrived: a coarse guess, for ranks that share no collective with the reference."""
        clock = self.clocks.get(step.rank)
        if clock is not None:
            delay = received_ns - step.start_ns - step.duration_ns
            self._received[clock] = min(delay, self._received.get(clock, delay))

    def compare(self, steps: Mapping[int, Step]) -> None:
        """Narrows the brackets by one step, given per rank."""
        if not self.needed or min(self.clocks) not in steps:
            return
        reference = _stamps(steps[min(self.clocks)])
        for rank, step in steps.items():
            clock = self.clocks.get(rank)
            if clock is not None and clock != self._reference:
                self._bound(self._brackets.setdefault(clock, _Bracket()), reference, _stamps(step))

    def offsets(self) -> dict[int, int]:
        """What to add to each rank's stamps (ns), to put them on the clock of the lowest rank."""
        return {rank: self._offset(clock) for rank, clock in self.clocks.items()}

    @property
    def _reference(self) -> Clock:
        return self.clocks[min(self.clocks)]

    @staticmethod
    def _bound(bracket: _Bracket, reference: _Stamps, other: _Stamps) -> None:
        for key in reference.keys() & other.keys():
            (launch, done), (other_launch, other_done) = reference[key], other[key]
            bracket.at_least(launch - other_done)
            bracket.at_most(done - other_launch)

    def _offset(self, clock: Clock) -> int:
        if clock == self._reference:
            return 0
        bracket = self._brackets.get(clock)
        if bracket is not None and bracket.low is not None and bracket.high is not None:
            return (bracket.low + bracket.high) // 2
        return self._received.get(clock, 0) - self._received.get(self._reference, 0)


def _stamps(step: Step) -> _Stamps:
    rows = zip(bucket_keys(step), step.comm_launch, step.comm_done, strict=True)
    return {key: (step.start_ns + launch, step.start_ns + done) for key, launch, done in rows if done is not None}
