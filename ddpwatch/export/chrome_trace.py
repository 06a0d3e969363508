"""A recording as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

Each rank is a process, with lanes for the step, compute, hooks, marks and communication; overlapping spans get several
lanes of a kind. Inside a bucket's span lie its wait for the last rank's launch and the transfer after it. Flow arrows
join a bucket's collective across ranks, in launch order. Devices are counters. Incidents are a process of their own,
with a slice each from the start of the first step that they struck to the end of the last. Times are in µs from the
first step's start. The clocks of several hosts are aligned step by step (`ddpwatch.analysis.clocks`); where that is not
possible, by the shortest times that frames took to arrive, as a drawing needs some offset.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import IO, Any

import msgspec

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import Clock, clock_of
from ddpwatch.analysis.diagnosis.incident_json import IncidentFigures
from ddpwatch.analysis.run import Run
from ddpwatch.analysis.step import USE_NAMES, BucketKey, StepFigures, bucket_keys, named_stretches, starts_of
from ddpwatch.analysis.waiting import Flight, flights
from ddpwatch.export.trace_size import TraceSize
from ddpwatch.wire.messages import ALL_REDUCE, OWN_COLLECTIVES, Bye, Device, DeviceKey, Hello, Mark, Message, Step
from ddpwatch.wire.transport import Frame

Event = dict[str, Any]
_LANES = ("step", "compute", "hooks", "marks", "communication", "incidents")
STEP_LANE, COMPUTE_LANE, HOOK_LANE, MARK_LANE, COMM_LANE, INCIDENT_LANE = range(len(_LANES))
_INCIDENT_FACTS = (
    "kind", "severity", "ranks", "phase", "param", "device", "since_step", "until_step", "steps", "period", "seconds",
    "share", "gain", "open",
)  # fmt: skip
DEVICE_PIDS = 1 << 20  # above every rank
INCIDENTS_PID = DEVICE_PIDS - 1
_MOST_LANES = 1 << 20  # of a kind, only to sort them
_MOST_OF_ROLE = 1 << 12  # of collectives that the job's own code issues in groups of one role
_PHASES = {"sync": "wait for buckets", "data": "wait for data", "buffers": "wait for DDP's buffers"}
_GAUGES = (
    ("utilization", "utilisation %"), ("memory_used", "memory used B"), ("power_w", "power W"),
    ("temperature_c", "temperature °C"), ("sm_clock_mhz", "SM clock MHz"), ("pcie_tx_bytes_s", "PCIe sent B/s"),
    ("pcie_rx_bytes_s", "PCIe received B/s"), ("nvlink_tx_bytes_s", "NVLink sent B/s"),
    ("nvlink_rx_bytes_s", "NVLink received B/s"), ("net_tx_bytes_s", "network sent B/s"),
    ("net_rx_bytes_s", "network received B/s"), ("steal", "CPU time stolen %"), ("cpu_pressure", "CPU pressure %"),
    ("memory_pressure", "memory pressure %"), ("cgroup_throttled", "CPU quota used up %"),
    ("swap_in_bytes_s", "swapped in B/s"), ("swap_out_bytes_s", "swapped out B/s"),
    ("net_rx_errors_s", "network receive errors/s"), ("net_tx_errors_s", "network transmit errors/s"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TimeLine:
    """The common time line of a trace.

    Attributes:
        offsets: What to add to each rank's stamps (ns) until a step of it is aligned.
        start, end: The start of the first step and the end of the last, on the time line.
        incidents: What went wrong (`ddpwatch.analysis.diagnosis.incident_json.incident_row`).
    """

    offsets: dict[int, int]
    start: int
    end: int
    incidents: tuple[IncidentFigures, ...] = ()


class _Survey:
    """What the first pass over a recording finds out."""

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}  # of each rank's first step that is aligned
        self._clocks: dict[int, Clock] = {}
        self._delays: dict[Clock, int] = {}  # the shortest ones, by the clocks of collector and rank
        self._extents: dict[tuple[int, bool], tuple[int, int]] = {}  # by rank, and whether aligned

    def note(self, message: Message, received_ns: int) -> None:
        """Takes one message."""
        if isinstance(message, Hello):
            self._clocks[message.rank] = clock_of(message)
        elif isinstance(message, Step) and (clock := self._clocks.get(message.rank)) is not None:
            delay = received_ns - message.start_ns - message.duration_ns
            self._delays[clock] = min(delay, self._delays.get(clock, delay))

    def add_step(self, across: StepAcrossRanks) -> None:
        """Takes one step."""
        offsets = _offsets_of(across)
        self.offsets = offsets | self.offsets
        for rank, step in across.ranks.items():
            start = step.start_ns + offsets.get(rank, 0)
            end, key = start + step.duration_ns, (rank, rank in offsets)
            first, last = self._extents.get(key, (start, end))
            self._extents[key] = min(first, start), max(last, end)

    def time_line(self, incidents: Iterable[IncidentFigures]) -> TimeLine:
        """Returns the time line of all that was taken."""
        reference = self._delays.get(self._clocks[min(self._clocks)], 0) if self._clocks else 0
        guessed = {rank: self._delays.get(clock, reference) - reference for rank, clock in self._clocks.items()}
        offsets = guessed | self.offsets
        extents = [
            (first + rest, last + rest)
            for (rank, aligned), (first, last) in self._extents.items()
            for rest in [0 if aligned else offsets.get(rank, 0)]
        ]
        return TimeLine(
            offsets,
            start=min((first for first, _ in extents), default=0),
            end=max((last for _, last in extents), default=0),
            incidents=tuple(incidents),
        )


def _offsets_of(across: StepAcrossRanks) -> dict[int, int]:
    """Returns what puts a step's ranks onto the time line; empty if they share a clock, or cannot be aligned."""
    return {rank: shift.offset for rank, shift in across.shifts.items()} if across.comparable else {}


