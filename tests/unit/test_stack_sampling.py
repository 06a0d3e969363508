"""A sampling thread: what it sees of a thread, that it holds nothing, ends by itself, and keeps its errors."""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

from ddpwatch.common.units import NS_PER_S
from ddpwatch.probe import stack_sampling
from ddpwatch.probe.guard import Guard
from ddpwatch.probe.known_group import others_rest
from ddpwatch.probe.recorder import StepRecorder
from ddpwatch.probe.stack_sampling import (
    COST,
    LONGEST_S,
    MOST_LINES,
    PERIOD_S,
    SampleCounts,
    StackSampling,
    module_names,
    period_s,
)
from ddpwatch.probe.stacks import dump
from ddpwatch.sampling.lease import FULL_PPM, Lease, LeasePage
from ddpwatch.sampling.stack_order import OTHER_ORDER, PARTIAL, RUN_ENDED, StackOrder, parse_topic
from ddpwatch.wire.messages import StackSamples, decode, encode
from tests.support.jobs import wait_for

ORDER = StackOrder(77, 3, 0, 2, 5)


class Held(nn.Module):
    """Stands still in its forward, in the file of the test."""

    def __init__(self, held: Callable[[], object]) -> None:
        super().__init__()
        self.held = held

    def __getattr__(self, name: str) -> object:
        assert name not in ("self", "_modules", "__dict__"), "it is asked for its attributes"
        return super().__getattr__(name)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.held()
        return batch


@contextmanager
def held_thread(run: Callable[[Callable[[], object]], object], start: Callable[..., object]) -> Iterator[int]:
    """A thread that stands still where it calls what it is given; its ident."""
    here, go, ident = threading.Event(), threading.Event(), []

    def hold() -> None:
        ident.append(threading.get_ident())
        here.set()
        go.wait()

    start(lambda: run(hold))
    here.wait()
    try:
        yield ident[0]
    finally:
        go.set()


def by_threading(run: Callable[[], object]) -> None:
    threading.Thread(target=run, daemon=True).start()


def by_torch(run: Callable[[], object]) -> None:
    """A thread that Python has not started, as autograd's."""
    _thread.start_new_thread(run, ())


def frame_of(ident: int) -> FrameType:
    return sys._current_frames()[ident]


def test_a_sample_has_the_user_s_line_and_the_module_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[nn.Module] = []

    def run(hold: Callable[[], object]) -> None:
        models.append(nn.Sequential(nn.Identity(), nn.Sequential(Held(hold))))
        models[0](torch.zeros(1))

    names: list[nn.Module] = []  # asked for once all samples are taken: thousands of modules take milliseconds
    monkeypatch.setattr(stack_sampling, "module_names", lambda model: names.append(model) or module_names(model))
    samples = SampleCounts(0)
    with held_thread(run, by_threading) as ident:
        for slot in (7, 7, 8):
            samples.add_stack(frame_of(ident), "forward", slot)
        assert names == []
    (line,) = samples.lines()
    assert len(names) == 1
    assert (line.phase, line.module, line.file, line.function) == ("forward", "1.0", "test_stack_sampling.py", "hold")
    assert line.inner.startswith("threading.py:")
    assert list(samples.slots) == [7, 8]
    assert [samples.columns[0], samples.columns[1]] == [[0, 1], [0, 0]]
    assert sum(samples.columns[2]) == samples.end_ns
    assert samples.count == 3


def test_modules_have_the_names_that_they_have_without_wrappers() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    ddp = object.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.add_module("module", inner)
    names = module_names(ddp)
    assert [names[id(each)] for each in (ddp, inner, inner[0], inner[1], inner[1][0])] == [
        "DistributedDataParallel", "Sequential", "0", "1", "1.0",
    ]  # fmt: skip
    shared = nn.ReLU()
    assert len(module_names(nn.Sequential(shared, shared))) == 2


def sample(ident: int) -> None:
    SampleCounts(0).add_stack(stack_sampling._stack(ident), "forward", 1)


