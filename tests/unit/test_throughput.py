"""What a job gets done: what ranks count, from which step on, and what all of them get done together."""

from __future__ import annotations

import gc
import weakref
from fractions import Fraction

import pytest
import torch
from torch.utils.data import DataLoader

from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.throughput import Throughput, throughput_text
from ddpwatch.common.peak_flops import parse_peak, peak_of
from ddpwatch.common.text import short_count
from ddpwatch.errors import UsageError
from ddpwatch.probe.trained import TrainedCounter, gpu_memory
from ddpwatch.wire.messages import Beat, Group, Hello, Trained
from tests.support.frames import beat, hello

SECOND = 1_000_000_000


class Loop:
    """A training loop that counts."""

    def __init__(self) -> None:
        self.steps = 0
        self.counter = TrainedCounter(lambda: self.steps)

    def train(self, steps: int, batches: int = 1, **counted: int) -> None:
        for _ in range(steps):
            for _ in range(batches):
                self.counter.count(*(counted.get(name) for name in ("samples", "tokens", "flops")))
            self.steps += 1


def test_rates_between_two_looks_are_exact_in_the_middle_of_a_step_too() -> None:
    loop = Loop()
    loop.train(3, batches=4, tokens=100)
    loop.counter.count(None, 100, None)  # of the fourth step
    first = loop.counter.so_far()
    assert first == Trained(3, tokens=1200)
    loop.counter.count(None, 100, None)
    assert loop.counter.so_far() == first
    loop.train(1, tokens=200)
    loop.train(6, batches=4, tokens=100)
    now = loop.counter.so_far()
    assert now is not None
    assert (now.tokens or 0) - 1200 == 400 * (now.step - 3)


def test_nothing_is_counted_until_something_is() -> None:
    assert TrainedCounter(lambda: 0).so_far() is None


@pytest.mark.parametrize("value", [torch.tensor(4), "4", -1, float("nan"), [4]], ids=str)
def test_what_is_no_number_is_refused(value: object) -> None:
    """To read a tensor may wait for a GPU."""
    with pytest.raises(UsageError, match="count"):
        TrainedCounter(lambda: 0).count(None, value, None)


def test_other_numbers_count() -> None:
    """Those of numpy are such ones."""
    loop = Loop()
    loop.counter.count(Fraction(3), None, Fraction(5, 2))
    loop.steps = 1
    loop.counter.count(1, None, 1)
    assert loop.counter.so_far() == Trained(1, samples=3, flops=2.5)


def test_batches_of_the_loader_that_feeds_the_training_count() -> None:
    """Those of a validation between two steps do not, nor do batches where the script counts samples."""
    counter, steps = TrainedCounter(lambda: steps), 0
    training, validation = (iter(DataLoader(list(range(64)), batch_size=size)) for size in (4, 8))
    of_training, of_validation = weakref.ref(training), weakref.ref(validation)
    for steps in range(3):
        for loader in (of_validation, of_validation, of_training, of_training) if steps else (of_training,) * 2:
            counter.take_batch(loader)
        counter.end_update()
        counter.end_update()  # another optimizer
    assert counter.so_far() == Trained(2, samples=16)
    counter.count(5, None, None)
    steps = 3
    counter.count(5, None, None)
    assert counter.so_far() == Trained(3, samples=5)


def test_a_loader_without_a_batch_size_is_not_counted() -> None:
    counter = TrainedCounter(lambda: 0)
    iterator = iter(DataLoader(list(range(8)), batch_sampler=[[0, 1], [2]]))
    counter.take_batch(weakref.ref(iterator))
    gone = weakref.ref(iter(DataLoader([1], batch_size=1)))
    gc.collect()
    counter.take_batch(gone)
    counter.end_update()
    assert counter.so_far() is None


def test_without_cuda_no_memory_is_asked_for() -> None:
    assert gpu_memory(None) == gpu_memory(torch.device("cuda", 0)) == {}


def job(*messages: Beat | Hello | Group) -> Throughput:
    groups = Groups()
    found = Throughput(groups)
    for message in messages:
        groups.apply_message(message)
        found.apply_message(message)
    return found


def beats(rank: int, **per_step: int) -> list[Beat]:
    """Ten steps between the first and the newest one."""
    return [beat(rank, trained=Trained(n, **{k: n * v for k, v in per_step.items()})) for n in (10, 14, 20)]


