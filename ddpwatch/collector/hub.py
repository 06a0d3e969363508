"""What the collector knows and keeps. No socket, no clock, no process: the service feeds it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from ddpwatch.messages import (
    RANK_MESSAGES,
    Beat,
    Bye,
    Device,
    EndReason,
    FrameError,
    Hello,
    Layout,
    Mark,
    Message,
    Status,
    Step,
    decode,
)  # fmt: skip
from ddpwatch.transport import Envelope, Frame

KEEP_STEPS = 512
KEEP_DEVICES = 64
KEEP_DEVICE_SAMPLES = 600  # per device: ten minutes at one sample a second
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
    last_bye: Bye | None = None
    steps: deque[Envelope] = field(default_factory=lambda: deque(maxlen=KEEP_STEPS))
    layouts: deque[Envelope] = field(default_factory=lambda: deque(maxlen=KEEP_LAYOUTS))


class Hub:
    """Validates, numbers and keeps frames; supplies the snapshot for a viewer that attaches late.

    Attributes:
        ranks: Every rank that has sent a frame.
        refused: Count of refused frames by reason.
        frames, bytes: Accepted from ranks so far.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, RankEntry] = {}
        self.refused: Counter[str] = Counter()
        self.frames = 0
        self.bytes = 0
        self._seq = 0
        self._kept_bytes = 0
        self._devices: dict[tuple[str, str, int], deque[Envelope]] = {}  # the most recently sampled last
        self._marks: deque[Envelope] = deque(maxlen=KEEP_MARKS)
        self._status: Envelope | None = None
        self._end: Envelope | None = None

    def accept(self, parts: list[bytes], now_ns: int) -> Frame | None:
        """Validates and keeps what a rank sent; None if it was refused, which is counted."""
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
        return message, self.keep(message, parts[0], now_ns)

    def keep(self, message: Message, frame: bytes, now_ns: int) -> Envelope:
        """Numbers a frame and keeps it as long as the limits allow."""
        self._seq += 1
        envelope = Envelope(self._seq, now_ns, frame)
        if isinstance(message, Device):
            self._keep_device(message, envelope)
        elif isinstance(message, Status):
            self._status = envelope
        elif isinstance(message, Mark):
            self._marks.append(envelope)
        elif isinstance(message, Bye) and message.rank is None:
            self._end = envelope
        elif message.rank is not None:
            self._keep_rank(self.ranks.setdefault(message.rank, RankEntry()), message, envelope)
        return envelope

    def snapshot(self) -> list[Envelope]:
        """Everything kept, oldest first."""
        kept = [envelope for samples in self._devices.values() for envelope in samples]
        kept += self._marks
        for entry in self.ranks.values():
            kept += [*entry.layouts, *entry.steps]
            kept += [e for e in (entry.hello, entry.beat, entry.bye) if e is not None]
        kept += [e for e in (self._status, self._end) if e is not None]
        return sorted(kept, key=lambda envelope: envelope.seq)

    @property
    def newest(self) -> int:
        """Sequence number of the newest frame."""
        return self._seq

    @property
    def all_ended(self) -> bool:
        """Whether every known rank has ended."""
        return all(entry.last_bye is not None for entry in self.ranks.values())

    def end_reason(self) -> EndReason:
        """Why the run ended: the reason of the first rank that did not finish, since the others follow from it."""
        ends = [entry.last_bye for entry in self.ranks.values() if entry.last_bye is not None]
        if not ends:
            return "lost"
        failures = [bye for bye in ends if bye.reason != "finished"]
        return min(failures, key=lambda bye: bye.at_ns).reason if failures else "finished"

    def _keep_device(self, device: Device, envelope: Envelope) -> None:
        key = (device.host, device.kind, device.index)
        samples = self._devices.pop(key, None) or deque(maxlen=KEEP_DEVICE_SAMPLES)
        samples.append(envelope)
        self._devices[key] = samples
        if len(self._devices) > KEEP_DEVICES:
            del self._devices[next(iter(self._devices))]

    def _keep_rank(self, entry: RankEntry, message: Message, envelope: Envelope) -> None:
        if isinstance(message, Step):
            self._keep_step(entry, envelope)
        elif isinstance(message, Beat):
            entry.beat, entry.last_beat = envelope, message
        elif isinstance(message, Layout):
            entry.layouts.append(envelope)
        elif isinstance(message, Hello):
            entry.hello = envelope
        elif isinstance(message, Bye):
            entry.bye, entry.last_bye = envelope, message

    def _keep_step(self, entry: RankEntry, envelope: Envelope) -> None:
        if len(entry.steps) == KEEP_STEPS:
            self._kept_bytes -= len(entry.steps[0].frame)
        entry.steps.append(envelope)
        self._kept_bytes += len(envelope.frame)
        while self._kept_bytes > KEEP_BYTES and entry.steps:
            self._kept_bytes -= len(entry.steps.popleft().frame)
