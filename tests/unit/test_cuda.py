"""GPU times from events, on a simulated GPU whose streams run behind the host. Events are queried, never waited for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ddpwatch.analysis.step import figures
from ddpwatch.probe.cuda import BACKLOG, CudaClock, GpuStamp
from ddpwatch.probe.record import StepRecord
from ddpwatch.probe.recorder import StepRecorder

MS = 1_000_000


class Gpu:
    """One compute stream and one communication stream, on a time of their own."""

    def __init__(self, offset: int = 0) -> None:
        self.host = 10_000 * MS
        self.offset = offset  # host time = GPU time + offset
        self.compute = self.comm = 0
        self.current = "compute"  # what the model's device has as its current stream
        self.queries = 0
        self.broken = False  # an error that stays, as after an illegal access
        self.passed: int | None = None  # GPU time up to which events report as passed; None: all

    def work(self, ms: float) -> None:
        """Enqueues compute: it starts when enqueued or when the stream is free, whichever is later."""
        self.compute = max(self.compute, self.host - self.offset) + int(ms * MS)

    def collective(self, ms: float) -> None:
        self.comm = max(self.comm, self.compute, self.host - self.offset) + int(ms * MS)

    def event(self) -> CudaEvent:
        return CudaEvent(self)


class CudaEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = 0

    def record(self, stream: str) -> None:
        now = self.gpu.host - self.gpu.offset
        self.at = max(now, self.gpu.compute if stream == "compute" else self.gpu.comm)

    def query(self) -> bool:
        self.gpu.queries += 1
        if self.gpu.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.gpu.passed is None or self.at <= self.gpu.passed

    def elapsed_time(self, end_event: CudaEvent) -> float:
        return (end_event.at - self.at) / MS


class Rig:
    def __init__(self, offset: int = 0) -> None:
        self.gpu = Gpu(offset)
        self.capturing = False
        self.records: list[StepRecord] = []
        self.clock = CudaClock(self.gpu.event, lambda: self.gpu.current, lambda: self.capturing, lambda: self.gpu.host)
        self.recorder = StepRecorder(self.records.append)
        self.recorder.use(self.clock)

    def step(
        self,
        launch_ms: float = 0.01,
        modules: tuple[int, int] = (0, 0),
        collective_ms: float = 15,
        by_host: list[int] | None = None,
    ) -> None:
        """Forward 10 ms, backward 2 × 20 ms with a collective after each, optimizer 5 ms; enqueued at once.

        ``by_host``: when the host has carried out each collective, if it does.
        """
        gpu, recorder = self.gpu, self.recorder
        gpu.host += int(launch_ms * MS)
        recorder.forward_begin()
        gpu.work(10)
        recorder.forward_end()
        recorder.backward_begin()
        for index in (0, 1):
            gpu.work(20)
            stamp = self.clock()
            bucket = recorder.bucket_launch(modules[index], index, 64, launch=stamp)
            assert bucket is not None
            gpu.collective(collective_ms)
            gpu.current = "comm"
            recorder.bucket_done(bucket, by_host[index] if by_host else None)
            gpu.current = "compute"
        recorder.backward_compute_end()
        gpu.compute = max(gpu.compute, gpu.comm)  # DDP lets the compute stream wait for the collectives
        recorder.backward_end()
        recorder.optimizer_begin()
        gpu.work(5)
        recorder.optimizer_end()


def test_a_step_has_gpu_times() -> None:
    """The host enqueues everything at once; its own stamps would show a step of no length."""
    rig = Rig(offset=3 * MS)
    rig.step()
    rig.recorder.finish()
    step = rig.records[0].message(0, 0)
    spans = {span.phase: (span.start / MS, span.end / MS) for span in step.spans}
    assert spans == {"forward": (0, 10), "backward": (10, 50), "sync": (50, 65), "optimizer": (65, 70)}
    assert [at / MS for at in step.comm_launch] == [30, 50]
    assert [at / MS for at in step.comm_done if at is not None] == [45, 65]
    assert step.duration_ns == 70 * MS


def test_a_collective_starts_when_the_one_before_is_done() -> None:
    rig = Rig()
    rig.step()
    rig.recorder.finish()
    buckets = rig.records[0].buckets
    assert buckets[1].launch == max(buckets[1].ready or 0, buckets[0].done or 0)


def test_a_collective_that_the_host_has_carried_out_keeps_the_hosts_time() -> None:
    """As with Gloo: its thread knows when the result was there, and no stream of the GPU does. Two may run at once."""
    rig = Rig(offset=3 * MS)
    start = rig.gpu.host + 10_000
    rig.step(by_host=[start + 80 * MS, start + 60 * MS])
    rig.recorder.finish()
    step = rig.records[0].message(0, 0)
    assert step.comm_done == [80 * MS, 60 * MS]
    assert step.comm_launch == [30 * MS, 50 * MS]


def test_two_modules_collectives_do_not_wait_for_each_other() -> None:
    rig = Rig()
    rig.step(modules=(0, 1), collective_ms=30)
    rig.recorder.finish()
    assert rig.records[0].message(0, 0).comm_launch == [30 * MS, 50 * MS]


def test_host_time_is_found_although_the_gpu_is_behind() -> None:
    """The GPU's start is idle, so its first event bounds the host time; later steps pile up and inherit the bound."""
    rig = Rig(offset=-7 * MS)
    start = rig.gpu.host + 10_000
    for _ in range(4):
        rig.step()
    rig.recorder.finish()
    starts = [record.start for record in rig.records]
    assert starts[0] == start
    assert all(abs((b - a) - 70 * MS) <= 20_000 for a, b in pairwise(starts))