def align(frames: Iterable[Frame], ranks: int | None = None, size: TraceSize | None = None) -> TimeLine:
    """Returns the time line of a recording, in one pass over it; the pass ends where ``size`` becomes too large."""
    survey, run, size = _Survey(), Run(ranks), size or TraceSize()
    for message, envelope in frames:
        survey.note(message, envelope.received_ns)
        for across in run.apply_message(message, envelope.received_ns):
            survey.add_step(across)
            size.add_step(across)
        if size.is_too_large:
            break
    for across in run.rest():
        survey.add_step(across)
    return survey.time_line(run.incidents())


def write_chrome(
    frames: Iterable[Frame], line: TimeLine, out: IO[bytes], ranks: int | None = None, around: bool = True
) -> int:
    """Writes the trace; returns the number of events.

    Args:
        frames: The recording, once more.
        line: From `align`.
        out: A binary file.
        ranks: How many ranks will send a step, where that is fewer than the run has.
        around: Whether to include marks, ends and devices from before the first step and after the last one.
    """
    count = 0
    out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for event in _Tracer(line, ranks, around).events(frames):
        out.write((b",\n" if count else b"") + msgspec.json.encode(event))
        count += 1
    out.write(b"\n]}\n")
    return count


class _Lanes:
    """Spreads spans over lanes, so that no two overlap in one lane."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []  # heap of (busy until, lane)
        self._free: list[tuple[int, int]] = []  # heap of (lane, free since)
        self._now = 0

    def take_lane(self, start: int, end: int) -> int:
        """Returns the lowest lane that is free from ``start`` on; a new one where none is."""
        if start < self._now:  # out of order: what is free now may not have been then
            self._busy += [(since, lane) for lane, since in self._free]
            self._free = []
            heapify(self._busy)
        self._now = start
        while self._busy and self._busy[0][0] <= start:
            until, lane = heappop(self._busy)
            heappush(self._free, (lane, until))
        lane = heappop(self._free)[0] if self._free else len(self._busy)
        heappush(self._busy, (end, lane))
        return lane


class _StepTimes:
    """When some steps were, or else the last ones before them."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = sorted(set(numbers))
        self._found: dict[int, tuple[int, int, int]] = {}  # by position in the numbers: a step, its start, its end

    def add_span(self, number: int, start: int, end: int) -> None:
        """Takes one step of one rank."""
        place = bisect_left(self._numbers, number)
        step, first, last = self._found.get(place, (number, start, end))
        if number == step:
            self._found[place] = step, min(start, first), max(end, last)
        elif number > step:
            self._found[place] = number, start, end

    def start_of(self, number: int) -> int | None:
        """Returns when a step started, or else the last one before it ended; None if there is none."""
        found = self._before(number)
        return None if found is None else found[1] if found[0] == number else found[2]

    def end_of(self, number: int) -> int | None:
        """Returns when a step ended, or else the last one before it."""
        found = self._before(number)
        return None if found is None else found[2]

    def _before(self, number: int) -> tuple[int, int, int] | None:
        places = range(bisect_left(self._numbers, number), -1, -1)
        return next((self._found[place] for place in places if place in self._found), None)


