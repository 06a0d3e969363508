"""The fifth view: every device, where its step goes, and its histories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from ddpwatch.tui.models.devices import DeviceLine, step_shares, worst_first
from ddpwatch.tui.models.hosts import host_lines
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.devices import DeviceCard, card_rows, cards_that_fit, paint_devices
from ddpwatch.tui.paint.hosts import paint_hosts
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView
from ddpwatch.wire.messages import DeviceKey


class DevicesView(RunView):
    """GPUs and hosts."""

    NAME = "Devices"
    DEFINITIONS = """\
  v         with several hosts: one host a row, the costliest first, or
            one device a card
  busy      as NVML (or the operating system) counts it: a GPU waiting
            in a collective is busy
  compute   forward, backward and optimizer, as a share of the step
  waiting   exposed communication, as a share of the step
  other     waiting for data, and the time between phases
  throttled what NVML says limits the clocks now
  stolen    CPU time that the hypervisor gave to other guests
  quota     periods in which the cgroup had used up its CPU quota
  pressure  time in which some thread waited for a core, or for memory"""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("v", "hosts", "hosts")]

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.by_host: bool | None = None  # None: if there are several hosts, and not all devices fit
        self.forget()

    def forget(self) -> None:
        self.selected: DeviceKey | None = None
        self.first = 0

    def body(self, width: int, height: int) -> list[Row]:
        if self._shows_hosts(cards_that_fit(width, height)):
            lines = host_lines(self.session.overview)
            self.first = max(min(self.first, len(lines) - height + 1), 0)
            return paint_hosts(lines, (width, height), self.first)
        tall, room = card_rows(len(self.session.overview.devices), width, height)
        devices = self._listed(room)
        index = self._index(devices)
        self.first = min(max(self.first, index - room + 1), index, max(len(devices) - room, 0))
        cards = [self._card(line) for line in devices[self.first : self.first + room]]
        return paint_devices(cards, (width, height), index - self.first, len(devices) - len(cards), tall)

    def _shows_hosts(self, room: int) -> bool:
        overview = self.session.overview
        chosen = len(overview.devices) > room if self.by_host is None else self.by_host
        return chosen and bool(overview.hosts)

    def action_hosts(self) -> None:
        """Shows hosts, or devices."""
        self.by_host = not self._shows_hosts(cards_that_fit(self.size.width, self.body_height))
        self.first = 0
        self.repaint()

    def _listed(self, room: int) -> Sequence[DeviceLine]:
        """Returns the devices in the order in which they are listed."""
        devices = self.session.overview.devices
        return devices if len(devices) <= room else worst_first(devices)

    def _index(self, devices: Sequence[DeviceLine]) -> int:
        keys = [line.key for line in devices]
        return keys.index(self.selected) if self.selected in keys else 0

    def _card(self, line: DeviceLine) -> DeviceCard:
        ranks = [rank.summary for rank in self.session.overview.ranks if rank.rank in line.ranks]
        return DeviceCard(line, len(ranks), step_shares(ranks))

    def scroll_ranks(self, by: int) -> None:
        """Selects another device, or scrolls the hosts."""
        if self._shows_hosts(cards_that_fit(self.size.width, self.body_height)):
            self.first = max(self.first + by, 0)
            self.repaint()
            return
        devices = self._listed(card_rows(len(self.session.overview.devices), self.size.width, self.body_height)[1])
        if devices:
            index = min(max(self._index(devices) + by, 0), len(devices) - 1)
            self.selected = devices[index].key
            self.repaint()
