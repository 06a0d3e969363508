"""The fifth view: every device, where its step goes, and its histories."""

from __future__ import annotations

from ddpwatch.tui.models.devices import DeviceLine, step_shares
from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.devices import DeviceCard, cards_that_fit, paint_devices
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView


class DevicesView(RunView):
    """GPUs and hosts."""

    NAME = "Devices"
    KEYS = (("↑↓", "select"),)
    DEFINITIONS = """\
  busy      as NVML (or the operating system) counts it: a GPU waiting
            in a collective is busy
  compute   forward, backward and optimizer, as a share of the step
  waiting   exposed communication, as a share of the step
  other     waiting for data, and the time between phases
  throttled what NVML says limits the clocks now
  stolen    CPU time that the hypervisor gave to other guests
  quota     periods in which the cgroup had used up its CPU quota
  pressure  time in which some thread waited for a core, or for memory"""

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.forget()

    def forget(self) -> None:
        """See `RunView.forget`."""
        self.selected = 0
        self.first = 0

    def body(self, width: int, height: int) -> list[Row]:
        """See `RunView.body`."""
        devices = self.session.overview.devices
        self.selected = min(self.selected, max(len(devices) - 1, 0))
        room = cards_that_fit(width, height)
        self.first = min(max(self.first, self.selected - room + 1), self.selected)
        cards = [self._card(line) for line in devices[self.first : self.first + room]]
        return paint_devices(cards, (width, height), self.selected - self.first)

    def _card(self, line: DeviceLine) -> DeviceCard:
        ranks = [rank.summary for rank in self.session.overview.ranks if rank.rank in line.ranks]
        return DeviceCard(line, len(ranks), step_shares(ranks))

    def scroll_ranks(self, by: int) -> None:
        """Selects another device."""
        self.selected = min(max(self.selected + by, 0), max(len(self.session.overview.devices) - 1, 0))
        self.repaint()