def test_nothing_waits_for_the_gpu() -> None:
    rig = Rig()
    rig.gpu.passed = -1
    rig.step()
    rig.step()
    assert [record.resolved for record in rig.records] == [False]
    assert not rig.records[0].settled()
    rig.gpu.passed = None
    rig.step()
    assert rig.records[0].settled()


def test_the_backlog_is_bounded_and_what_is_given_up_is_unknown() -> None:
    rig = Rig()
    rig.gpu.passed = -1
    for _ in range(BACKLOG + 3):
        rig.step()
    given_up = [record for record in rig.records if record.resolved]
    assert len(given_up) == len(rig.records) - BACKLOG
    assert all(done is None for record in given_up for done in record.message(0, 0).comm_done)


def test_a_step_that_is_given_up_has_no_figures() -> None:
    """Its stamps show when the host enqueued the work, not how long the GPU took for it."""
    rig = Rig()
    rig.gpu.passed = -1
    for _ in range(BACKLOG + 3):
        rig.step()
    rig.recorder.finish()
    sent = [record.message(0, 0) for record in rig.records]
    assert {step.status for step in sent} == {"unresolved"}
    for step in sent:
        assert (step.duration_ns, step.spans, step.hook_ns, step.comm_launch) == (0, [], [], [])
        assert figures(step).phases_ns == {}
    assert [step.step for step in sent] == list(range(BACKLOG + 3))


def test_an_aborted_step_that_is_given_up_stays_aborted() -> None:
    rig = Rig()
    rig.recorder.forward_begin()
    rig.recorder.forward_end()
    rig.recorder.backward_begin()
    rig.recorder.bucket_launch(0, 0, 64)
    rig.recorder.abort()
    step = rig.records[0].message(0, 0)
    assert (step.status, step.duration_ns, step.spans, step.comm_launch) == ("aborted", 0, [], [])
    assert set(figures(step).phases_ns.values()) == {0}


def test_nothing_is_enqueued_while_a_graph_is_captured() -> None:
    rig = Rig()
    rig.capturing = True
    assert not isinstance(rig.clock(), GpuStamp)
    rig.step()
    rig.recorder.finish()
    assert rig.records[0].message(0, 0).status == "unresolved"
    assert rig.records[0].message(0, 0).comm_done == []


def test_no_event_is_queried_while_a_graph_is_captured() -> None:
    """CUDA refuses to query an event during a capture, and the capture is lost."""
    rig = Rig()
    rig.gpu.passed = -1
    rig.step()
    rig.step()  # closes the first, which the GPU has not passed
    rig.gpu.passed = None
    queries, rig.capturing = rig.gpu.queries, True
    rig.step()
    assert rig.gpu.queries == queries
    rig.capturing = False
    rig.step()
    assert rig.records[0].settled()
    assert rig.records[0].message(0, 0).comm_done != [None, None]


def test_a_sticky_error_gives_up_every_step_and_loses_none() -> None:
    """After an illegal access every CUDA call raises, for the rest of the process."""
    rig = Rig()
    rig.gpu.passed = -1
    for _ in range(3):
        rig.step()
    rig.gpu.broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rig.recorder.finish()
    assert [record.message(0, 0).status for record in rig.records] == ["unresolved"] * 3
    assert all(record.settled() for record in rig.records)
    assert rig.recorder.current is None


def test_events_are_used_again() -> None:
    made: list[CudaEvent] = []
    rig = Rig()
    rig.clock._make_event = lambda: made.append(rig.gpu.event()) or made[-1]  # type: ignore[func-returns-value]
    for _ in range(50):
        rig.step()
    assert len(made) < 3 * 15
