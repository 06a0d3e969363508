"""The rules on the whole run, each in a file of its own. ``CONTRIBUTING.md`` says how to add one."""

from __future__ import annotations

from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.rules.buffers import Buffers
from ddpwatch.analysis.diagnosis.rules.exposed_comm import ExposedComm
from ddpwatch.analysis.diagnosis.rules.imbalance import Imbalance
from ddpwatch.analysis.diagnosis.rules.layouts_differ import LayoutsDiffer
from ddpwatch.analysis.diagnosis.rules.memory_growth import MemoryGrowth
from ddpwatch.analysis.diagnosis.rules.not_reduced import NotReduced
from ddpwatch.analysis.diagnosis.rules.ranks_apart import RanksApart
from ddpwatch.analysis.diagnosis.rules.repeated_reduction import RepeatedReduction
from ddpwatch.analysis.diagnosis.rules.run_drift import RunDrift
from ddpwatch.analysis.diagnosis.rules.slow_device import SlowDevice, common_work
from ddpwatch.analysis.diagnosis.rules.slow_input import SlowInput
from ddpwatch.analysis.diagnosis.rules.slow_link import SlowLink
from ddpwatch.analysis.diagnosis.rules.too_many_threads import TooManyThreads
from ddpwatch.analysis.diagnosis.words.sentences import LayerNames
from ddpwatch.analysis.launch_skew import least_exposed
from ddpwatch.wire.messages import Beat, Device, Hello, Layout, Message, RankSample


class Rules:
    """Hands each step to all rules, and collects what they find.

    Args:
        devices: What may be why all ranks are slower, or wait.

    Attributes:
        input: The rule on waits for data.
    """

    def __init__(self, devices: DeviceCauses) -> None:
        self._link = SlowLink(devices)
        self._repeated = RepeatedReduction()
        self._buffers = Buffers()
        self._exposed = ExposedComm(devices, self._link, self._repeated)
        self._imbalance = Imbalance(devices)
        self.input = SlowInput(devices)
        self._drift = RunDrift(devices)
        self._device = SlowDevice(devices)
        self._threads = TooManyThreads(devices)
        self._apart = RanksApart()
        self._reduced = NotReduced()
        self._layouts = LayoutsDiffer()
        self._memory = MemoryGrowth()

    def apply_message(self, message: Message) -> None:
        """Takes any message but steps."""
        if isinstance(message, Layout):
            self._layouts.add_layout(message)
        elif isinstance(message, Hello):
            self._threads.add_hello(message)
            self._memory.add_hello(message)
        elif isinstance(message, (Beat, RankSample, Device)):
            self._memory.apply_message(message)

    @property
    def reduces_again(self) -> bool:
        """True if gradients are usually reduced more than once per update."""
        return self._repeated.is_usual

    def add_step(self, facts: StepFacts) -> None:
        """Takes the next step."""
        across, split = facts.across, facts.split
        is_measured = across.counted and across.full and bool(split.total)
        is_measured = is_measured and None not in [one.figures.comm_ns for one in across.all_facts().values()]
        if is_measured:
            self._link.add_step(across)
        self._link.count(split)
        least = least_exposed(across.all_facts().values()) if is_measured else None
        self._repeated.add_step(facts, least)
        self._buffers.add_step(facts)
        self._exposed.add_step(facts, least)
        self.input.add_step(facts)  # before who looks at waits by turns: it says what some are for
        self._imbalance.add_step(facts)
        self._threads.add_step(facts)
        self._apart.add_step(facts)
        self._reduced.add_step(across)
        self._device.add_split(split, common_work(across) if across.counted else None)
        if across.counted:
            self._drift.add_step(split.step, split.own_ns, split.start_ns)

    def incidents(self, names: LayerNames | None) -> list[Incident]:
        """Returns all that were found."""
        return [
            *self._exposed.incidents(names),
            *self._repeated.incidents(),
            *self._buffers.incidents(),
            *self._imbalance.incidents(),
            *self.input.incidents(),
            *self._link.incidents(),
            *self._drift.incidents(),
            *self._device.incidents(),
            *self._threads.incidents(),
            *self._apart.incidents(),
            *self._reduced.incidents(),
            *self._layouts.incidents(),
            *self._memory.incidents(),
        ]
