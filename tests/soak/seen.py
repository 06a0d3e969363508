"""A viewer of a job on several hosts, which notes what comes and what does not."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import TracebackType

from ddpwatch.viewer.live_source import LiveSource
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Message, Node, Status, Step
from ddpwatch.wire.transport import Envelope
from tests.support.network import SKEWS_S

READ_S = 0.1


class Viewer(threading.Thread):
    """Reads the run while the context lasts. One rank is on each host.

    Args:
        endpoint: Of the run.

    Attributes:
        seen: How often each step came, by rank and number.
        newest_s: Per rank, when the newest step that came had ended, on this machine's clock.
        arrived_s: When each frame came, by the root's receive time of it.
        dropped: Frames that each agent had no room for.
        status: The root's newest.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self.seen: Counter[tuple[int, int]] = Counter()
        self.newest_s: dict[int, float] = {}
        self.arrived_s: dict[int, float] = {}
        self.dropped: dict[int, int] = {}
        self.status: Status | None = None
        self._endpoint = endpoint
        self._state = RunState()
        self._over = threading.Event()

    def __enter__(self) -> Viewer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Reads until the context ends."""
        with closing(LiveSource(self._endpoint)) as source:
            while not self._over.is_set():
                for message, envelope in source.read(READ_S):
                    self._take(message, envelope)

    @property
    def stated_missing(self) -> int:
        """Steps that ddpwatch says are missing: those that never came, and those that ranks dropped."""
        return (self._state.missing_steps or 0) + sum(rank.dropped for rank in self._state.ranks.values())

    @property
    def duplicates(self) -> int:
        """Steps that came more than once."""
        return sum(count > 1 for count in self.seen.copy().values())

    def has_all_since(self, at_s: float, ranks: int) -> bool:
        """Whether a step has come from each rank that ended after that."""
        newest = self.newest_s.copy()
        return len(newest) == ranks and min(newest.values()) > at_s

    def missing(self, folder: Path, ranks: int) -> list[float]:
        """When the steps ended that ranks have noted and that never came, on this machine's clock.

        Those before the viewer's first step and after its last one do not count.
        """
        found = []
        for rank in range(ranks):
            seen = {step for of, step in self.seen if of == rank}
            for step, ended_s in enumerate(ends(folder, rank)):
                if step not in seen and seen and min(seen) < step < max(seen):
                    found.append(ended_s)
        return found

    def _take(self, message: Message, envelope: Envelope) -> None:
        self._state.apply_message(message, envelope.received_ns)
        self.arrived_s[envelope.received_ns] = time.monotonic()
        if isinstance(message, Step):
            self.seen[message.rank, message.step] += 1
            ended_s = (message.start_ns + message.duration_ns) / 1e9 - SKEWS_S[message.rank]
            self.newest_s[message.rank] = max(ended_s, self.newest_s.get(message.rank, 0.0))
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Node):
            self.dropped[message.node] = message.dropped


def ends(folder: Path, rank: int) -> list[float]:
    """When each watched step of a rank ended, on this machine's clock (s)."""
    lines = (folder / f"steps-{rank}").read_text().splitlines()
    return [int(line) / 1e9 - SKEWS_S[rank] for line in lines]
