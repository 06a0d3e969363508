"""The hooks on a module that takes itself to be on a GPU, whose events are passed at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.probe.completion import waiting_stream
from ddpwatch.probe.cuda import CudaClock
from ddpwatch.run.blackbox import _BUCKETS_AT
from ddpwatch.sampling.schedule import SamplingSchedule
from ddpwatch.wire.messages import Step
from tests.support.probe import LAYERS, FixedSchedule, Watched, gloo_group

__all__ = ["gloo_group"]


class Event:
    """An event that is passed as soon as it is recorded; it knows its stream."""

    def record(self, stream: str) -> None:
        self.at, self.stream = time.monotonic_ns(), stream

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event.at - self.at) / 1e6


class OnGpu(Watched):
    """A module on the CPU, whose probe sees a GPU."""

    def __init__(self, sampling: SamplingSchedule | None = None) -> None:
        self.stream, self.events = "compute", list[Event]()
        clock = CudaClock(self._event, lambda: self.stream, lambda: False)
        super().__init__(sampling, prepare=self._pretend, gpu=clock)

    def _event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    @staticmethod
    def _pretend(ddp: DistributedDataParallel) -> None:
        ddp.device_type = "cuda"


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """Full, light and bare ones."""
    sampling = FixedSchedule(light=lambda step: step >= 4 and step % 2 == 1, bare=lambda step: step == 8)
    return OnGpu(sampling).train(12)


def test_a_light_step_on_a_gpu_keeps_its_launches(steps: list[Step]) -> None:
    """They are all that lateness needs. Deriving them as on the CPU is impossible: DDP's ready times are the host's."""
    light_steps = [step for step in steps if step.status == "shadow"]
    assert [step.step for step in light_steps] == [5, 7, 9, 11]
    for step in light_steps:
        assert step.comm_label == list(range(LAYERS))
        assert step.comm_launch == step.comm_ready == sorted(step.comm_launch)
        backward = next(span for span in step.spans if span.phase == "backward")
        assert backward.start < step.comm_launch[0] < step.comm_launch[-1] <= backward.end
        assert step.comm_done == [None] * LAYERS
        assert step.clock_error_ns is not None


def test_a_full_step_has_completions_and_a_bare_one_nothing(steps: list[Step]) -> None:
    assert all(None not in step.comm_done for step in steps if step.status == "ok")
    assert all(len(step.comm_launch) == LAYERS for step in steps[2:] if step.status == "ok")
    assert [(step.status, step.comm_launch) for step in steps if step.step == 8] == [("unwatched", [])]


def test_a_bucket_of_a_light_step_is_not_in_flight_for_ever() -> None:
    watched = OnGpu(FixedSchedule(light=lambda step: step > 2))
    watched.train(5)
    assert not any(watched.recorder.box._page[_BUCKETS_AT:])


# -- a stream for the completions ------------------------------------------------------------------------------


class Future:
    """As NCCL's: done when the collective is enqueued; who waits lets its stream wait."""

    def __init__(self, watched: OnGpu, done: bool = True) -> None:
        self.watched, self.done = watched, lambda: done
        self.waiting: list[str] = []

    def wait(self) -> None:
        assert self.done(), "the host would wait"
        self.waiting.append(self.watched.stream)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    """A probe with a stream of its own, in a backward."""
    watched = OnGpu()

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        before, watched.stream = watched.stream, name
        yield
        watched.stream = before

    monkeypatch.setattr(torch.cuda, "stream", stream)
    watched.probe._by_gloo, watched.probe._waiting_stream = False, "own"  # type: ignore[assignment]
    watched.recorder.forward_begin()
    watched.recorder.forward_end()
    watched.recorder.backward_begin()
    return watched


def test_a_completion_is_stamped_on_the_probes_waiting_stream(streams: OnGpu) -> None:
    future = Future(streams)
    entry = streams.probe.after_launch(0, 64, streams.probe.before_launch(), future)
    assert entry is not None
    assert entry.done is not None
    assert future.waiting == ["own"]
    assert [event.stream for event in streams.events[-2:]] == ["compute", "own"]
    assert streams.stream == "compute"
    assert streams.errors == []


def test_the_host_never_waits_for_a_future(streams: OnGpu) -> None:
    """A comm hook's may complete later, when some thread sets its result: then its completion is unknown."""
    future = Future(streams, done=False)
    entry = streams.probe.after_launch(0, 64, streams.probe.before_launch(), future)
    assert future.waiting == []
    assert entry is not None
    assert entry.done is None
    assert streams.errors == []


def test_gloo_never_gets_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for its futures would block the host."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: pytest.fail("a stream"))
    watched = OnGpu()
    assert watched.probe._by_gloo
    assert watched.probe._waiting_stream is None


def test_the_stream_is_of_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    device, priority = waiting_stream(torch.device("cuda", 1))  # type: ignore[misc]
    assert device == torch.device("cuda", 1)
    assert priority < -1  # torch's streams have 0, NCCL's may have -1
