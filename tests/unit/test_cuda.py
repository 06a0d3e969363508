"""GPU times from events, on a simulated GPU whose streams run behind the host. Events are queried, never waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from ddpwatch.analysis.step import figures
from ddpwatch.probe import cuda
from ddpwatch.probe.cuda import GpuStamp
from ddpwatch.sampling.schedule import SamplingSchedule
from ddpwatch.wire.messages import decode, encode
from tests.support.simulated_gpu import MS, SimulatedEvent, SimulatedGpu, SimulatedJob

US = 1_000
TICK_NS = 2_000  # what a GPU time may be off by, because an event is


def in_ms(stamps: list[int | None]) -> list[float | None]:
    return [None if at is None else round(at / MS, 2) for at in stamps]


def test_a_step_has_gpu_times() -> None:
    """The host enqueues everything at once; its own stamps would show a step of no length."""
    job = SimulatedJob(offset=3 * MS)
    job.step()
    job.finish()
    step = job.records[0].message(0, 0)
    spans = {span.phase: (span.start / MS, span.end / MS) for span in step.spans}
    assert spans == {"forward": (0, 10), "backward": (10, 50), "sync": (50, 65), "optimizer": (65, 70)}
    assert in_ms(step.comm_launch) == [30, 50]
    assert in_ms(step.comm_done) == [45, 65]
    assert step.duration_ns == 70 * MS
    assert step.clock_error_ns is not None
    assert abs(step.start_ns - job.starts[0]) <= step.clock_error_ns


def test_a_collective_starts_when_its_group_is_done_with_the_one_before() -> None:
    """It was launched, and ready, before."""
    job = SimulatedJob()
    job.step(collective_ms=30)
    job.finish()
    step = job.records[0].message(0, 0)
    assert in_ms(step.comm_launch) == in_ms(step.comm_ready) == [30, 50]
    assert in_ms(step.comm_start) == [30, 60]
    assert in_ms(step.comm_done) == [60, 90]


def test_collectives_of_two_groups_do_not_wait_for_each_other() -> None:
    """Those of two modules on one group do: a process group has one stream."""
    job = SimulatedJob()
    job.step(groups=(0, 1), collective_ms=30)
    job.finish()
    step = job.records[0].message(0, 0)
    assert in_ms(step.comm_start) == [30, 50]
    assert in_ms(step.comm_done) == [60, 80]


def test_two_modules_on_one_group_share_its_stream() -> None:
    job = SimulatedJob()
    job.step(collective_ms=30)
    for module, bucket in enumerate(job.recorder.current.buckets):  # type: ignore[union-attr]
        bucket.module = module
    job.finish()
    assert in_ms(job.records[0].message(0, 0).comm_start) == [30, 60]


def test_a_collective_that_the_host_has_carried_out_keeps_the_hosts_time() -> None:
    """As with Gloo: its thread knows when the result was there, and no stream of the GPU does. Two may run at once."""
    job = SimulatedJob(offset=3 * MS)
    start = job.gpu.host + 10_000
    job.step(by_host=[start + 80 * MS, start + 60 * MS])
    job.finish()
    step = job.records[0].message(0, 0)
    assert in_ms(step.comm_done) == [80, 60]
    assert in_ms(step.comm_launch) == [30, 50]
    assert step.comm_start == []


def test_what_the_host_has_carried_out_bounds_the_clock() -> None:
    """The GPU had passed the launch by then; its event is only queried after the step."""
    job = SimulatedJob()
    start = job.gpu.host + 10_000
    job.step(by_host=[start + 30 * MS + 50 * US, start + 90 * MS])
    job.gpu.host += 500 * MS
    job.finish()
    assert job.records[0].clock_error_ns < 100 * US  # type: ignore[operator]


def test_a_step_without_completions_keeps_its_launches() -> None:
    """A light step: launches need one event per bucket, and no callback."""
    job = SimulatedJob()
    job.step(completions=False)
    job.finish()
    step = job.records[0].message(0, 0)
    assert in_ms(step.comm_launch) == in_ms(step.comm_ready) == [30, 50]
    assert (step.comm_done, step.comm_start) == ([None, None], [])


@pytest.mark.parametrize("ppm", [-50, 0, 10, 50])
def test_the_host_time_does_not_slide_while_the_gpu_is_behind(ppm: float) -> None:
    """The GPU is idle at the start only. Then the host is ahead by three steps, as a launch queue lets it be."""
    job = SimulatedJob(offset=-7 * MS, ppm=ppm)
    for _ in range(500):
        job.step()
        job.gpu.host = max(job.gpu.host, job.gpu.free["compute"] - 200 * MS)
    job.finish()
    assert all(record.status == "ok" for record in job.records)
    for record, start in zip(job.records, job.starts, strict=True):
        assert abs(record.start - start) <= record.clock_error_ns  # type: ignore[operator]
    if not ppm:
        assert max(abs(record.start - start) for record, start in zip(job.records, job.starts, strict=True)) < 100 * US
        assert all(abs(b.start - a.end) <= TICK_NS for a, b in pairwise(job.records))


@pytest.mark.parametrize("ppm", [-50, 10, 50])
def test_the_host_time_is_known_where_the_host_waits_for_the_gpu(ppm: float) -> None:
    """As in every `loss.item()`; steps of five seconds once slid by 15 ms in 500 steps, at 10 ppm."""
    job = SimulatedJob(ppm=ppm)
    for _ in range(200):
        job.step(host_ms=1)
        job.gpu.synchronise()
        job.gpu.host += 5000 * MS
    job.finish()
    for record, start in zip(job.records[2:], job.starts[2:], strict=True):
        assert abs(record.start - start) <= record.clock_error_ns <= 600 * US  # type: ignore[operator]
    assert all(record.clock_error_ns <= 100 * US for record in job.records[10:])  # type: ignore[operator]


class MostUnwatched(SamplingSchedule):
    """Watches two steps in 64."""

    def is_bare(self, step: int) -> bool:
        """Whether it is none of these."""
        return step % 64 > 1

    def bare_until(self, step: int) -> int:
        """When one of these comes."""
        return step - step % 64 + 64


def stretching(**options: float) -> SimulatedJob:
    """A job whose bare steps form stretches, of one step in real life, as time is made up."""
    job = SimulatedJob(**options)
    job.recorder.use(sampling=MostUnwatched())
    return job


def test_steps_of_a_stretch_have_gpu_times_each() -> None:
    """The host is ahead, and then it waits: its own times would say that most steps take nothing."""
    job = stretching(offset=5 * MS)
    for step in range(192):
        job.step()
        if step % 16 == 0:
            job.gpu.synchronise()
    job.finish()
    steps = [step for record in job.records for step in record.messages(0, 0)]
    assert [step.step for step in steps] == list(range(192))
    assert len(job.records) < 30
    assert all(abs(step.duration_ns - 70 * MS) < 20 * US for step in steps if step.status == "unwatched")
    for step in steps:
        assert abs(step.start_ns - job.starts[step.step]) <= (step.clock_error_ns or 0) + TICK_NS


def test_a_stretch_that_is_given_up_loses_no_step() -> None:
    job = stretching()
    for _ in range(40):
        job.step()
    job.gpu.stuck = True
    for _ in range(20):
        job.step()
    job.finish()
    steps = [step for record in job.records for step in record.messages(0, 0)]
    assert [step.step for step in steps] == list(range(60))
    assert {step.status for step in steps if step.step > 40} == {"unresolved"}
    assert not any(step.duration_ns for step in steps if step.status == "unresolved")


def test_steps_that_are_given_up_leave_what_is_known_of_the_clock() -> None:
    """A graph is captured, or the backlog is full: the next step continues the same time line."""
    job = SimulatedJob(offset=5 * MS)
    for number in range(30):
        job.capturing = number % 3 == 1
        job.step(host_ms=1)
        if number == 0:
            job.gpu.synchronise()
    job.capturing = False
    job.finish()
    assert {record.status for record in job.records} == {"ok", "unresolved"}
    for record, start in zip(job.records, job.starts, strict=True):
        if record.status == "ok":
            assert abs(record.start - start) <= min(record.clock_error_ns or 0, MS)
    assert job.clock._map.epoch == 0


def test_nothing_waits_for_the_gpu() -> None:
    job = SimulatedJob()
    job.gpu.stuck = True
    job.step()
    job.step()
    assert [record.resolved for record in job.records] == [False]
    assert not job.records[0].settled()
    job.gpu.synchronise()
    job.gpu.stuck = False
    job.step()
    assert job.records[0].settled()


def test_events_are_queried_once_and_those_not_passed_hardly_more() -> None:
    """A step of 11 stamps. Every poll used to query all events of the oldest step that waits."""
    job = SimulatedJob()
    for _ in range(4):
        job.step(host_ms=0.1)  # far behind
    before = job.gpu.queries
    for _ in range(10):
        job.clock.poll()
    assert job.gpu.queries == before + 10
    assert before <= 4 * 12 * 2
    job.finish()
    assert job.gpu.queries <= 4 * 12 * 2 + 10


@pytest.mark.parametrize("ahead", [9, 40])
def test_every_step_is_resolved_however_many_steps_the_host_is_ahead(ahead: int) -> None:
    """With few launches a step, or graphs that are replayed, a host is tens of steps ahead for the whole run."""
    job = SimulatedJob()
    for _ in range(200):
        job.step()
        job.gpu.host = max(job.gpu.host, job.gpu.free["compute"] - ahead * 75 * MS)
    waiting = sum(not record.resolved for record in job.records)
    job.finish()
    assert waiting >= ahead - 1
    assert {record.status for record in job.records} == {"ok"}


def test_what_waits_is_bounded_and_what_is_given_up_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that hangs while the host goes on, as in replays of a graph: memory does not grow."""
    monkeypatch.setattr(cuda, "MAX_AHEAD", 50)  # events: a step has 11 of its own
    job = SimulatedJob()
    job.gpu.stuck = True
    for _ in range(40):
        job.step()
    assert len(job.clock._ahead) == 50
    assert sum(not record.resolved for record in job.records) <= 6
    given_up = [record for record in job.records if record.resolved]
    assert all(done is None for record in given_up for done in record.message(0, 0).comm_done)


