"""Causes outside the job: what its devices and hosts did while a rank was late, or while all ranks were slow.

A figure is a cause if it is high enough to cost that time, and clearly worse than with the peers at the same time.
Where there are no peers, it must be worse than on the same device before. What all devices share all the time makes
nobody late; it can only be the cause of a slow run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median, median_low
from typing import NamedTuple, TypeVar

from msgspec.structs import replace as replace_fields

from ddpwatch.analysis.clock_error import Shifts
from ddpwatch.analysis.diagnosis.causes.device_signals import (
    CPU_PRESSURE,
    DENIED,
    GPU_FIELDS,
    GPU_SIGNALS,
    HOST_FIELDS,
    HOST_SIGNALS,
    HOST_WIDE,
    RANK_FIELDS,
    RANK_SIGNALS,
    READY,
    SHORTAGES,
    STARVED,
    Columns,
    Row,
    Signal,
    gpu_columns,
    host_columns,
    rank_columns,
    workers_limit,
)
from ddpwatch.analysis.diagnosis.causes.series import Series
from ddpwatch.analysis.diagnosis.incident import DeniedTime, DeviceFigures, Evidence, Incident
from ddpwatch.analysis.diagnosis.thresholds import WORSE_FACTOR
from ddpwatch.analysis.placement import Gpu, Host, Placement
from ddpwatch.common.statistics import mean, p50
from ddpwatch.common.text import UNKNOWN
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.wire.messages import BATCH_WAIT, BusyProcess, Device, Mark, RankSample

LOOK_AGAIN_NS = 1_000_000_000  # for the cause of what lasts
SAMPLE_NS = 1_000_000_000  # what a sample describes: the time before it
BEFORE_NS = 300_000_000_000  # to compare with
BEFORE_SAMPLES = 10  # at least
MOST_PEERS = 64  # the median of so many is that of all
MOST_SERIES = 8_192  # of ranks, of GPUs, and of hosts; one takes up to 11 kB
_UNKNOWN = Host("")
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class DeviceCause(NamedTuple):
    """A cause outside the job: a fragment of a sentence, and the figures that it rests on."""

    text: str
    evidence: DeviceFigures


class Denied(NamedTuple):
    """For how long a machine did not let a job run, and why, as a fragment of a sentence."""

    ns: float
    text: str

    @property
    def evidence(self) -> DeniedTime:
        """The figure that it rests on."""
        return DeniedTime(round(self.ns / NS_PER_MS, 1))


def because(incident: Incident, cause: DeviceCause | Denied | None) -> Incident:
    """Returns the incident with its cause outside the job, where one is known."""
    if cause is None:
        return incident
    return replace(incident, device=cause.text, evidence=incident.evidence | Evidence(device=cause.evidence))


@dataclass(slots=True)
class DeviceCauses:
    """Knows the past of all devices, and finds causes in it. Memory is bounded, per device and in all.

    Attributes:
        placement: Where ranks run; kept up to date by the caller.
    """

    placement: Placement = field(default_factory=Placement)
    _ranks: _Level = field(default_factory=lambda: _Level(RANK_FIELDS))
    _gpus: _Level = field(default_factory=lambda: _Level(GPU_FIELDS))
    _hosts: _Level = field(default_factory=lambda: _Level(HOST_FIELDS))
    _waits: _Level = field(default_factory=lambda: _Level((READY,)))  # of ranks, for data that workers make
    _newest: dict[Gpu, Device] = field(default_factory=dict)
    _faulty: dict[Host, str] = field(default_factory=dict)  # its worst interface
    _xid: dict[Host, int] = field(default_factory=dict)  # the newest of its GPUs'
    _busy: dict[Host, Device] = field(default_factory=dict)  # its newest sample with processes
    _offsets: dict[Host, int] = field(default_factory=dict)  # what puts a host's clock onto the time line

    def note_clocks(self, shifts: Shifts) -> None:
        """Notes how the clocks of the ranks' hosts differ, by rank: samples are stamped with these."""
        for rank, shift in shifts.items():
            _remember(self._offsets, self._host_of(rank), shift.offset)

    def add_device(self, device: Device) -> None:
        """Takes a sample of a GPU or host."""
        host = Host(device.host, device.boot_id)
        if device.kind == "cpu":
            if device.net_faulty:
                _remember(self._faulty, host, device.net_faulty)
            if device.busy:
                _remember(self._busy, host, device)
            self._hosts.add_sample(host, host, device.at_ns, host_columns(device))
            return
        key = Gpu(host, device.uuid)
        self._gpus.add_sample(key, host, device.at_ns, gpu_columns(device, self._newest.get(key)))
        _remember(self._newest, key, device)
        if device.xid is not None:
            _remember(self._xid, host, device.xid)

    def add_rank_sample(self, sample: RankSample) -> None:
        """Takes a sample of a rank's process."""
        self._ranks.add_sample(sample.rank, self._host_of(sample.rank), sample.at_ns, rank_columns(sample))

    def add_mark(self, mark: Mark) -> None:
        """Takes a wait for a batch of a DataLoader's workers."""
        if mark.workers and mark.end_ns is not None and mark.name == BATCH_WAIT:
            self._waits.add_sample(mark.rank, self._host_of(mark.rank), mark.end_ns, [float(mark.ready)])

    def has_workers(self, rank: int) -> bool:
        """Returns whether a rank has waited for a DataLoader's workers."""
        return rank in self._waits.past

    def cause(self, rank: int | None, start_ns: int, end_ns: int, share: float = 0.0) -> DeviceCause | None:
        """Returns what was wrong with a rank's core, GPU or host in that time; None if nothing was, as far as is known.

        Samples come once a second, each after the time that it describes: ask again if ``end_ns`` is less than two
        seconds ago.

        Args:
            rank: Who was late; None if all ranks were slow.
            start_ns: From when on, on the time line.
            end_ns: Until when.
            share: What it took of that time: a shortage has to explain half of it.
        """
        window = _Window(start_ns, end_ns, self._offsets)
        seen = self._of_all(window) if rank is None else self._of(rank, window)
        process = {} if rank is None else _known(self._ranks.now(rank, window))
        return self._worst(seen, share, window, process)

    def shortage(self, rank: int | None, start_ns: int, end_ns: int, share: float) -> DeviceCause | None:
        """Returns what a rank, or all (None), were short of in that time, also if they were before, or its peers are.

        The arguments are those of `cause`: a shortage has to explain half of that share. None if it was of nothing.
        """
        window = _Window(start_ns, end_ns, self._offsets)
        seen = self._of_all(window, changed=False) if rank is None else self._of(rank, window, changed=False)
        names = SHORTAGES if rank is None else DENIED  # that some thread waited is no word on this rank
        return self._worst((each for each in seen if each.signal.name in names), share, window, {})

    def _worst(
        self, seen: Iterable[_Found], share: float, window: _Window, process: Mapping[str, float]
    ) -> DeviceCause | None:
        """Returns the one that weighs most of those that explain what took that share of the time, with the others."""
        found = sorted((each for each in seen if self._explains(each, share, window)), key=lambda each: -each.weight)
        if not found:
            return None
        also = [self._text(each) for each in found[1:]]
        figures = found[0].figures(process=process, also=also)
        return DeviceCause(self._text(found[0]), replace_fields(figures, busy=self._busy_on(found[0], window)))

    def workers(self, rank: int | None, start_ns: int, end_ns: int) -> DeviceCause | None:
        """Returns what limits the DataLoader's workers that a rank, or all (None), waited for in that time."""
        window = _Window(start_ns, end_ns, self._offsets)
        ranks = list(_spread(list(self._ranks.past))) if rank is None else [rank]
        known = [row for each in ranks if (row := self._ranks.now(each, window))["workers_run"] is not None]
        if not known:
            return None
        row = {name: mean(row[name] for row in known) for name in RANK_FIELDS}
        ready = mean(self._waits.now(each, window)[READY] for each in ranks)
        if (found := workers_limit(row, ready)) is None:
            return None
        name, text, value = found
        figures = DeviceFigures(
            cause=name, host="", value=round(value, 4), before=None, peers=None, figures=_known(row)
        )
        return DeviceCause(text, figures)

    def cause_among(self, ranks: Sequence[int], start_ns: int, end_ns: int, share: float) -> DeviceCause | None:
        """Returns what made the collectives of some ranks slower than before: on all ranks, or else on one of these.

        Args:
            ranks: The collectives' group; empty for all ranks.
            start_ns: From when on, as for `cause`.
            end_ns: Until when.
            share: What they took longer, of that time.
        """
        if (common := self.cause(None, start_ns, end_ns, share)) is not None:
            return common
        window = _Window(start_ns, end_ns, self._offsets)
        asked = _spread(ranks or list(self.placement.hosts))
        found = [(each, rank) for rank in asked for each in self._of(rank, window)]
        changed = [(each, rank) for each, rank in found if each.is_worse_than_before]
        able = [(each, rank) for each, rank in changed if self._explains(each, share, window)]
        worst = max(able, key=lambda pair: pair[0].weight, default=None)
        if worst is None:
            return None
        each, rank = worst
        text = self._text(each) if each.signal in HOST_WIDE else f"rank {rank}: {self._text(each)}"
        return DeviceCause(text, each.figures(rank=rank))

    def denied(self, rank: int | None, start_ns: int, end_ns: int, excess_ns: int) -> Denied:
        """Returns what the machine denied a job in a step that took longer than usual by ``excess_ns``.

        That is what samples say of the time around the step, without what they said before of so much usual time: of a
        rank, or of the rank that was denied most. Unlike a `cause`, it need not be worse than with peers or before.
        """
        window = _Window(start_ns, end_ns, self._offsets)
        ranks = _spread(list(self._ranks.past)) if rank is None else (rank,)
        hosts = _spread(list(self._hosts.past)) if rank is None else (self._host_of(rank),)
        found = [denied for each in ranks for denied in self._ranks.denied(each, window, excess_ns)]
        found += [denied for each in hosts for denied in self._hosts.denied(each, window, excess_ns)]
        return max(found, default=Denied(0.0, ""))

    def _of(self, rank: int, window: _Window, changed: bool = True) -> Iterator[_Found]:
        host, gpu = self._host_of(rank), self.placement.gpus.get(rank)
        yield from self._ranks.causes_of(rank, self._ranks.past, RANK_SIGNALS, window, changed)
        if gpu is not None:
            yield from self._gpus.causes_of(gpu, self._gpus_in_use(), GPU_SIGNALS, window, changed)
        own_waits = self._ranks.now(rank, window)["wait"] is not None
        signals = HOST_SIGNALS if own_waits else HOST_WIDE
        yield from self._hosts.causes_of(host, self._hosts.past, signals, window, changed)

    def _of_all(self, window: _Window, changed: bool = True) -> Iterator[_Found]:
        own_waits = list(self._ranks.causes_of_all(self._ranks.past, RANK_SIGNALS, window, changed))
        yield from own_waits
        yield from self._gpus.causes_of_all(self._gpus_in_use(), GPU_SIGNALS, window, changed)
        signals = HOST_SIGNALS if own_waits else HOST_WIDE
        yield from self._hosts.causes_of_all(self._hosts.past, signals, window, changed)

    def _explains(self, found: _Found, share: float, window: _Window) -> bool:
        """Returns whether it explains what took that share of the time: if it is a shortage, half of it.

        Of the time in which some process waited for a core, that is what ranks waited, where it is known.
        """
        if found.signal.name not in SHORTAGES:
            return True
        own = self._waited_on(found.host, window) if found.signal is CPU_PRESSURE else None
        return 2 * (found.value if own is None else own) >= share

    def _waited_on(self, host: Host, window: _Window) -> float | None:
        """Returns what the median rank of a host waited for a core; of all ranks, if none is known to be there."""
        there: Sequence[Hashable] = [
            rank for rank, place in self.placement.hosts.items() if place == host and rank in self._ranks.past
        ]
        return p50(self._ranks.now(rank, window)["wait"] for rank in _spread(there or list(self._ranks.past)))

    def _busy_on(self, found: _Found, window: _Window) -> list[BusyProcess] | None:
        """Returns which processes had the cores that were short; of several hosts that are alike, none."""
        host = found.host if found.host.name or len(self._busy) != 1 else next(iter(self._busy))
        sample = self._busy.get(host)
        if found.signal.name not in STARVED or sample is None:
            return None
        return sample.busy if sample.at_ns >= window.now(host)[0] else None

    def _host_of(self, rank: int) -> Host:
        return self.placement.hosts.get(rank, _UNKNOWN)

    def _gpus_in_use(self) -> Iterable[Hashable]:
        """Returns those of ranks, always in the same order."""
        return dict.fromkeys(self.placement.gpus.values())

    def _text(self, found: _Found) -> str:
        """Names host and interface first, where there are several, and an XID."""
        text = found.signal.text(found.row)
        if found.signal.name == "new_xids":
            text = f"{text} {self._xid.get(found.host, UNKNOWN)}"
        if found.signal.name.startswith(("net_", "link_")) and (interface := self._faulty.get(found.host)):
            text = f"{interface}: {text}"
        if found.signal in HOST_WIDE and found.host.name and len(self._hosts.past) > 1:
            text = f"host {found.host.name}: {text}"
        return text


