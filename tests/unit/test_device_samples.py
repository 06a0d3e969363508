"""Samples of devices within one limit: what goes first, and at which cost."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from ddpwatch.analysis.device_samples import GONE_NS, SHOWN_S, DeviceSamples
from ddpwatch.analysis.retention import KEEP_SAMPLES
from ddpwatch.wire.messages import DeviceKey

SECOND_NS = 10**9


def key(index: int) -> DeviceKey:
    return "node", "boot", "cuda", index


def sampled(devices: int, seconds: Iterable[int], limit: int) -> DeviceSamples[int]:
    """A sample of each device every second: its time in s."""
    samples = DeviceSamples[int](limit, lambda _: 1)
    for second in seconds:
        for index in range(devices):
            samples.add_sample(key(index), second, second * SECOND_NS)
    return samples


def test_a_few_devices_keep_every_sample_of_ten_minutes() -> None:
    samples = sampled(3, range(KEEP_SAMPLES + 50), 1 << 16)
    assert [list(found) for found in samples.by_device.values()] == [list(range(50, KEEP_SAMPLES + 50))] * 3
    assert samples.size == 3 * KEEP_SAMPLES


def test_with_room_for_what_views_show_it_is_every_sample() -> None:
    samples = sampled(10, range(500), 10 * SHOWN_S)
    assert [list(found) for found in samples.by_device.values()] == [list(range(500 - SHOWN_S, 500))] * 10


@pytest.mark.parametrize("room", [2, 7, 60, 119])
def test_with_less_fewer_samples_span_as_long(room: int) -> None:
    samples = sampled(20, range(1000), 20 * room + 3)
    for found in samples.by_device.values():
        assert len(found) == room
        assert found[-1] == 999
        assert SHOWN_S * (room - 1) / room <= found[-1] - found[0] + SHOWN_S / room <= 2.1 * SHOWN_S
    assert samples.size == 20 * room


def test_more_devices_than_the_limit_lose_those_without_a_sample_for_the_longest_time() -> None:
    samples = DeviceSamples[int](100, lambda _: 1)
    for second in range(300):
        samples.add_sample(key(second), second, second * SECOND_NS)
        samples.add_sample(key(-1), second, second * SECOND_NS)
    assert list(samples.by_device) == [*map(key, range(201, 300)), key(-1)]
    assert samples.size == 100


def test_a_device_that_is_gone_gives_its_room_to_new_ones() -> None:
    samples = sampled(3, range(5), 1000)
    samples.add_sample(key(1), 10, 10 * SECOND_NS)
    samples.add_sample(key(7), 11, GONE_NS + 5 * SECOND_NS)
    assert list(samples.by_device) == [key(1), key(7)]
    assert samples.size == 7


def test_what_samples_take_is_counted() -> None:
    samples = DeviceSamples[bytes](1000, len)
    for second in range(200):
        for index in range(5):
            samples.add_sample(key(index), bytes(10 + index), second * SECOND_NS)
    assert samples.size == sum(len(each) for found in samples.by_device.values() for each in found) <= 1000
    assert {len(found) for found in samples.by_device.values()} == {20, 18, 16, 15, 14}


def test_a_sample_costs_the_same_however_many_devices_there_are() -> None:
    """Also beyond the limit, where each new sample drops a device."""

    def cost(devices: int) -> float:
        before = time.process_time()
        sampled(devices, range(3), 6_000)
        return (time.process_time() - before) / devices

    few, many = (min(cost(devices) for _ in range(3)) for devices in (1_000, 8_000))
    assert many < 4 * few
