"""What collectors and viewers keep of device samples, within a limit that all devices share."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ddpwatch.analysis.retention import KEEP_SAMPLES
from ddpwatch.wire.messages import DeviceKey

GONE_NS = 600_000_000_000  # without a sample, before a new device needs its room
SHOWN_S = 120  # what views show of the past; where there is no room for all samples of it, fewer span it
_Sample = TypeVar("_Sample")


class DeviceSamples(Generic[_Sample]):
    """The newest samples of each device.

    Every device has the same room. Where that is less than `SHOWN_S`, samples are kept further apart, so that they
    still span this time; the newest one is always kept.

    Args:
        limit: What all samples may take together.
        size_of: What a sample takes.

    Attributes:
        by_device: The samples, oldest first; the device that was sampled last comes last.
        size: What they take.
    """

    def __init__(self, limit: int, size_of: Callable[[_Sample], int]) -> None:
        self.by_device: OrderedDict[DeviceKey, deque[_Sample]] = OrderedDict()  # whose first key is found at once
        self.size = 0
        self._limit, self._size_of = limit, size_of
        self._received_ns: dict[DeviceKey, deque[int]] = {}

    def add_sample(self, key: DeviceKey, sample: _Sample, received_ns: int) -> None:
        """Adds a device's newest sample."""
        if key not in self.by_device:
            self._drop_devices_before(received_ns - GONE_NS)
        samples = self.by_device.setdefault(key, deque())
        times = self._received_ns.setdefault(key, deque())
        self.by_device.move_to_end(key)
        size = self._size_of(sample)
        room = self._limit // (len(self.by_device) * size)
        if room < SHOWN_S and len(times) > 1 and (times[-1] - times[-2]) * room < SHOWN_S * 10**9:
            self.size -= self._size_of(samples.pop())
            times.pop()
        samples.append(sample)
        times.append(received_ns)
        self.size += size
        while len(samples) > max(min(room, KEEP_SAMPLES), 1):
            self._drop_oldest_sample(key)
        while self.size > self._limit and len(self.by_device) > 1:
            self._drop_oldest_sample(next(iter(self.by_device)))

    def _drop_devices_before(self, at_ns: int) -> None:
        """Drops the devices without a sample since then."""
        while self.by_device and self._received_ns[oldest := next(iter(self.by_device))][-1] < at_ns:
            for _ in range(len(self.by_device[oldest])):
                self._drop_oldest_sample(oldest)

    def _drop_oldest_sample(self, key: DeviceKey) -> None:
        """Drops a device's oldest sample, and with its last one the device."""
        samples, times = self.by_device[key], self._received_ns[key]
        self.size -= self._size_of(samples.popleft())
        times.popleft()
        if not samples:
            del self.by_device[key], self._received_ns[key]
