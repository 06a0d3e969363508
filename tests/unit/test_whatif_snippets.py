"""Each snippet of what-if runs as it stands, in a script that has what a training loop has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.whatif.answer import has_cap_list
from ddpwatch.whatif.scenarios import Change
from ddpwatch.whatif.wording import code_of, statement_of

HOOKS = [
    Change(hook="fp16"),
    pytest.param(Change(hook="bf16"), marks=pytest.mark.skipif(torch.version.cuda is None, reason="DDP wants CUDA")),
    Change(hook="powersgd-2"),
    Change(accumulate=3),
]
OPTIONS = [
    Change(cap_mib=5.0),
    pytest.param(
        Change(cap_mib=5.0, first_mib=1.0),
        marks=pytest.mark.skipif(not has_cap_list(torch.__version__), reason="torch 2.13 or newer"),
    ),
    Change(bucket_view=True, static_graph=True),
    Change(cap_mib=5.0, hook="fp16"),
]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("change", [*HOOKS, *OPTIONS])
@pytest.mark.usefixtures("group")
def test_it_runs(change: Change) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    wraps = change.cap_mib is not None or change.bucket_view
    model = module if wraps else DistributedDataParallel(module)
    script = {
        "model": model, "loader": [(torch.ones(4, 8), torch.zeros(4, 2))] * 6, "loss_function": nn.MSELoss(),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
    }  # fmt: skip
    before = [parameter.detach().clone() for parameter in module.parameters()]
    code = code_of(change)
    assert statement_of(code) in code
    exec(code, script)
    trained = script["model"]
    assert isinstance(trained, DistributedDataParallel)
    if change.accumulate == 1:
        nn.MSELoss()(trained(torch.ones(4, 8)), torch.zeros(4, 2)).backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
    else:
        assert any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize(
    "change", [Change(link=2.0), Change(world=8), Change(without_lateness_of=0), Change(perfect=True)]
)
def test_what_is_no_change_of_code_has_none(change: Change) -> None:
    assert code_of(change) == statement_of(code_of(change)) == ""