def test_ranks_add_up() -> None:
    found = job(*[hello(rank, parameters=1000) for rank in (0, 1)], *beats(0, tokens=300), *beats(1, tokens=100))
    figures = found.figures(SECOND // 2)
    assert figures is not None
    assert (figures.tokens_per_step, figures.tokens_s, figures.samples_s) == (400, 800, None)
    assert (figures.flops_s, figures.flops_by) == (6 * 1000 * 800, "6 × parameters × tokens")
    assert (figures.mfu, figures.peak_flops_s, figures.ranks) == (None, None, 2)
    assert throughput_text(figures) == "800 tokens/s"


def test_one_rank_may_count_for_all() -> None:
    figures = job(hello(0), hello(1), *beats(0, samples=64)).figures(SECOND)
    assert figures is not None
    assert (figures.samples_s, figures.ranks) == (64, 1)
    assert throughput_text(figures) == "64.0 samples/s"


@pytest.mark.parametrize("kind", ["tp", "cp"])
def test_ranks_that_train_on_the_same_samples_count_once(kind: str) -> None:
    groups = [Group(rank=0, id=1, ranks=[0, 1], kind=kind), Group(rank=2, id=2, ranks=[2, 3], kind=kind)]
    groups += [Group(rank=rank, id=3 + rank, ranks=[rank, rank + 2], kind="data parallel") for rank in (0, 1)]
    ranks = [message for rank in range(4) for message in (hello(rank, 4, parameters=9), *beats(rank, tokens=50))]
    figures = job(*groups, *ranks).figures(SECOND)
    assert figures is not None
    assert figures.tokens_s == 100
    assert figures.flops_s is None  # a rank may know a part of the parameters only


def test_mfu_of_a_stated_peak() -> None:
    ranks = [message for rank in (0, 1) for message in (hello(rank, peak_flops=1e6), *beats(rank, flops=50_000))]
    figures = job(*ranks).figures(SECOND // 4)
    assert figures is not None
    assert (figures.flops_s, figures.flops_by, figures.mfu) == (400_000, "count()", 0.2)


def test_mfu_needs_the_peak_of_all_devices() -> None:
    ranks = [hello(0, peak_flops=1e6), hello(1), *beats(0, flops=1), *beats(1, flops=1)]
    figures = job(*ranks).figures(SECOND)
    assert figures is not None
    assert figures.mfu is None


def test_live_figures_are_of_the_newest_heartbeats() -> None:
    slow = [beat(0, trained=Trained(n, tokens=n)) for n in range(100)]
    fast = [beat(0, trained=Trained(100 + n, tokens=100 + 50 * n)) for n in range(20)]
    found = job(hello(0), *slow, *fast)
    now, all_steps = found.figures(SECOND, newest=True), found.figures(SECOND)
    assert now is not None
    assert all_steps is not None
    assert (now.tokens_per_step, all_steps.tokens_per_step) == (50, pytest.approx(1050 / 119))


def test_what_is_counted_later_is_not_spread_over_the_steps_before() -> None:
    before = [beat(0, trained=Trained(n, samples=n)) for n in range(10)]
    since = [beat(0, trained=Trained(n, samples=n, tokens=7 * (n - 10))) for n in range(10, 20)]
    figures = job(hello(0), *before, *since).figures(SECOND)
    assert figures is not None
    assert figures.tokens_s == 7


def test_one_look_shows_no_rate() -> None:
    figures = job(hello(0), beats(0, tokens=1)[0]).figures(SECOND)
    assert figures is not None
    assert figures.tokens_s is None
    assert throughput_text(figures) == throughput_text(None) == ""


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10", 125), ("NVIDIA L4", 121), ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA GeForce RTX 4090", None), ("", None),
    ],
)  # fmt: skip
def test_peaks_by_name(name: str, tflops: float | None) -> None:
    assert peak_of(name) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_a_peak_that_is_no_number() -> None:
    assert [parse_peak(text) for text in ("989", "", "fast", "-3", "inf", "nan")] == [989e12, 0, 0, 0, 0, 0]


def test_counts_in_short() -> None:
    assert [short_count(value) for value in (None, 0, 12.34, 999.4, 12_345, 1.5e6)] == [
        "–", "0.0", "12.3", "999", "12.3k", "1.50M",
    ]  # fmt: skip
    assert short_count(989.4e12, " ") + "FLOP/s" == "989 TFLOP/s"
