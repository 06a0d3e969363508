"""The reducer in Python, with a channel that only keeps a ledger."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from tests.trainer.conftest import ALONE
from trainer.channel import Channel
from trainer.strategies.bucketed_hooks import BucketedHooks


class Ledger(Channel):
    """Every all-reduce is done at once, and noted."""

    def __init__(self) -> None:
        super().__init__(ALONE)
        self.sent: list[int] = []
        self.layouts: list[list[list[int]]] = []
        self.announce = lambda names, buckets: self.layouts.append([list(bucket.parameters) for bucket in buckets])

    def all_reduce(self, tensor: Tensor, index: int, ready_ns: int | None = None) -> Future[Tensor]:
        self.sent.append(index)
        future: Future[Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future


class OtherOrder(nn.Module):
    """Declared a, b, c, d; d is not used, the others run in the given order."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def step(strategy: BucketedHooks) -> dict[str, Tensor | None]:
    strategy.model.zero_grad()
    strategy.backward(strategy.forward(torch.ones(2, 4)).sum())
    return {name: p.grad for name, p in strategy.model.named_parameters()}


@pytest.mark.parametrize(
    ("cap_mib", "groups"), [(1, [[3, 2, 1, 0]]), (65e-6, [[3, 2], [1, 0]]), (1e-6, [[3], [2], [1], [0]])]
)
def test_buckets_are_filled_in_reverse_up_to_the_cap(cap_mib: float, groups: list[list[int]]) -> None:
    strategy = BucketedHooks(OtherOrder("abcd"), Ledger(), bucket_cap_mb=cap_mib)
    assert [bucket.members for bucket in strategy.buckets] == groups


def test_default_caps_are_those_of_ddp() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(30)))  # 1 MiB each
    assert [len(bucket.members) for bucket in BucketedHooks(model, Ledger()).buckets] == [1, 25, 4]


def test_buckets_leave_in_index_order_whatever_order_they_fill_in() -> None:
    ledger = Ledger()
    strategy = BucketedHooks(OtherOrder("cbad"), ledger, bucket_cap_mb=1e-6)  # gradients come d, a, b, c
    step(strategy)
    assert ledger.sent == [0, 1, 2, 3]


def test_buckets_are_rebuilt_in_the_observed_order_once() -> None:
    ledger = Ledger()
    strategy = BucketedHooks(OtherOrder("cbad"), ledger, bucket_cap_mb=1e-6)
    for _ in range(3):
        step(strategy)
    assert ledger.layouts == [[[3], [2], [1], [0]], [[3], [0], [1], [2]]]


def test_gradients_are_those_of_the_bare_model_also_unused_ones() -> None:
    strategy = BucketedHooks(OtherOrder("abc"), Ledger(), bucket_cap_mb=65e-6)
    bare = OtherOrder("abc")
    bare.load_state_dict(strategy.model.state_dict())
    bare(torch.ones(2, 4)).sum().backward()
    for _ in range(3):
        gradients = step(strategy)
        assert gradients["d.weight"] is None
        for name, parameter in bare.named_parameters():
            assert parameter.grad is None or torch.equal(gradients[name], parameter.grad)  # type: ignore[arg-type]


def test_a_step_broken_off_in_backward_leaves_nothing_behind() -> None:
    ledger = Ledger()
    strategy = BucketedHooks(OtherOrder("abcd"), ledger, bucket_cap_mb=1e-6)
    expected = step(strategy)
    failing = strategy.parameters[1].register_hook(lambda gradient: 1 / 0)  # type: ignore[no-untyped-call]
    with pytest.raises(ZeroDivisionError):
        step(strategy)
    failing.remove()
    ledger.sent.clear()
    again = step(strategy)
    assert ledger.sent == [0, 1, 2, 3]
    assert all(torch.equal(again[name], expected[name]) for name in expected)  # type: ignore[arg-type]


def test_local_micro_batches_are_added_and_sent_once() -> None:
    ledger = Ledger()
    strategy = BucketedHooks(OtherOrder("abcd"), ledger, bucket_cap_mb=1)
    once = {name: gradient.clone() for name, gradient in step(strategy).items() if gradient is not None}
    ledger.sent.clear()
    strategy.model.zero_grad()
    with strategy.no_sync():
        strategy.backward(strategy.forward(torch.ones(2, 4)).sum())
    assert ledger.sent == []
    strategy.backward(strategy.forward(torch.ones(2, 4)).sum())
    assert ledger.sent == [0]
    assert all(torch.allclose(p.grad, 2 * once[name]) for name, p in strategy.model.named_parameters())  # type: ignore[arg-type]


def test_a_gradient_of_an_earlier_micro_batch_stays_though_the_last_one_does_not_use_the_parameter() -> None:
    model = OtherOrder("abcd")
    strategy = BucketedHooks(model, Ledger())
    with strategy.no_sync():
        strategy.backward(strategy.forward(torch.ones(2, 4)).sum())
    assert model.d.weight.grad is not None
    before = model.d.weight.grad.clone()
    model.order = "abc"
    strategy.backward(strategy.forward(torch.ones(2, 4)).sum())
    assert model.d.weight.grad is not None
    assert torch.equal(model.d.weight.grad, before)