@pytest.mark.parametrize("look", [sample, dump, lambda _: others_rest()], ids=["sample", "dump", "others_rest"])
def test_nothing_that_a_frame_owns_lives_longer(look: Callable[[int], object]) -> None:
    """Not even until garbage is collected: a file that nobody has closed would lose its last lines."""
    gone: list[weakref.ref[torch.Tensor]] = []

    def run(hold: Callable[[], object]) -> None:
        def work() -> None:
            batch = torch.zeros(1)
            gone.append(weakref.ref(batch))
            nn.Sequential(Held(hold))(batch)

        work()
        done.set()

    done = threading.Event()
    gc.disable()
    try:
        with held_thread(run, by_threading) as ident:
            for _ in range(3):
                look(ident)
        done.wait()
        assert gone[0]() is None
    finally:
        gc.enable()


def test_in_a_backward_the_thread_counts_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch has started: on GPUs, custom functions run there."""
    monkeypatch.setattr(stack_sampling, "_TORCH", __file__)
    monkeypatch.setattr(stack_sampling, "_ENGINE", threading.__file__)  # where both stand

    def call(hold: Callable[[], object]) -> None:
        hold()

    with held_thread(call, by_threading) as waiting:
        assert stack_sampling._stack(waiting) is frame_of(waiting)
        with held_thread(call, by_torch) as other:
            assert stack_sampling._stack(waiting) is frame_of(other)
    assert stack_sampling._stack(2**40) is None


def test_many_lines_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_sampling, "MOST_LINES", 2)
    samples, here = SampleCounts(0), sys._getframe()
    for number in range(5):
        samples.add_stack(here, f"phase{number}"[:6], number)
    for phase in ("forward", "backward", "optimizer", "sync"):
        samples.add_stack(here, phase, 9)
    assert MOST_LINES > 2
    lines = samples.lines()
    assert [line.function for line in lines].count("") == len(lines) - 2
    assert all(line.phase for line in lines)


# -- orders ------------------------------------------------------------------------------------------------------------


class Rank:
    """A rank's part, without a sender; `steps` lets it take steps until an order is done."""

    def __init__(self, tmp_path: Path, rank: int = 3) -> None:
        self.page = LeasePage(tmp_path / "r.lease")
        self.recorder = StepRecorder(lambda record: None)
        self.recorder.lease.open(tmp_path / "r.lease")
        self.posted: list[StackSamples] = []
        self.errors: list[tuple[str, Exception]] = []
        self.done = threading.Event()
        guard = Guard(lambda feature, error: (self.errors.append((feature, error)), self.done.set()))
        self.sampling = StackSampling(rank, self.recorder, self._post, guard)

    def _post(self, samples: StackSamples) -> None:
        self.posted.append(samples)
        self.done.set()

    def follow(self, order: StackOrder) -> None:
        """Takes an order; the thread runs then."""
        self.page.order(order)
        self.sampling.follow_order()
        wait_for(lambda: order.first_slot in self.recorder.lease.sampled or self.done.is_set(), "the thread runs")

    def step_until_done(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes steps; from the ordered ones, it goes on when they have been sampled."""
        calls: list[int] = []
        slot = 0
        real = stack_sampling._stack
        monkeypatch.setattr(stack_sampling, "_stack", lambda thread: calls.append(slot) or real(thread))
        while not self.done.wait(0.01):
            if slot not in self.recorder.lease.sampled or calls.count(slot) > 1:
                slot += 1
                self.recorder.begin_update(slot, "input", 0)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_it_samples_the_ordered_steps_once_and_ends(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.follow(ORDER)
    rank.sampling.follow_order()
    rank.step_until_done(monkeypatch)
    (samples,) = rank.posted
    assert decode(encode(samples)) == samples
    assert (samples.rank, samples.order, samples.explained, samples.peer) == (3, 77, 3, 0)
    assert set(samples.slots) <= {5, 6}
    assert samples.count
    assert sum(samples.sample_ns) == samples.end_ns - samples.start_ns
    assert samples.cpu_ns
    assert (samples.ordered, samples.cut_short) == (ORDER.steps - PARTIAL, "")
    assert rank.errors == []
    assert not rank.recorder.lease.sampled
    rank.sampling.follow_order()
    assert not [thread for thread in threading.enumerate() if thread.name == "ddpwatch-stacks"]


def test_the_sampled_steps_are_full_here_and_no_others(rank: Rank) -> None:
    lease = rank.recorder.lease
    rank.follow(ORDER)
    assert [lease.budget_ppm(slot, 0) for slot in range(4, 8)] == [0, FULL_PPM, FULL_PPM, 0]
    rank.sampling.stop()
    assert rank.done.wait(60)


def test_where_samples_cost_much_there_are_fewer(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    assert period_s(0, 0) == PERIOD_S
    second = NS_PER_S
    assert samples_in(3 * second, 40_000) == pytest.approx(3 / PERIOD_S, rel=0.02)
    assert samples_in(3 * second, 140_000) == pytest.approx(3 * COST * second / 140_000, rel=0.05)
    after_the_first = 3 * COST * second - 2_000_000  # fewer, where the mean of a few counted
    assert samples_in(3 * second, 140_000, first_ns=2_000_000) == pytest.approx(after_the_first / 140_000, rel=0.05)
    assert samples_in(3 * second, 10_000_000) >= 3 / LONGEST_S - 1
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(stack_sampling, "period_s", lambda *cpu_and_elapsed: seen.append(cpu_and_elapsed) or 0.0)
    rank.follow(ORDER)
    rank.step_until_done(monkeypatch)
    costs, elapsed = zip(*seen, strict=True)
    assert costs[0] < costs[-1] <= (rank.posted[0].cpu_ns or 0)
    assert elapsed[0] < elapsed[-1]


def samples_in(ns: int, each_ns: int, first_ns: int = 0) -> int:
    """How many samples are taken in a time, if each costs as much, and the first one more."""
    now, cpu, count = 0, 0, 0
    while (now := now + int(period_s(cpu, now) * NS_PER_S)) < ns:
        cpu += each_ns if count else max(each_ns, first_ns)
        count += 1
    return count


@pytest.mark.parametrize("order", [None, StackOrder(77, 1, 2, 2, 5)])
def test_other_ranks_sample_nothing(order: StackOrder | None, rank: Rank) -> None:
    rank.page.order(order)
    rank.sampling.follow_order()
    assert not [thread for thread in threading.enumerate() if thread.name == "ddpwatch-stacks"]


def test_a_rank_that_stands_still_or_ends_sends_what_it_has(rank: Rank) -> None:
    rank.recorder.begin_update(5, "input", 0)
    rank.follow(ORDER)
    rank.sampling.finish(60)
    assert [samples.cut_short for samples in rank.posted] == [RUN_ENDED]


def test_an_order_takes_the_place_of_the_one_before(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.follow(StackOrder(1, 3, 0, 1000, 5))
    rank.follow(ORDER)
    while len(rank.posted) < 2:
        rank.done.clear()
        rank.step_until_done(monkeypatch)
    assert [(each.order, each.ordered, each.cut_short) for each in rank.posted] == [
        (1, 1000 - PARTIAL, OTHER_ORDER),
        (77, 0, ""),
    ]


def test_an_error_turns_off_the_samples_alone(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no frames")

    monkeypatch.setattr(stack_sampling, "_stack", broken)
    rank.follow(ORDER)
    rank.step_until_done(monkeypatch)
    assert [feature for feature, _ in rank.errors] == ["stack samples"]
    assert rank.posted == []
    assert not rank.recorder.lease.sampled


def test_an_order_survives_the_page_and_the_topic(tmp_path: Path) -> None:
    page, lease = LeasePage(tmp_path / "r.lease"), Lease()
    assert lease.order() is None
    lease.open(tmp_path / "r.lease")
    assert lease.order() is None
    page.order(ORDER)
    assert lease.order() == ORDER
    page.order(None)
    assert lease.order() is None
    assert parse_topic(ORDER.topic) == StackOrder(77, 3, 0, 2)


@pytest.mark.parametrize(
    "topic", [b"", b"1.2.3", b"0.1.1.5", b"1.1048576.0.5", b"1.0.0.0", b"1.0.0.100001", b"9" * 11 + b".1.1.1"]
)  # fmt: skip
def test_other_topics_are_no_orders(topic: bytes) -> None:
    assert parse_topic(topic) is None
