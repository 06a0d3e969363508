"""A recording as a Chrome trace, for https://ui.perfetto.dev and chrome://tracing.

One process per rank with lanes for the step, compute, hooks and communication; a flow arrow joins a bucket's
collective over the ranks in the order in which they launched it; devices are counters. Times are in µs from the first
step's start; clocks of several hosts are aligned (`ddpwatch.analysis.clocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO, Any

import msgspec

from ddpwatch.analysis.clocks import ClockAligner
from ddpwatch.analysis.groups import StepGroup, StepGroups
from ddpwatch.messages import Bye, Device, Hello, Layout, Mark, Message, Step
from ddpwatch.transport import Envelope

Event = dict[str, Any]
Frame = tuple[Message, Envelope]
STEP_LANE, COMPUTE_LANE, HOOK_LANE, MARK_LANE, COMM_LANE = 0, 10, 20, 21, 30
DEVICE_PIDS = 1 << 20  # above every rank
_LANES = {
    STEP_LANE: "step", COMPUTE_LANE: "compute", HOOK_LANE: "hooks", MARK_LANE: "marks", COMM_LANE: "communication",
}  # fmt: skip
_PHASES = {"sync": "wait for buckets"}
_GAUGES = (
    ("utilization", "utilisation %"), ("memory_used", "memory used B"), ("power_w", "power W"),
    ("temperature_c", "temperature °C"), ("sm_clock_mhz", "SM clock MHz"), ("pcie_tx_bytes_s", "PCIe sent B/s"),
    ("pcie_rx_bytes_s", "PCIe received B/s"), ("nvlink_tx_bytes_s", "NVLink sent B/s"),
    ("nvlink_rx_bytes_s", "NVLink received B/s"), ("net_tx_bytes_s", "network sent B/s"),
    ("net_rx_bytes_s", "network received B/s"),
)  # fmt: skip


def align(frames: Iterable[Frame], ranks: int | None = None) -> ClockAligner:
    """The clocks of a recording; one pass over it."""
    aligner, collected = ClockAligner(), StepGroups(ranks)
    for message, envelope in frames:
        if isinstance(message, Hello):
            aligner.meet(message)
        elif isinstance(message, Step):
            aligner.hear(message, envelope.received_ns)
        group = collected.apply(message)
        if group is not None and group.counted:
            aligner.compare(group.steps)
    for group in collected.rest():
        aligner.compare(group.steps)
    return aligner


def write_chrome(frames: Iterable[Frame], aligner: ClockAligner, out: IO[bytes], ranks: int | None = None) -> int:
    """Writes the trace; returns the number of events.

    Args:
        frames: The recording, once more.
        aligner: What `align` found.
        out: A binary file.
        ranks: How many ranks a step is expected from, where that is fewer than the run has.
    """
    count = 0
    out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for event in _Tracer(aligner, ranks).events(frames):
        out.write((b",\n" if count else b"") + msgspec.json.encode(event))
        count += 1
    out.write(b"\n]}\n")
    return count


class _Tracer:
    """Turns frames into events."""

    def __init__(self, aligner: ClockAligner, ranks: int | None) -> None:
        self._offsets = aligner.offsets()
        self._clocks = aligner.clocks
        self._collected = StepGroups(ranks)
        self._origin: int | None = None
        self._hosts: dict[str, int] = {}  # offset of the host's clock
        self._device_pids: dict[tuple[str, str, int], int] = {}
        self._ends: dict[tuple[int, int], list[int]] = {}
        self._params: dict[tuple[int, int], tuple[int, list[str]]] = {}
        self._held: list[Message] = []
        self._flows = 0

    def events(self, frames: Iterable[Frame]) -> Iterator[Event]:
        for message, _ in frames:
            group = self._collected.apply(message)
            if group is not None:
                yield from self._group(group)
            if not isinstance(message, Step):
                yield from self._other(message)
        for group in self._collected.rest():
            yield from self._group(group)

    # -- one message -----------------------------------------------------------------------------------------

    def _other(self, message: Message) -> Iterator[Event]:
        if isinstance(message, Hello):
            self._hosts[message.host] = self._offsets.get(message.rank, 0)
            yield from _names(message.rank, f"rank {message.rank} ({message.host})")
        elif isinstance(message, Layout):
            self._params[message.module, message.epoch] = (message.param_base, message.params)
        elif isinstance(message, (Mark, Device, Bye)):
            if self._origin is None:
                self._held.append(message)  # the first step's start is zero, and it is not known yet
            else:
                yield from self._moment(message)

    def _moment(self, message: Message) -> Iterator[Event]:
        if isinstance(message, Mark):
            yield self._mark(message)
        elif isinstance(message, Device):
            yield from self._device(message)
        elif isinstance(message, Bye) and message.rank is not None:
            at = message.at_ns + (self._offsets.get(message.rank, 0) if message.by == "rank" else self._own_offset())
            text = f"{message.reason} {message.detail}".strip()
            yield {
                "ph": "i",
                "name": text,
                "cat": "end",
                "pid": message.rank,
                "tid": STEP_LANE,
                "ts": self._us(at),
                "s": "p",
            }

    def _own_offset(self) -> int:
        """The collector runs on the host of the lowest rank."""
        return self._offsets.get(min(self._offsets, default=0), 0)

    def _mark(self, mark: Mark) -> Event:
        start = mark.start_ns + self._offsets.get(mark.rank, 0)
        event = {
            "name": mark.name,
            "cat": f"mark,{mark.kind}",
            "pid": mark.rank,
            "tid": STEP_LANE,
            "ts": self._us(start),
        }
        if mark.end_ns is None:
            return {**event, "ph": "i", "s": "p"}
        pair = {"ph": "X", "dur": (mark.end_ns - mark.start_ns) / 1000, "tid": MARK_LANE}
        return {**event, **pair}

    def _device(self, device: Device) -> Iterator[Event]:
        key = (device.host, device.kind, device.index)
        pid = self._device_pids.get(key)
        if pid is None:
            pid = self._device_pids[key] = DEVICE_PIDS + len(self._device_pids)
            name = f"{device.host} {'host' if device.kind == 'cpu' else f'GPU {device.index}'} {device.name}".strip()
            yield from _names(pid, name)
        at = device.at_ns + self._hosts.get(device.host, self._own_offset())
        for field, name in _GAUGES:
            value = getattr(device, field)
            if value is not None:
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": self._us(at), "args": {"value": value}}

    # -- one step --------------------------------------------------------------------------------------------

    def _group(self, group: StepGroup) -> Iterator[Event]:
        if self._origin is None:
            self._origin = min(step.start_ns + self._offsets.get(rank, 0) for rank, step in group.steps.items())
            held, self._held = self._held, []
            for message in held:
                yield from self._moment(message)
        flows: dict[tuple[int, int, int], list[Event]] = {}
        for rank, step in sorted(group.steps.items()):
            start = step.start_ns + self._offsets.get(rank, 0)
            yield from self._step(rank, step, start, group)
            yield from self._hooks(rank, step, start)
            yield from self._comm(rank, step, start, flows)
        for turns in flows.values():
            yield from self._arrows(turns)

    def _step(self, rank: int, step: Step, start: int, group: StepGroup) -> Iterator[Event]:
        figure = group.figures[rank]
        facts = {
            "status": step.status,
            "overlap": figure.overlap,
            "exposed_ms": None if figure.exposed_ns is None else figure.exposed_ns / 1e6,
            "parts_ms": {name: ns / 1e6 for name, ns in figure.parts_ns.items()},
        }
        yield self._span(rank, STEP_LANE, f"step {step.step}", "step", start, start + step.duration_ns, facts)
        for span in sorted(step.spans, key=lambda span: (span.start, -span.end)):
            name = _PHASES.get(span.phase, span.phase)
            yield self._span(
                rank, COMPUTE_LANE, name, "compute", start + span.start, start + span.end, {"step": step.step}
            )

    def _hooks(self, rank: int, step: Step, start: int) -> Iterator[Event]:
        for param, at in zip(step.hook_param, step.hook_ns, strict=True):
            yield {
                "ph": "i", "s": "t", "name": self._param(param, step.epoch), "cat": "hook", "pid": rank,
                "tid": HOOK_LANE, "ts": self._us(start + at), "args": {"step": step.step, "parameter": param},
            }  # fmt: skip

    def _comm(
        self, rank: int, step: Step, start: int, flows: dict[tuple[int, int, int], list[Event]]
    ) -> Iterator[Event]:
        turns: dict[tuple[int, int], int] = {}
        for place, index in enumerate(step.bucket_index):
            module, launch, done = step.bucket_module[place], step.bucket_launch[place], step.bucket_done[place]
            turn = turns[module, index] = turns.get((module, index), -1) + 1
            ready = step.bucket_ready[place]
            facts = {
                "step": step.step, "module": module, "bucket": index, "bytes": step.bucket_bytes[place],
                "queued_us": None if ready is None else (launch - ready) / 1000, "done_measured": done is not None,
            }  # fmt: skip
            end = launch if done is None else done
            event = self._span(rank, COMM_LANE, f"bucket {index}", "communication", start + launch, start + end, facts)
            flows.setdefault((module, index, turn), []).append(event)
            yield event

    def _arrows(self, spans: list[Event]) -> Iterator[Event]:
        """From the rank that launched first to the one that launched last."""
        if len(spans) < 2:
            return
        self._flows += 1
        spans = sorted(spans, key=lambda event: event["ts"])
        for place, span in enumerate(spans):
            phase = "s" if place == 0 else ("f" if place == len(spans) - 1 else "t")
            event = {name: span[name] for name in ("name", "pid", "tid", "ts")}
            event.update({"ph": phase, "cat": "collective", "id": self._flows})
            yield {**event, "bp": "e"} if phase == "f" else event

    def _span(
        self, rank: int, lane: int, name: str, category: str, start: int, end: int, facts: dict[str, Any]
    ) -> Event:
        end = max(start, end)
        return {
            "ph": "X", "name": name, "cat": category, "pid": rank, "tid": self._lane(rank, lane, start, end),
            "ts": self._us(start), "dur": (end - start) / 1000, "args": facts,
        }  # fmt: skip

    def _lane(self, rank: int, lane: int, start: int, end: int) -> int:
        """The first of the lanes of that kind that is free: spans in one lane never overlap."""
        ends = self._ends.setdefault((rank, lane), [])
        for place, busy_until in enumerate(ends):
            if busy_until <= start:
                ends[place] = end
                return lane + place
        if len(ends) == 9:
            return lane + 9
        ends.append(end)
        return lane + len(ends) - 1

    def _us(self, at_ns: int) -> float:
        return (at_ns - (self._origin or 0)) / 1000

    def _param(self, param: int, epoch: int) -> str:
        for (_, known), (base, names) in self._params.items():
            if known <= epoch and 0 <= param - base < len(names):
                return names[param - base]
        return f"parameter {param}"


def _names(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    if pid < DEVICE_PIDS:
        for lane, title in _LANES.items():
            for place in range(3 if lane in (COMPUTE_LANE, COMM_LANE) else 1):
                args = {"name": title if place == 0 else f"{title} {place + 1}"}
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane + place, "args": args}
