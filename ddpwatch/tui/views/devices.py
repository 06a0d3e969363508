"""The fifth view: every device, what its busy time is spent on, and its histories."""

from __future__ import annotations

from ddpwatch.tui.paint.canvas import Row
from ddpwatch.tui.paint.devices import CARD_ROWS, paint_machines
from ddpwatch.tui.session import ViewerSession
from ddpwatch.tui.views.base import RunView


class DevicesView(RunView):
    """GPUs and hosts."""

    NAME = "Devices"
    KEYS = (("↑↓", "select"),)
    DEFINITIONS = """\
  busy      what NVML (or the operating system) counts: a GPU that waits
            in a collective counts as busy
  compute   forward, backward and optimizer, as a share of the step
  waiting   exposed communication, likewise
  other     input, and what is between"""

    def __init__(self, session: ViewerSession) -> None:
        super().__init__(session)
        self.forget()

    def forget(self) -> None:
        """See `RunView.forget`."""
        self.selected = 0
        self.first = 0

    def body(self, width: int, height: int) -> list[Row]:
        """See `RunView.body`."""
        overview = self.session.overview
        devices = overview.devices
        self.selected = min(self.selected, max(len(devices) - 1, 0))
        room = max((height - 1) // CARD_ROWS if width >= 120 else (height - 13) // CARD_ROWS, 1)
        self.first = min(max(self.first, self.selected - room + 1), self.selected)
        ranks = [[row for row in overview.ranks if row.rank in device.ranks] for device in devices[: self.first + room]]
        return paint_machines(devices, ranks, (width, height), self.selected, self.first)

    def scroll_ranks(self, by: int) -> None:
        """Another device."""
        self.selected = min(max(self.selected + by, 0), max(len(self.session.overview.devices) - 1, 0))
        self.repaint()
