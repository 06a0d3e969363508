"""What the collector keeps for a viewer that attaches late, and how long."""

from __future__ import annotations

from ddpwatch.collector.hub import KEEP_DEVICE_SAMPLES, KEEP_DEVICES, Hub
from ddpwatch.messages import Bye, Device, EndReason, Message, decode, encode

SECOND_NS = 10**9
TEN_MINUTES_S = 600


def keep(hub: Hub, message: Message, now_ns: int = 0) -> None:
    hub.keep(message, encode(message), now_ns)


def device(kind: str, index: int, second: int) -> Device:
    return Device(host="node", kind=kind, index=index, at_ns=second * SECOND_NS, temperature_c=float(second))  # type: ignore[arg-type]


def kept(hub: Hub) -> list[Message]:
    return [decode(envelope.frame) for envelope in hub.snapshot()]


def test_ten_minutes_of_every_device_are_kept() -> None:
    hub = Hub()
    keys = [("cpu", 0), *(("cuda", index) for index in range(8))]
    for second in range(TEN_MINUTES_S + 50):
        for kind, index in keys:
            keep(hub, device(kind, index, second), second * SECOND_NS)
    newest = range(50, TEN_MINUTES_S + 50)
    assert kept(hub) == [device(kind, index, second) for second in newest for kind, index in keys]


def test_a_thousand_devices_stay_bounded() -> None:
    """Those without a sample for the longest time go first."""
    hub = Hub()
    for second in range(3):
        keep(hub, device("cpu", 0, second))
        for index in range(1000):
            keep(hub, device("cuda", index, second))
            keep(hub, device("cpu", 0, second))
    found = {(m.kind, m.index) for m in kept(hub) if isinstance(m, Device)}
    assert found == {("cpu", 0), *(("cuda", index) for index in range(1001 - KEEP_DEVICES, 1000))}
    assert len(kept(hub)) <= KEEP_DEVICES * KEEP_DEVICE_SAMPLES


def bye(rank: int, reason: EndReason, at_ns: int) -> Bye:
    return Bye(rank=rank, by="rank", reason=reason, at_ns=at_ns)


def test_the_first_failure_is_the_reason_of_the_end() -> None:
    hub = Hub()
    assert hub.end_reason() == "lost"
    keep(hub, bye(0, "finished", 1))
    assert hub.end_reason() == "finished"
    keep(hub, bye(1, "exception", 9))
    keep(hub, bye(2, "killed", 5))
    assert hub.end_reason() == "killed"
