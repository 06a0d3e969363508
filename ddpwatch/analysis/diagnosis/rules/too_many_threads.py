"""More CPU threads than cores: ranks take the cores from each other, from the first step on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.causes.device_signals import DENIED
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses, because
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.thresholds import COSTLY_SHARE, ENOUGH_STEPS
from ddpwatch.wire.messages import Hello


class TooManyThreads:
    """Finds it as steps come, if the ranks wait for cores.

    Args:
        devices: Whether they do.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self._devices = devices
        self._hellos: dict[int, Hello] = {}
        self._since = self._until = self._steps = 0
        self._start_ns = self._end_ns = self._rank_ns = 0

    def add_hello(self, hello: Hello) -> None:
        """Takes a rank's introduction."""
        self._hellos[hello.rank] = hello

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        split = facts.split
        if not self._steps:
            self._since, self._start_ns = split.step, split.start_ns
        self._steps += 1
        self._until, self._end_ns = split.step, split.end_ns
        self._rank_ns += split.total

    def incidents(self) -> list[Incident]:
        """Returns one while threads outnumber a host's cores and ranks wait for these."""
        crowded = max(self._crowded(), key=lambda host: host.threads / host.cores, default=None)
        if crowded is None or self._steps < ENOUGH_STEPS:
            return []
        cause = self._devices.cause(None, self._start_ns, self._end_ns)
        if cause is None or cause.evidence.cause not in DENIED:
            return []
        share = cause.evidence.value
        ranks, each = crowded.ranks, crowded.threads // crowded.ranks
        found = Incident(
            kind="too_many_threads",
            severity="warning" if share >= COSTLY_SHARE else "info",
            message=f"too many threads: {ranks} ranks with {each} each share {crowded.cores} cores",
            since_step=self._since,
            until_step=self._until,
            steps=self._steps,
            cost_ns=int(share * self._rank_ns),
            gain=share,
            open=True,
            evidence=Evidence(share_of_step=share),
        )
        return [because(found, cause)]

    def _crowded(self) -> Iterator[_Host]:
        """Yields the hosts on which threads outnumber the cores, by the ranks that say how many they have."""
        by_host: dict[tuple[str, str], list[Hello]] = {}
        for hello in self._hellos.values():
            if hello.threads and hello.cores:
                by_host.setdefault((hello.host, hello.boot_id), []).append(hello)
        for hellos in by_host.values():
            host = _Host(len(hellos), sum(one.threads for one in hellos), max(one.cores for one in hellos))
            if host.threads > host.cores and host.threads > host.ranks:
                yield host


class _Host(NamedTuple):
    """A host's ranks of the job, the threads that these have together, and its cores."""

    ranks: int
    threads: int
    cores: int
