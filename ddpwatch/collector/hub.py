"""What the collector knows and keeps. No socket, no clock, no process: the service feeds it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from ddpwatch.messages import (
    RANK_MESSAGES,
    Beat,
    Bye,
    Device,
    FrameError,
    Hello,
    Layout,
    Mark,
    Message,
    Status,
    Step,
    decode,
    encode,
)  # fmt: skip
from ddpwatch.transport import Envelope

KEEP_STEPS = 512
KEEP_DEVICES = 600
KEEP_MARKS = 1000
KEEP_LAYOUTS = 4
KEEP_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class RankEntry:
    """One rank as the collector sees it."""

    hello: Envelope | None = None
    beat: Envelope | None = None
    last_beat: Beat | None = None
    bye: Envelope | None = None
    pid: int = 0
    boot_id: str = ""
    steps: deque[Envelope] = field(default_factory=lambda: deque(maxlen=KEEP_STEPS))
    layouts: deque[Envelope] = field(default_factory=lambda: deque(maxlen=KEEP_LAYOUTS))


class Hub:
    """Validates, numbers and retains frames; answers what a late viewer needs.

    Attributes:
        refused: Count of refused frames by reason.
        frames, bytes: What was accepted from ranks so far.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, RankEntry] = {}
        self.refused: Counter[str] = Counter()
        self.frames = 0
        self.bytes = 0
        self._seq = 0
        self._kept_bytes = 0
        self._devices: deque[Envelope] = deque(maxlen=KEEP_DEVICES)
        self._marks: deque[Envelope] = deque(maxlen=KEEP_MARKS)
        self._status: Envelope | None = None
        self._end: Envelope | None = None

    def accept(self, parts: list[bytes], now_ns: int) -> tuple[Message, Envelope] | None:
        """Takes what arrived on the ranks' socket; None if it was refused (and counted)."""
        if len(parts) != 1:
            self.refused["multipart"] += 1
            return None
        try:
            message = decode(parts[0])
        except FrameError as error:
            self.refused[error.reason] += 1
            return None
        if not isinstance(message, RANK_MESSAGES) or (isinstance(message, Bye) and message.by != "rank"):
            self.refused["not a rank's to send"] += 1
            return None
        self.frames += 1
        self.bytes += len(parts[0])
        return message, self._keep(message, parts[0], now_ns)

    def tell(self, message: Device | Bye | Status, now_ns: int) -> Envelope:
        """Takes a message of the collector's own."""
        return self._keep(message, encode(message), now_ns)

    def snapshot(self) -> list[Envelope]:
        """Everything retained, oldest first."""
        kept = [*self._devices, *self._marks]
        for entry in self.ranks.values():
            kept += [*entry.layouts, *entry.steps]
            kept += [e for e in (entry.hello, entry.beat, entry.bye) if e is not None]
        kept += [e for e in (self._status, self._end) if e is not None]
        return sorted(kept, key=lambda envelope: envelope.seq)

    @property
    def newest(self) -> int:
        """Sequence number of the newest frame."""
        return self._seq

    def _keep(self, message: Message, frame: bytes, now_ns: int) -> Envelope:
        self._seq += 1
        envelope = Envelope(self._seq, now_ns, frame)
        if isinstance(message, Device):
            self._devices.append(envelope)
        elif isinstance(message, Status):
            self._status = envelope
        elif isinstance(message, Mark):
            self._marks.append(envelope)
        elif isinstance(message, Bye) and message.rank is None:
            self._end = envelope
        elif message.rank is not None:
            self._keep_rank(self.ranks.setdefault(message.rank, RankEntry()), message, envelope)
        return envelope

    def _keep_rank(self, entry: RankEntry, message: Message, envelope: Envelope) -> None:
        if isinstance(message, Step):
            self._keep_step(entry, envelope)
        elif isinstance(message, Beat):
            entry.beat, entry.last_beat = envelope, message
        elif isinstance(message, Layout):
            entry.layouts.append(envelope)
        elif isinstance(message, Hello):
            entry.hello, entry.pid, entry.boot_id = envelope, message.pid, message.boot_id
        elif isinstance(message, Bye):
            entry.bye = envelope

    def _keep_step(self, entry: RankEntry, envelope: Envelope) -> None:
        if len(entry.steps) == KEEP_STEPS:
            self._kept_bytes -= len(entry.steps[0].frame)
        entry.steps.append(envelope)
        self._kept_bytes += len(envelope.frame)
        while self._kept_bytes > KEEP_BYTES and entry.steps:
            self._kept_bytes -= len(entry.steps.popleft().frame)
