"""Linux's counters of a thread: time on a core, and without one, preemptions, pages from a disk."""

from __future__ import annotations

from typing import NamedTuple

from ddpwatch.run.regular import read_counters


class ThreadCounters(NamedTuple):
    """How long a thread has run and waited for a core (ns), how often it was preempted, its pages from a disk.

    None for what Linux does not say.
    """

    run_ns: int | None = None
    wait_ns: int | None = None
    preempted: int | None = None
    major_faults: int | None = None

    def since(self, before: ThreadCounters) -> ThreadCounters:
        """Returns what has come since then."""
        pairs = zip(self, before, strict=True)
        return ThreadCounters(*(None if now is None or then is None else max(now - then, 0) for now, then in pairs))


def thread_counters(thread: int) -> ThreadCounters:
    """Returns those of a thread of this process, by its native id."""
    folder = f"/proc/self/task/{thread}"
    times = read_counters(f"{folder}/schedstat").split()
    preempted = read_counters(f"{folder}/status").rpartition(b"nonvoluntary_ctxt_switches:")[2].split()
    stat = read_counters(f"{folder}/stat").rpartition(b")")[2].split()
    known = [*(times[:2] if len(times) > 2 else (b"", b"")), *(preempted[:1] or [b""]), *(stat[9:10] or [b""])]
    return ThreadCounters(*(int(text) if text.isdigit() else None for text in known))