@dataclass(frozen=True, slots=True)
class _Found:
    """A signal that is a cause: how much, before and with the peers, and on which host (without a name if on all)."""

    signal: Signal
    row: Row
    host: Host
    value: float
    before: float | None
    peers: float | None

    @property
    def weight(self) -> float:
        """How many times what it needs to be a cause."""
        return self.value / self.signal.least

    @property
    def is_worse_than_before(self) -> bool:
        """Whether it has changed, as far as is known."""
        return self.before is None or _is_worse(self.signal, self.row, self.before)

    def figures(
        self, process: Mapping[str, float] | None = None, also: Sequence[str] | None = None, rank: int | None = None
    ) -> DeviceFigures:
        """Returns its figures, with what else is known of that time."""
        return DeviceFigures(
            cause=self.signal.name,
            host=self.host.name,
            value=round(self.value, 4),
            before=None if self.before is None else round(self.before, 4),
            peers=None if self.peers is None else round(self.peers, 4),
            figures=_known(self.row),
            process=process,
            also=also,
            rank=rank,
        )


@dataclass(frozen=True, slots=True)
class _Window:
    """The time in question; ``offsets`` are what to add to a host's times to put them onto the time line."""

    start_ns: int
    end_ns: int
    offsets: Mapping[Host, int]

    def now(self, host: Host) -> tuple[int, int]:
        shift = self.offsets.get(host, 0)
        return self.start_ns - shift, self.end_ns - shift + SAMPLE_NS

    def before(self, host: Host) -> tuple[int, int]:
        start_ns = self.start_ns - self.offsets.get(host, 0)
        return start_ns - BEFORE_NS, start_ns