def test_a_step_that_is_given_up_has_no_figures() -> None:
    """Its stamps show when the host enqueued the work, not how long the GPU took for it."""
    job = SimulatedJob()
    job.gpu.stuck = True
    for _ in range(11):
        job.step()
    job.recorder.finish()
    sent = [record.message(0, 0) for record in job.records]
    assert {step.status for step in sent} == {"unresolved"}
    assert [decode(encode(step)) for step in sent] == sent
    for step in sent:
        assert (step.duration_ns, step.spans, step.hook_ns, step.comm_launch) == (0, [], [], [])
        assert figures(step).phases_ns == {}
    assert [step.step for step in sent] == list(range(11))


def test_an_aborted_step_that_is_given_up_stays_aborted() -> None:
    job = SimulatedJob()
    job.recorder.forward_begin()
    job.recorder.forward_end()
    job.recorder.backward_begin()
    job.recorder.bucket_launch(0, 0, 64)
    job.recorder.abort()
    step = job.records[0].message(0, 0)
    assert (step.status, step.duration_ns, step.spans, step.comm_launch) == ("aborted", 0, [], [])
    assert set(figures(step).phases_ns.values()) == {0}


def test_nothing_is_enqueued_while_a_graph_is_captured() -> None:
    job = SimulatedJob()
    job.capturing = True
    assert not isinstance(job.clock(), GpuStamp)
    job.step()
    job.finish()
    assert job.records[0].message(0, 0).status == "unresolved"
    assert job.records[0].message(0, 0).comm_done == []


