"""Models: they fit their data, and their gradients arrive as promised."""

from __future__ import annotations

import pytest
import torch

from demo.hook_order import CASES, observe
from trainer.data import build_data
from trainer.models import build_model

DATA = {"text": build_data("text:block_size=8,max_kib=4"), "digits": build_data("digits")}


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("gpt:width=16,layers=1,heads=2", "text"),
        ("mlp", "digits"),
        ("simple-block", "digits"),
        ("resnet:width=4", "digits"),
        ("branches", "digits"),
    ],
)
def test_every_parameter_learns(model: str, data: str) -> None:
    source = DATA[data]
    built = build_model(model, source)
    inputs = torch.stack([source.train[i][0] for i in range(3)])
    logits = built(inputs)
    assert logits.shape[-1] == source.classes
    logits.square().mean().backward()
    assert [name for name, p in built.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_gpt_does_not_look_ahead() -> None:
    model = build_model("gpt:width=16,layers=2,heads=2", DATA["text"])
    one = torch.randint(0, 256, (1, 8))
    other = one.clone()
    other[0, 5:] = 0
    assert torch.allclose(model(one)[:, :5], model(other)[:, :5], atol=1e-6)


def test_hooks_fire_in_reverse_except_for_shared_layers() -> None:
    reverse = {case.title: observe(case.build()).is_reverse for case in CASES}
    assert [title for title, holds in reverse.items() if not holds] == ["a layer used twice"]
