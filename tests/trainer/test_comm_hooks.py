"""What comm hooks compute, without any process group."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.comm_hooks.aggregate import trimmed_mean


@given(st.integers(1, 7), st.integers(0, 3))
def test_trimmed_mean_lies_between_mean_and_median(ranks: int, trim: int) -> None:
    parts = torch.randn(ranks, 5, generator=torch.Generator().manual_seed(ranks))
    if 2 * trim >= ranks:
        return
    kept = parts.sort(dim=0).values[trim : ranks - trim]
    assert torch.allclose(trimmed_mean(parts, trim), kept.mean(dim=0))
    assert torch.allclose(trimmed_mean(parts, 0), parts.mean(dim=0))
    assert torch.allclose(trimmed_mean(parts, (ranks - 1) // 2), parts.quantile(0.5, dim=0), atol=1e-6)


def test_one_broken_rank_does_not_move_the_median() -> None:
    parts = torch.tensor([[1.0], [1.1], [1e9]])
    assert trimmed_mean(parts, 1).item() == torch.tensor(1.1).item()
