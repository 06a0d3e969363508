"""What a rank's heartbeat says: where it is, what it does besides, and what it has issued. For the sender thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ddpwatch.probe.activity import NOTHING, Doing
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.wire.messages import NO_LONGER_WATCHED, Beat, Trained

EVAL_PAUSE_NS = 30_000_000_000  # between two forwards of a validation, if the model stays in training mode


class Watched(Protocol):
    """A module, as the heartbeat sees it (`ddpwatch.probe.ddp.DdpProbe`, `ddpwatch.probe.fsdp.FsdpProbe`)."""

    @property
    def in_eval(self) -> bool:
        """Whether its ``eval()`` was called last, not its ``train()``."""

    def issued_in(self) -> list[tuple[int, int]]:
        """Returns its process groups, and how many collectives each has issued; without those that do not count."""


class Heartbeat:
    """Reads a rank's position without a lock: the training thread may go on meanwhile.

    Args:
        rank: Put into the heartbeats.
        recorder: Read for the phase.
        watched: The modules.
        doing: What the rank waits for or does outside its steps.
        trained: What it has counted.
        memory: What it uses of a GPU's memory.

    Attributes:
        doing: As given.
        last_hook: The newest parameter with a gradient, as far as steps that were sent say.
    """

    def __init__(
        self,
        rank: int,
        recorder: StepRecorder,
        watched: Callable[[], Iterable[Watched]] = tuple,
        doing: Callable[[], Doing] = lambda: NOTHING,
        trained: Callable[[], Trained | None] = lambda: None,
        memory: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.last_hook: int | None = None
        self._rank = rank
        self._recorder = recorder
        self._watched = watched
        self.doing = doing
        self._trained = trained
        self._memory = memory

    def beat(self, now: int, dropped: int) -> Beat:
        """Returns the heartbeat of now."""
        recorder, watched = self._recorder, self._modules()
        issued = _issued_in(watched)
        activity, since_ns = self._activity(watched, now)
        stopped = activity == NO_LONGER_WATCHED  # then the recorder stands still, and the training does not
        record = None if stopped else recorder.current
        buckets = [] if record is None or record.untimed else list(record.buckets)
        return Beat(
            rank=self._rank,
            at_ns=now,
            step=recorder.step,
            phase="" if stopped else recorder.phase,
            since_ns=recorder.since,
            last_hook=self.last_hook if recorder.last_hook is None else recorder.last_hook,
            in_flight=[bucket.index for bucket in buckets if bucket.done is None],
            issued=sum(count for _, count in issued) if issued else None,
            issued_in=issued,
            activity=activity,
            activity_since_ns=since_ns,
            dropped=dropped,
            trained=self._trained(),
            **self._memory(),
        )

    def _modules(self) -> list[Watched]:
        try:
            return list(self._watched())
        except RuntimeError:  # the training thread adds a module right now
            return []

    def _activity(self, watched: list[Watched], now: int) -> Doing:
        doing = self.doing()
        if doing[0]:
            return doing
        if (since_ns := self._validating_since(watched, now)) is not None:
            return "validation", since_ns
        graph_ns = None if self._recorder.gpu is None else self._recorder.gpu.captured_ns
        return NOTHING if graph_ns is None else ("graph", graph_ns)

    def _validating_since(self, watched: list[Watched], now: int) -> int | None:
        """Returns since when there are forwards without gradients, or the model is in eval mode, between two steps."""
        recorder, validation = self._recorder, self._recorder.validation
        if recorder.phase != "input":
            return None
        in_eval = any(module.in_eval for module in watched)
        if validation is None:
            return recorder.since if in_eval else None
        started, ended = validation
        return int(started) if in_eval or now - ended < EVAL_PAUSE_NS else None


def _issued_in(watched: list[Watched]) -> list[tuple[int, int]]:
    try:
        counts = [pair for module in watched for pair in module.issued_in()]
    except RuntimeError:  # a group is gone
        return []
    return sorted(dict(counts).items())
