"""What makes a Chrome trace valid, for tests on made-up and real recordings. Times are ns, as Perfetto reads them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddpwatch.analysis.step import named_stretches
from ddpwatch.recording.reader import Recording
from ddpwatch.wire.messages import Step

Event = dict[str, Any]


def load(path: Path) -> list[Event]:
    events: list[Event] = msgspec.json.decode(path.read_bytes())["traceEvents"]
    return events


def check(path: Path, recording: Path) -> None:
    """Counts and durations equal the recording's, spans in a lane nest, flows connect, everything has a name."""
    events = load(path)
    steps = [message for message, _ in Recording(recording) if isinstance(message, Step)]
    check_durations(events, steps)
    check_nesting(events)
    check_waits(events)
    check_flows(events, steps)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events} == named
    lanes = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xistf"} <= lanes


def lane_names(events: list[Event], rank: int) -> list[str]:
    """The names of a rank's lanes, from the top of the screen to its bottom."""
    mine = [event for event in events if event["pid"] == rank]
    order = {e["tid"]: e["args"]["sort_index"] for e in mine if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
    assert names.keys() == order.keys()
    assert len(set(names.values())) == len(names)
    return [names[tid] for tid in sorted(names, key=order.__getitem__)]


def ns(us: float) -> int:
    """What Perfetto makes of a time."""
    return int(us * 1000.0)


def check_durations(events: list[Event], steps: list[Step]) -> None:
    def found(category: str) -> list[int]:
        return sorted(ns(event["dur"]) for event in events if event.get("cat") == category and event["ph"] == "X")

    assert found("step") == sorted(step.duration_ns for step in steps)
    assert found("compute") == sorted(b - a for step in steps for _, a, b in named_stretches(step))
    comm = [(d if d is not None else a) - a for s in steps for a, d in zip(s.comm_launch, s.comm_done, strict=True)]
    assert found("communication") == sorted(comm)
    assert sum(event.get("cat") == "hook" for event in events) == sum(len(step.hook_ns) for step in steps)


def check_nesting(events: list[Event]) -> None:
    """Spans of a lane nest to the nanosecond; Perfetto drops those that do not."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
    for spans in lanes.values():
        open_until: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def check_waits(events: list[Event]) -> None:
    """A bucket's wait and its transfer, where they are known, follow one another and fill its span."""
    parts: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("wait", "transfer"):
            parts[event["pid"], event["tid"]].append(event)
    for event in events:
        if event.get("cat") != "communication" or event["args"]["last_rank"] is None:
            continue
        start, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
        own = [part for part in parts[event["pid"], event["tid"]] if start <= ns(part["ts"]) < end]
        args = event["args"]
        named = {"wait": f"waiting for rank {args['last_rank']}", "transfer": "transfer"}
        lengths = {"wait": round(args["wait_ms"] * 1e6), "transfer": round(args["transfer_ms"] * 1e6)}
        assert [part["name"] for part in own] == [named[kind] for kind, length in lengths.items() if length]
        assert [ns(part["dur"]) for part in own] == [length for length in lengths.values() if length]
        edges = [start, *(ns(part["ts"]) + ns(part["dur"]) for part in own)]
        assert [ns(part["ts"]) for part in own] == edges[:-1]
        assert edges[-1] == end


def check_flows(events: list[Event], steps: list[Step]) -> None:
    """Every collective of more than one rank has one arrow through all its ranks, each end on that rank's span."""
    spans = {(e["pid"], e["tid"], e["ts"], e["name"]) for e in events if e.get("cat") == "communication"}
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            assert (event["pid"], event["tid"], event["ts"], event["name"]) in spans
    expected = {(s.step, m, i) for s in steps for m, i in zip(s.comm_module, s.comm_label, strict=True)}
    assert len(flows) >= len(expected)
    for flow in flows.values():
        phases = "".join(event["ph"] for event in flow)
        assert phases == "s" + "t" * (len(flow) - 2) + "f"
        assert [e["ts"] for e in flow] == sorted(e["ts"] for e in flow)
        assert len({e["pid"] for e in flow}) == len(flow)
    assert sum(map(len, flows.values())) == pytest.approx(len(spans), abs=0)
