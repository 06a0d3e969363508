"""Hooks on layers: what they do, and that common wrong forms of them do not."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from trainer.module_hooks import Chunk, Clip, Scale, Transform, attach_module_hooks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def gradients(net: nn.Module) -> dict[str, Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    (net(torch.randn(8, 4)).square().sum() * 10).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def hooked(*specs: str) -> dict[str, Tensor]:
    net = model()
    attach_module_hooks(net, specs)
    return gradients(net)


PLAIN = gradients(model())


def test_scale_changes_its_layer_only() -> None:
    scaled = hooked("scale:layer=2,factor=0.5")
    for name, gradient in PLAIN.items():
        assert torch.allclose(scaled[name], gradient * (0.5 if name.startswith("2.") else 1.0))


def test_scale_of_the_flow_changes_everything_before() -> None:
    reversed_ = hooked("scale:layer=2,factor=-1,of=flow")
    for name, gradient in PLAIN.items():
        assert torch.allclose(reversed_[name], gradient * (-1.0 if name.startswith("0.") else 1.0))


def test_clip_limits_the_norm_and_keeps_the_direction() -> None:
    clipped = hooked("clip:norm=0.5")
    for name, gradient in PLAIN.items():
        assert gradient.norm() > 0.5
        assert torch.allclose(clipped[name], gradient * (0.5 / gradient.norm()), atol=1e-6)


def test_clip_leaves_small_gradients_alone() -> None:
    assert all(torch.equal(gradient, PLAIN[name]) for name, gradient in hooked("clip:norm=1e9").items())


def test_clip_of_the_flow_bounds_what_earlier_layers_get() -> None:
    flows: list[Tensor] = []
    net = model()
    attach_module_hooks(net, ["clip:layer=2,norm=0.1,of=flow"])
    net[1].register_full_backward_hook(lambda layer, grad_input, grad_output: flows.append(grad_output[0]))
    assert torch.allclose(gradients(net)["2.weight"], PLAIN["2.weight"]), "its own weights come before"
    assert flows[0].norm().item() == pytest.approx(0.1, rel=1e-4)


def test_transforms() -> None:
    assert torch.equal(hooked("transform:layer=0,op=sign")["0.weight"], PLAIN["0.weight"].sign())
    centred = hooked("transform:layer=0,op=centralize")
    assert torch.allclose(centred["0.weight"].mean(dim=1), torch.zeros(6), atol=1e-6)
    assert torch.equal(centred["0.bias"], PLAIN["0.bias"])
    noisy = hooked("transform:layer=0,op=noise")["0.weight"]
    assert 0 < (noisy - PLAIN["0.weight"]).norm() < 0.1 * PLAIN["0.weight"].norm()


def test_hooks_compose_in_order() -> None:
    both = hooked("scale:layer=0,factor=100", "clip:layer=0,norm=1")
    assert both["0.weight"].norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize("chunks", [1, 3, 100])
@pytest.mark.parametrize("mode", ["plain", "no-grad", "autocast"])
def test_chunks_are_the_same_as_no_chunks(chunks: int, mode: str) -> None:
    whole, parts = model(), model()
    whole[2].register_forward_hook(lambda layer, inputs, output: torch.tanh(output))
    attach_module_hooks(parts, [f"chunk:layer=2,chunks={chunks},op=tanh"])
    inputs = torch.randn(8, 4)
    with torch.set_grad_enabled(mode != "no-grad"), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        expected, output = whole(inputs), parts(inputs)
    assert torch.equal(expected, output)
    assert output.requires_grad == (mode != "no-grad")
    if mode == "plain":
        assert all(torch.allclose(g, gradients(whole)[name]) for name, g in gradients(parts).items())


# -- the wrong forms ---------------------------------------------------------------------------------------------
# Each test hands the wrong form to the check that ours passes, and expects it to fail.


def is_scaled(net: nn.Sequential) -> bool:
    """Whether the gradients of layer k are those of the plain model times k + 1."""
    return all(
        torch.allclose(gradient, PLAIN[name] * (int(name[0]) + 1.0), rtol=1e-4)
        for name, gradient in gradients(net).items()
    )


def test_a_closure_over_the_loop_variable_scales_by_the_last() -> None:
    right, wrong = model(), model()
    for number in (0, 2, 4):
        Scale(factor=number + 1.0).attach(right[number])
        for parameter in wrong[number].parameters():
            parameter.register_hook(lambda gradient: gradient * (number + 1.0))  # noqa: B023
    assert is_scaled(right)
    assert not is_scaled(wrong)


def flow_into(layer: int, net: nn.Sequential) -> Tensor:
    seen: list[Tensor] = []
    net[layer].register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0].clone()))
    gradients(net)
    return seen[0]


def test_clipping_a_temporary_clips_nothing() -> None:
    def clip_in_vain(layer: nn.Module, grad_input: tuple[Tensor, ...], grad_output: object) -> None:
        torch.nn.utils.clip_grad_norm_(grad_input, 0.1)  # looks at grad_input[0].grad, which is None

    right, wrong = model(), model()
    Clip(norm=0.1, of="flow").attach(right[2])
    wrong[2].register_full_backward_hook(clip_in_vain)  # type: ignore[arg-type]
    assert flow_into(1, right).norm() < 0.11
    assert flow_into(1, wrong).norm() > 0.11


def test_rebinding_the_argument_changes_nothing() -> None:
    def rebind(layer: nn.Module, grad_input: tuple[Tensor, ...], grad_output: object) -> None:
        grad_input = tuple(gradient * 0.0 for gradient in grad_input)

    right, wrong = model(), model()
    Scale(factor=0.0, of="flow").attach(right[2])
    wrong[2].register_full_backward_hook(rebind)  # type: ignore[arg-type]
    assert not flow_into(1, right).any()
    assert flow_into(1, wrong).any()


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_the_deprecated_backward_hook_gets_the_gradients_of_the_last_operation() -> None:
    """A layer of two operations: the old hook gets the inputs of the last one, not the layer's."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.inner(x)) + self.inner(x).sum(dim=0, keepdim=True)

    def shapes(module: nn.Module, grad_input: tuple[Tensor, ...], grad_output: object, seen: list[int]) -> None:
        seen.append(len(grad_input))

    counts: dict[str, list[int]] = {"full": [], "old": []}
    for kind, register in (("full", "register_full_backward_hook"), ("old", "register_backward_hook")):
        layer = Residual()
        getattr(layer, register)(partial(shapes, seen=counts[kind]))
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert counts == {"full": [1], "old": [2]}, "the layer has one input"


def test_detached_chunks_lose_the_gradient() -> None:
    right, wrong = model(), model()
    Chunk(chunks=2, op="tanh").attach(right[2])
    wrong[2].register_forward_hook(
        lambda layer, inputs, output: torch.cat([torch.tanh(part.data) for part in output.chunk(2)])
    )
    assert set(gradients(right)) == set(PLAIN)
    assert set(gradients(wrong)) == {"4.weight", "4.bias"}


def test_hooks_are_values() -> None:
    assert Transform(op="sign") == copy.copy(Transform(op="sign"))
