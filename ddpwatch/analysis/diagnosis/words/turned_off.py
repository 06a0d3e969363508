"""What ddpwatch itself has stopped seeing after an error of its own: a feature on some ranks, or all of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddpwatch.analysis.diagnosis.words.wording import ranks_named
from ddpwatch.wire.messages import WATCHING, Mark, Message

KEEP_FEATURES = 64


@dataclass(frozen=True, slots=True)
class Off:
    """A feature that went off.

    Attributes:
        feature: Which; `WATCHING` for all of them.
        ranks: On which ranks, ascending.
        step: In the earliest step of these ranks' own counts; None if unknown.
        reason: Why, on the first of these ranks.
    """

    feature: str
    ranks: tuple[int, ...]
    step: int | None
    reason: str

    @property
    def message(self) -> str:
        """One sentence about it."""
        who, since = ranks_named(self.ranks), "" if self.step is None else f" from step {self.step} on"
        if self.feature == WATCHING:
            return f"{who} {'is' if len(self.ranks) == 1 else 'are'} not watched{since}: {self.reason}"
        if self.feature == "collectives":  # "no collectives" would say that there are none
            return f"collectives of {who} are not seen{since}: {self.reason}"
        return f"no {self.feature} of {who}{since}: {self.reason}"

    @property
    def label(self) -> str:
        """The same in a few words."""
        if self.feature == WATCHING:
            return f"{ranks_named(self.ranks)} not watched"
        return "collectives not seen" if self.feature == "collectives" else f"no {self.feature}"


class TurnedOff:
    """Collects what went off, from marks."""

    def __init__(self) -> None:
        self._marks: dict[str, dict[int, Mark]] = {}

    def apply_message(self, message: Message) -> None:
        """Takes any message."""
        if not isinstance(message, Mark) or not message.off:
            return
        if message.off in self._marks or len(self._marks) < KEEP_FEATURES:
            self._marks.setdefault(message.off, {}).setdefault(message.rank, message)

    def has(self, feature: str) -> bool:
        """Returns whether a feature is off on some rank, or all watching."""
        return feature in self._marks or WATCHING in self._marks

    def found(self) -> list[Off]:
        """Returns all that is off; first what is off entirely."""
        features = sorted(self._marks, key=lambda feature: (feature != WATCHING, feature))
        return [_off(feature, self._marks[feature]) for feature in features]


def _off(feature: str, marks: Mapping[int, Mark]) -> Off:
    ranks = tuple(sorted(marks))
    steps = [mark.step for mark in marks.values() if mark.step is not None]
    return Off(feature, ranks, min(steps, default=None), marks[ranks[0]].name.partition(": ")[2])