def test_a_captured_graph_is_known_until_a_step_ends() -> None:
    """Its replays run no hook, so the rank seems to stand still."""
    job = SimulatedJob()
    job.step()
    assert job.clock.captured_ns is None
    job.capturing = True
    job.step()
    assert job.clock.captured_ns is not None
    job.capturing = False
    job.step()
    assert job.clock.captured_ns is None


def test_no_event_is_queried_while_a_graph_is_captured() -> None:
    """CUDA refuses to query an event during a capture, and the capture is lost."""
    job = SimulatedJob()
    job.gpu.stuck = True
    job.step()
    job.step()  # closes the first, which the GPU has not passed
    job.gpu.synchronise()
    job.gpu.stuck = False
    queries, job.capturing = job.gpu.queries, True
    job.step()
    assert job.gpu.queries == queries
    job.capturing = False
    job.step()
    assert job.records[0].settled()
    assert job.records[0].message(0, 0).comm_done != [None, None]


def test_events_are_queried_in_the_context_that_another_threads_capture_needs() -> None:
    """A capture in CUDA's default mode is lost if another thread queries an event."""
    job = SimulatedJob()
    inside: list[bool] = []

    @contextmanager
    def beside_captures() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    outside: list[SimulatedEvent] = []
    job.clock._beside_captures = beside_captures
    job.clock._make_event = lambda: CheckedEvent(job.gpu, lambda event: inside or outside.append(event))
    for _ in range(5):
        job.step()
        job.gpu.synchronise()
    job.finish()
    assert job.gpu.queries > 20
    assert not outside


