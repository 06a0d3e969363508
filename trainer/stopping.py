"""Stopping together: one rank gets a signal, all ranks stop after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 10.0
KEY = "trainer/stop-after"


class StopAgreement:
    """Agree with the other ranks on the last step.

    A rank that gets a signal before step s writes s into the job's store, then takes step s. The others cannot
    complete s without it, so they find the entry before they start s + 1, and all stop there. The first entry counts.
    """

    def __init__(self, store: Store) -> None:
        """Agree through ``store``."""
        self.store = store
        self.signal: int | None = None
        self.alive = threading.Event()
        self.over = False

    def before(self, step: int) -> bool:
        """Whether to stop before ``step``. Costs one query of the store."""
        if self.signal is not None:
            self.store.compare_set(KEY, "", str(step))
        self.over = self.store.check([KEY]) and step > int(self.store.get(KEY))
        self.alive.set()
        return self.over

    def stuck(self) -> bool:
        """Wait until training has stopped (False), or has not come to the end of a step for ``GRACE_S`` (True)."""
        while not self.over:
            self.alive.clear()
            if not self.alive.wait(GRACE_S):
                return True
        return False


@contextmanager
def stop_on_signal(store: Store) -> Iterator[StopAgreement]:
    """Turn SIGINT and SIGTERM into an orderly stop for as long as the block lasts.

    A thread receives the signals, since Python's own handlers wait for the main thread, which may be stuck in a
    collective whose other side is gone. If training does not reach the end of its step, the thread ends the process.
    """
    agreement = StopAgreement(store)
    receive, send = os.pipe()
    os.set_blocking(send, False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    previous_fd = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    threading.Thread(target=_receive_signals, args=(receive, agreement), name="signals", daemon=True).start()
    try:
        yield agreement
    finally:
        agreement.over = True
        agreement.alive.set()
        signal.set_wakeup_fd(previous_fd)
        os.close(send)
        for number, handler in before.items():
            signal.signal(number, handler)


def _receive_signals(receive: int, agreement: StopAgreement) -> None:
    while received := os.read(receive, 1):
        if received[0] in SIGNALS:
            agreement.signal = received[0]
            if agreement.stuck():
                os._exit(128 + received[0])
    os.close(receive)