class _Tracer:
    """Turns frames into events."""

    def __init__(self, line: TimeLine, ranks: int | None, around: bool) -> None:
        self._line = line
        self._offsets = dict(line.offsets)  # as the run goes on
        self._around = around
        self._run = Run(ranks, diagnosed=False)
        self._hosts: dict[tuple[str, str], int] = {}  # a rank on it, by name and boot, and by name alone
        self._device_pids: dict[DeviceKey, int] = {}
        self._lanes: dict[tuple[int, int, int], _Lanes] = {}
        self._roles: dict[str, int] = {"": 0}  # tracks of their own
        self._named: set[tuple[int, int]] = set()
        self._flows = 0
        struck = (step for row in line.incidents for step in (row.since_step, row.until_step))
        self._times = _StepTimes(number for number in struck if number is not None)

    def events(self, frames: Iterable[Frame]) -> Iterator[Event]:
        for message, _ in frames:
            for across in self._run.apply_message(message):
                yield from self._across_ranks(across)
            yield from self._other(message)
        for across in self._run.rest():
            yield from self._across_ranks(across)
        yield from self._incidents()

    def _incidents(self) -> Iterator[Event]:
        """Yields them longest first where they start together, so that they nest."""
        slices = []
        for row in self._line.incidents:
            since, until = row.since_step, row.until_step
            start = self._line.start if since is None else self._times.start_of(since)
            end = self._line.end if until is None else self._times.end_of(until)
            start = self._line.start if start is None else start
            slices.append((start, max(start, self._line.start if end is None else end), row))
        if slices:
            yield from self._process(INCIDENTS_PID, "incidents")
        for start, end, row in sorted(slices, key=lambda found: (found[0], -found[1])):
            facts = {key: getattr(row, key) for key in _INCIDENT_FACTS}
            yield from self._span(INCIDENTS_PID, INCIDENT_LANE, row.message, "incident", start, end, facts)

    # -- one message -----------------------------------------------------------------------------------------

    def _other(self, message: Message) -> Iterator[Event]:
        if isinstance(message, Hello):
            self._hosts[message.host, message.boot_id] = self._hosts[message.host, ""] = message.rank
            yield from self._process(message.rank, f"rank {message.rank} ({message.host})")
        elif isinstance(message, Mark):
            yield from self._mark(message)
        elif isinstance(message, Device):
            yield from self._device(message)
        elif isinstance(message, Bye) and message.rank is not None:
            at = message.at_ns + self._offset(message.rank)  # the collector that noticed it is on the rank's host
            yield from self._moment(message.rank, f"{message.reason} {message.detail}".strip(), "end", at)

    def _offset(self, rank: int | None) -> int:
        """Returns what to add to a rank's stamps by now.

        Without a rank, they are the collector's, on the lowest rank's host.
        """
        return self._offsets.get(min(self._offsets, default=0) if rank is None else rank, 0)

    def _mark(self, mark: Mark) -> Iterator[Event]:
        offset, category = self._offset(mark.rank), f"mark,{mark.kind}"
        start = mark.start_ns + offset
        if mark.end_ns is None:
            yield from self._moment(mark.rank, mark.name, category, start)
        elif (shown := self._shown(start, max(start, mark.end_ns + offset))) is not None:
            yield from self._span(mark.rank, MARK_LANE, mark.name, category, *shown, {})

    def _moment(self, rank: int, name: str, category: str, at: int) -> Iterator[Event]:
        if self._shown(at, at) is None:
            return
        tid = yield from self._lane(rank, STEP_LANE)
        yield {"ph": "i", "s": "p", "name": name, "cat": category, "pid": rank, "tid": tid, "ts": self._us(at)}

    def _device(self, device: Device) -> Iterator[Event]:
        at = device.at_ns + self._offset(self._hosts.get((device.host, device.boot_id)))
        if self._shown(at, at) is None:
            return
        pid = self._device_pids.get(device.key)
        if pid is None:
            pid = self._device_pids[device.key] = DEVICE_PIDS + len(self._device_pids)
            name = f"{device.host} {'host' if device.kind == 'cpu' else f'GPU {device.index}'} {device.name}".strip()
            yield from self._process(pid, name)
        for field, name in _GAUGES:
            value = getattr(device, field)
            if value is not None and math.isfinite(value):
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": self._us(at), "args": {"value": value}}

    def _shown(self, start: int, end: int) -> tuple[int, int] | None:
        """Returns the part of a stretch that belongs in the trace; None if nothing does."""
        first, last = self._line.start, self._line.end
        if self._around:
            return start, end
        return (max(start, first), min(end, last)) if start <= last and end >= first else None

    # -- one step --------------------------------------------------------------------------------------------

    def _across_ranks(self, across: StepAcrossRanks) -> Iterator[Event]:
        flows: dict[BucketKey, list[Event]] = {}
        self._offsets |= _offsets_of(across)
        for rank, step in sorted(across.ranks.items()):
            start = step.start_ns + self._offset(rank)
            self._times.add_span(across.step, start, start + step.duration_ns)
            shift = across.shifts.get(rank) if across.comparable else None
            yield from self._step(step, start, across.figures[rank], None if shift is None else shift.error)
            yield from self._hooks(rank, step, start)
            found = flights(step, across.facts_of(rank), across.skew)
            yield from self._comm(step, start, found, flows)
        for spans in flows.values():
            yield from self._arrows(spans)

    def _step(self, step: Step, start: int, figure: StepFigures, error_ns: int | None) -> Iterator[Event]:
        """Yields a step's span and its phases.

        ``error_ns``: how far its clock's offset may be off, None on one clock.
        """
        rank = step.rank
        facts = {
            "status": step.status,
            "overlap": figure.overlap,
            "exposed_ms": None if figure.exposed_ns is None else figure.exposed_ns / 1e6,
            "phases_ms": {name: ns / 1e6 for name, ns in figure.phases_ns.items()},
        }
        if error_ns is not None:
            facts["clock_error_ms"] = error_ns / 1e6
        yield from self._span(rank, STEP_LANE, f"step {step.step}", "step", start, start + step.duration_ns, facts)
        for phase, first, last in sorted(named_stretches(step), key=lambda stretch: (stretch[1], -stretch[2])):
            name = _PHASES.get(phase, phase)
            yield from self._span(rank, COMPUTE_LANE, name, "compute", start + first, start + last, {"step": step.step})

    def _hooks(self, rank: int, step: Step, start: int) -> Iterator[Event]:
        for param, at in zip(step.hook_param, step.hook_ns, strict=True):
            tid = yield from self._lane(rank, HOOK_LANE)
            yield {
                "ph": "i", "s": "t", "name": self._param(param, rank), "cat": "hook", "pid": rank,
                "tid": tid, "ts": self._us(start + at), "args": {"step": step.step, "parameter": param},
            }  # fmt: skip

    def _comm(
        self, step: Step, start: int, found: list[Flight | None], flows: dict[BucketKey, list[Event]]
    ) -> Iterator[Event]:
        keys, starts = bucket_keys(step), starts_of(step)
        for i in sorted(range(len(keys)), key=step.comm_launch.__getitem__):
            (module, index, _, group, use), flight, ready = keys[i], found[i], step.comm_ready[i]
            name, role = f"group {index} {USE_NAMES[use]}" if use else f"bucket {index}", ""
            if module == OWN_COLLECTIVES:
                place = self._run.layouts.bucket_layer(index, module=module)
                name, role = f"{USE_NAMES[use or ALL_REDUCE]} {place}".rstrip(), str(self._run.groups.role(group))
            begin, end = (starts[i], starts[i]) if flight is None else (flight.start, flight.done)
            facts = {
                "step": step.step, "module": module, "bucket": index, "bytes": step.comm_bytes[i],
                "queued_us": None if ready is None else (begin - ready) / 1000, "done_measured": flight is not None,
                **_split(flight),
            }  # fmt: skip
            event = yield from self._span(
                step.rank, COMM_LANE, name, "communication", start + begin, start + end, facts, role
            )
            yield from self._parts(event, start, flight)
            flows.setdefault(keys[i], []).append(event)

    def _parts(self, span: Event, start: int, flight: Flight | None) -> Iterator[Event]:
        """Yields the wait and the transfer inside a bucket's span, on the same lane."""
        if flight is None or flight.last_rank is None:
            return
        parts = (
            (f"waiting for rank {flight.last_rank}", "wait", flight.start, flight.transfer),
            ("transfer", "transfer", flight.transfer, flight.done),
        )
        for name, category, first, last in parts:
            if first < last:
                yield {
                    "ph": "X", "name": name, "cat": category, "pid": span["pid"], "tid": span["tid"],
                    "ts": self._us(start + first), "dur": _us(last - first), "args": {"step": span["args"]["step"]},
                }  # fmt: skip

    def _arrows(self, spans: list[Event]) -> Iterator[Event]:
        """Draws arrows from the rank that launched first to the one that launched last."""
        if len(spans) < 2:
            return
        self._flows += 1
        spans = sorted(spans, key=lambda event: event["ts"])
        for position, span in enumerate(spans):
            phase = "s" if position == 0 else ("f" if position == len(spans) - 1 else "t")
            event = {name: span[name] for name in ("name", "pid", "tid", "ts")}
            event.update({"ph": phase, "cat": "collective", "id": self._flows})
            yield {**event, "bp": "e"} if phase == "f" else event

    def _span(
        self, rank: int, kind: int, name: str, category: str, start: int, end: int, facts: dict[str, Any],
        role: str = "",
    ) -> Generator[Event, None, Event]:  # fmt: skip
        end = max(start, end)
        track = self._roles.setdefault(role, len(self._roles))
        lanes = self._lanes.setdefault((rank, kind, track), _Lanes())
        tid = yield from self._lane(rank, kind, lanes.take_lane(start, end), role)
        event = {
            "ph": "X", "name": name, "cat": category, "pid": rank, "tid": tid, "ts": self._us(start),
            "dur": _us(end - start), "args": facts,
        }  # fmt: skip
        yield event
        return event

    # -- processes and threads -------------------------------------------------------------------------------

    def _process(self, pid: int, name: str) -> Iterator[Event]:
        self._named.add((pid, 0))
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        order = -1 if pid == INCIDENTS_PID else pid  # above the ranks
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": order}}

    def _lane(self, rank: int, kind: int, number: int = 0, role: str = "") -> Generator[Event, None, int]:
        """Yields the thread id of a lane. Names the lane before its first event, and sorts lanes of a kind together."""
        place = self._roles[role] * _MOST_OF_ROLE + number
        tid = 1 + kind + place * len(_LANES)
        if (rank, tid) not in self._named:
            if (rank, 0) not in self._named:  # there was no hello
                yield from self._process(rank, f"rank {rank}")
            self._named.add((rank, tid))
            name = f"{_LANES[kind]} in {role}," if role else _LANES[kind]
            name = f"{name} {number + 1}" if number else name.rstrip(",")
            order = kind * _MOST_LANES + place
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": order}}
        return tid

    def _us(self, at_ns: int) -> float:
        return _us(at_ns - self._line.start)

    def _param(self, param: int, rank: int) -> str:
        return self._run.layouts.layer(param, rank) or self._run.layouts.layer(param) or f"parameter {param}"


def _split(flight: Flight | None) -> dict[str, Any]:
    """Returns whom a collective waited for, and how long; None where that is not known."""
    if flight is None or flight.last_rank is None:
        return {"last_rank": None, "wait_ms": None, "transfer_ms": None}
    wait, transfer = flight.wait_ns, max(flight.done - flight.transfer, 0)
    return {"last_rank": flight.last_rank, "wait_ms": wait / 1e6, "transfer_ms": transfer / 1e6}


def _us(ns: int) -> float:
    """Returns microseconds that Perfetto, which cuts off fractions of a ns, reads as exactly that many ns.

    Otherwise a span could end 1 ns after the span around it, and Perfetto drops such spans.
    """
    us = ns / 1000
    return us if int(us * 1000.0) == ns else math.nextafter(us, math.copysign(math.inf, ns))
