"""A GPU that is made up, with streams that run behind the host, and a job on it. Tests use it, too.

Time only passes on the host's clock (`SimulatedGpu.host`), which the job advances by hand.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from ddpwatch.probe.cuda import CudaClock, CudaEvent
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import StepRecorder

MS = 1_000_000


class SimulatedGpu:
    """Streams on a clock of their own.

    Args:
        offset: Host time minus GPU time at the start (ns).
        ppm: By how much the host's clock is faster.

    Attributes:
        host: The host's time (ns).
        current: The stream that is current.
        queries: How often events were queried.
        broken: Whether every call fails, as after an illegal access.
        stuck: Whether no event is passed any more.
    """

    def __init__(self, offset: int = 0, ppm: float = 0.0) -> None:
        self.start = self.host = 10_000 * MS
        self.offset = offset
        self.ppm = ppm
        self.free: dict[str, int] = defaultdict(int)  # per stream, when it has done its work (host time)
        self.current = "compute"
        self.queries = 0
        self.broken = False
        self.stuck = False

    def work(self, ms: float, stream: str = "compute", after: str = "compute") -> None:
        """Enqueues work on a stream, behind what is on it and on another one."""
        self.free[stream] = max(self.free[stream], self.free[after], self.host) + int(ms * MS)

    def join(self, stream: str) -> None:
        """Lets the compute stream wait for another one."""
        self.free["compute"] = max(self.free["compute"], self.free[stream])

    def synchronise(self) -> None:
        """The host waits until all streams are done."""
        self.host = max(self.host, *self.free.values())

    def gpu_ns(self, host: int) -> int:
        """What the GPU's clock shows at a host time."""
        return host - self.offset - round((host - self.start) * self.ppm * 1e-6)

    def event(self) -> SimulatedEvent:
        """Makes an event."""
        return SimulatedEvent(self)


class SimulatedEvent:
    """An event on a `SimulatedGpu`, with the interface of ``torch.cuda.Event``."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self.at = 0  # host time at which it is passed

    def record(self, stream: str) -> None:
        """Enqueues the event."""
        self.at = max(self.gpu.host, self.gpu.free[stream])

    def query(self) -> bool:
        """Whether it is passed."""
        self.gpu.queries += 1
        if self.gpu.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.at <= self.gpu.host and not self.gpu.stuck

    def elapsed_time(self, end_event: CudaEvent) -> float:
        """Milliseconds by the GPU's clock."""
        assert isinstance(end_event, SimulatedEvent)
        return (self.gpu.gpu_ns(end_event.at) - self.gpu.gpu_ns(self.at)) / MS


class SimulatedJob:
    """A watched job on a simulated GPU.

    Attributes:
        records: The steps, as they are closed.
        issued: How many collectives each process group has issued.
        starts: For each step the host time at which the GPU starts it: when it has ended the one before.
    """

    def __init__(self, offset: int = 0, ppm: float = 0.0) -> None:
        self.gpu = SimulatedGpu(offset, ppm)
        self.capturing = False
        self.records: list[StepRecord] = []
        self.issued: Counter[int] = Counter()
        self.starts: list[int] = []
        self.clock = CudaClock(self.gpu.event, lambda: self.gpu.current, lambda: self.capturing, lambda: self.gpu.host)
        self.recorder = StepRecorder(self.records.append)
        self.recorder.use(self.clock)

    def step(
        self,
        launch_ms: float = 0.01,
        groups: tuple[int, int] = (0, 0),
        collective_ms: float = 15,
        by_host: list[int] | None = None,
        completions: bool = True,
        host_ms: float = 0.0,
    ) -> None:
        """Forward 10 ms, backward 2 × 20 ms with a collective after each, optimizer 5 ms; 70 ms if all goes well.

        Args:
            launch_ms: Host time before the step.
            groups: The collectives' process groups; each is a module's, and has its stream.
            collective_ms: How long a collective takes.
            by_host: When the host has carried out each collective, if it does.
            completions: Whether they are stamped.
            host_ms: Host time that each of the four parts takes to enqueue.
        """
        gpu, recorder = self.gpu, self.recorder
        gpu.host += int(launch_ms * MS)
        self.starts.append(gpu.free["compute"] or gpu.host)
        if not recorder.forward_goes_by():
            recorder.forward_begin()
        self._enqueue(10, host_ms)
        recorder.forward_end()
        recorder.backward_begin()
        for index, group in enumerate(groups):
            self._enqueue(20, host_ms)
            bucket = recorder.bucket_launch(group, index, 64, launch=self.clock()) if recorder.phase else None
            self.issued[group] += 1
            gpu.work(collective_ms, f"group {group}")
            gpu.current = f"group {group}"
            if bucket is not None:
                bucket.group = group
            if bucket is not None and completions:
                recorder.bucket_done(bucket, by_host[index] if by_host else None)
            gpu.current = "compute"
        recorder.backward_compute_end()
        for group in groups:
            gpu.join(f"group {group}")  # DDP lets the compute stream wait for the collectives
        recorder.backward_end()
        recorder.optimizer_begin()
        self._enqueue(5, host_ms)
        recorder.optimizer_end()
        assert recorder.current is not None
        recorder.current.untimed = not completions

    def _enqueue(self, gpu_ms: float, host_ms: float) -> None:
        self.gpu.host += int(host_ms * MS)
        self.gpu.work(gpu_ms)

    @property
    def in_eval(self) -> bool:
        """A heartbeat asks for it; it only trains."""
        return False

    def issued_in(self) -> list[tuple[int, int]]:
        """What a heartbeat says that it has issued."""
        return list(self.issued.items())

    def finish(self) -> None:
        """The host waits for the GPU, and closes the last step."""
        self.gpu.synchronise()
        self.recorder.finish()