@dataclass(slots=True)
class _Level:
    """The past of all ranks, of all GPUs, or of all hosts."""

    fields: tuple[str, ...]
    past: dict[Hashable, Series] = field(default_factory=dict)
    host_of: dict[Hashable, Host] = field(default_factory=dict)

    def add_sample(self, key: Hashable, host: Host, at_ns: int, columns: Columns) -> None:
        if key not in self.past:
            _remember(self.past, key, Series(len(self.fields)))
        _remember(self.host_of, key, host)
        self.past[key].add_sample(at_ns, columns)

    def now(self, key: Hashable, window: _Window) -> Row:
        """Returns means over the time in question."""
        return self._means(key, window.now(self.host_of.get(key, _UNKNOWN)))

    def before(self, key: Hashable, window: _Window) -> Row:
        """Returns means over the minutes before it; all None if there were hardly any samples."""
        span = window.before(self.host_of.get(key, _UNKNOWN))
        enough = key in self.past and self.past[key].count(*span) >= BEFORE_SAMPLES
        return self._means(key if enough else None, span)

    def denied(self, key: Hashable, window: _Window, excess_ns: int) -> Iterator[Denied]:
        """Yields what was denied in a step, beyond what is usual."""
        if key not in self.past:
            return
        span = window.now(self.host_of.get(key, _UNKNOWN))
        covered = max(self.past[key].count(*span) * SAMPLE_NS, excess_ns)
        now, before = self._means(key, span), self.before(key, window)
        for name in self.fields:
            if name in DENIED:
                ns = (now[name] or 0.0) * covered - (before[name] or 0.0) * (covered - excess_ns)
                yield Denied(ns, DENIED[name])

    def _means(self, key: Hashable, span: tuple[int, int]) -> Row:
        series = self.past.get(key)
        means = [None] * len(self.fields) if series is None else series.means(*span)
        return dict(zip(self.fields, means, strict=True))

    def causes_of(
        self,
        key: Hashable,
        others: Iterable[Hashable],
        signals: Iterable[Signal],
        window: _Window,
        changed: bool = True,
    ) -> Iterator[_Found]:
        """Yields what was bad of one of them, and, if that is asked, worse than the others, or else than before."""
        row = self.now(key, window)
        high = [signal for signal in signals if (signal.value(row) or 0.0) >= signal.least]
        if not high:
            return
        then = self.before(key, window)
        around = [self.now(other, window) for other in _spread([other for other in others if other != key])]
        for signal in high:
            before, peers = signal.compared(then), p50(signal.compared(each) for each in around)
            reference = before if peers is None else peers
            if not changed or (reference is not None and _is_worse(signal, row, reference)):
                yield _Found(signal, row, self.host_of[key], signal.value(row) or 0.0, before, peers)

    def causes_of_all(
        self, keys: Iterable[Hashable], signals: Iterable[Signal], window: _Window, changed: bool = True
    ) -> Iterator[_Found]:
        """Yields what slows most of them, and, if that is known and to have changed, not as much before."""
        rows = {key: self.now(key, window) for key in _spread(list(keys))}
        for signal in signals:
            known = {key: value for key, row in rows.items() if (value := signal.value(row)) is not None}
            if not known or median(known.values()) < signal.least:
                continue
            typical = median_low(known.values())
            row = next(rows[key] for key, value in known.items() if value == typical)
            before = p50(signal.compared(self.before(key, window)) for key in known)
            if not changed or _is_worse(signal, row, before or 0.0):
                yield _Found(signal, row, _UNKNOWN, typical, before, None)


def _remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Forgets the oldest key if there are too many."""
    known[key] = value
    if len(known) > MOST_SERIES:
        del known[next(iter(known))]


def _known(row: Row) -> dict[str, float]:
    """Returns for JSON what was measured and is not 0."""
    return {name: round(value, 4) for name, value in row.items() if value}


def _is_worse(signal: Signal, row: Row, reference: float) -> bool:
    return (signal.compared(row) or 0.0) >= max(reference + signal.least, WORSE_FACTOR * reference)


def _spread(keys: Sequence[_Key]) -> Iterable[_Key]:
    """Returns at most `MOST_PEERS` of them, evenly spread."""
    return islice(keys, 0, None, max(-(-len(keys) // MOST_PEERS), 1))