class CheckedEvent(SimulatedEvent):
    """An event that says when something is asked of it."""

    def __init__(self, gpu: SimulatedGpu, asked: Callable[[SimulatedEvent], object]) -> None:
        super().__init__(gpu)
        self.asked = asked

    def query(self) -> bool:
        self.asked(self)
        return super().query()

    def elapsed_time(self, end_event: cuda.CudaEvent) -> float:
        self.asked(self)
        return super().elapsed_time(end_event)


def test_a_sticky_error_gives_up_every_step_and_loses_none() -> None:
    """After an illegal access every CUDA call raises, for the rest of the process."""
    job = SimulatedJob()
    job.gpu.stuck = True
    for _ in range(3):
        job.step()
    job.gpu.broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        job.recorder.finish()
    assert [record.message(0, 0).status for record in job.records] == ["unresolved"] * 3
    assert all(record.settled() for record in job.records)
    assert job.recorder.current is None


def test_events_are_used_again() -> None:
    made: list[SimulatedEvent] = []
    job = SimulatedJob()
    job.clock._make_event = lambda: made.append(job.gpu.event()) or made[-1]  # type: ignore[func-returns-value]
    for _ in range(50):
        job.step()
        job.gpu.host = max(job.gpu.host, job.gpu.free["compute"] - 100 * MS)
    assert len(made) < 4 * 15


def test_a_validation_that_waits_for_data_is_sent_and_spoils_no_step() -> None:
    """Its moments are the host's: a GPU's stamp cannot be sent. The step after it starts when the GPU comes there."""
    job = SimulatedJob()
    validations: list[tuple[int, int]] = []
    job.recorder._on_validation = lambda start, end: validations.append((start, end))

    def loader() -> None:
        """A reference to the same iterator each time."""

    job.step()
    for _ in range(3):
        job.recorder.data_wait(loader, job.gpu.host, job.gpu.host)
        job.recorder.validation_begin(in_eval=True)
        job.recorder.validation_end()
    job.recorder.data_wait(loader, job.gpu.host, job.gpu.host)  # its end
    job.step()
    job.finish()
    assert [record.status for record in job.records] == ["ok", "ok"]
    assert [type(at) for times in validations for at in times] == [int, int]
