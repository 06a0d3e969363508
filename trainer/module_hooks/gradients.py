"""Hooks that change a layer's gradients during backward.

``of="weights"`` changes the gradients of the layer's parameters, each by itself, before they are accumulated and thus
before any strategy sends them. (The joint norm of a layer is known only with its last gradient; by then the first may
be on the wire.) ``of="flow"`` changes the gradient that the layer passes to the layers before it.

Either way the hook *returns* the new gradient. PyTorch forbids changing its arguments in place, and ignores a rebound
local name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import TrainerError

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, kw_only=True)
class GradientHook:
    """A function of one gradient, attached to layers."""

    layer: str = "*"
    of: str = "weights"

    def __post_init__(self) -> None:
        """Refuse a target that does not exist."""
        if self.of not in ("weights", "flow"):
            raise TrainerError(f"of={self.of!r} is neither weights nor flow")

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the gradient that replaces ``gradient``."""
        raise NotImplementedError

    def attach(self, layer: nn.Module) -> None:
        """Change this layer's gradients from now on."""
        if self.of == "flow":
            layer.register_full_backward_hook(self._on_flow)
            return
        for parameter in layer.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_hook(self)  # type: ignore[no-untyped-call]

    def _on_flow(self, layer: nn.Module, grad_input: object, grad_output: object) -> Gradients:
        gradients = grad_input if isinstance(grad_input, tuple) else (grad_input,)
        return tuple(None if gradient is None else self(gradient) for gradient in gradients)


@dataclass(frozen=True, kw_only=True)
class Clip(GradientHook):
    """Shrink a gradient to at most this norm, keeping its direction."""

    norm: float = 1.0

    def __call__(self, gradient: Tensor) -> Tensor:
        """Scale without reading the norm, which would wait for the device."""
        shrink: Tensor = self.norm / gradient.norm().clamp(min=self.norm)
        return gradient * shrink


@dataclass(frozen=True, kw_only=True)
class Scale(GradientHook):
    """Multiply a gradient: a learning rate per layer, or, with -1 on the flow, gradient reversal."""

    factor: float = 0.5

    def __call__(self, gradient: Tensor) -> Tensor:
        """Multiply by the factor."""
        return gradient * self.factor


@dataclass(frozen=True, kw_only=True)
class Transform(GradientHook):
    """Apply a transform by name: ``centralize`` (subtract each row's mean), ``sign`` or ``noise`` (2 % of its size)."""

    op: str = "centralize"

    def __post_init__(self) -> None:
        """Refuse a transform that does not exist."""
        super().__post_init__()
        if self.op not in TRANSFORMS:
            raise TrainerError(f"no gradient transform is called {self.op!r}; known: {', '.join(TRANSFORMS)}")

    def __call__(self, gradient: Tensor) -> Tensor:
        """Apply the named transform."""
        return TRANSFORMS[self.op](gradient)


def centralize(gradient: Tensor) -> Tensor:
    """Subtract the mean gradient of each output's weights; vectors stay unchanged."""
    if gradient.dim() < 2:
        return gradient
    return gradient - gradient.mean(dim=tuple(range(1, gradient.dim())), keepdim=True)


def noise(gradient: Tensor) -> Tensor:
    """Add Gaussian noise of 2 % of the gradient's root mean square."""
    return gradient + torch.randn_like(gradient) * (0.02 * gradient.square().mean().sqrt())


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"centralize": centralize, "sign": torch.sign, "noise": noise}
