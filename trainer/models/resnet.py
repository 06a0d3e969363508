"""A small residual network for small images."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.data.source import DataSource
from trainer.errors import TrainerError


def resnet(data: DataSource, *, width: int = 32, blocks: int = 2) -> nn.Module:
    """Build a stem and two stages; the second halves the image and doubles the channels.

    Args:
        data: Images.
        width: Channels of the first stage.
        blocks: Residual blocks per stage.

    Raises:
        TrainerError: The data are not images.
    """
    if data.kind != "image":
        raise TrainerError("model resnet takes images; try --data digits")
    stages = [_stage(width, width, blocks, stride=1), _stage(width, 2 * width, blocks, stride=2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, data.classes)]
    return nn.Sequential(_convolution(data.shape[0], width, 3), nn.ReLU(), *stages, *head)


class ResidualBlock(nn.Module):
    """Two convolutions with a residual connection around them, projected where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        """Let the first convolution change channels and resolution."""
        super().__init__()
        self.body = nn.Sequential(
            _convolution(channels_in, channels_out, 3, stride), nn.ReLU(), _convolution(channels_out, channels_out, 3)
        )
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else _convolution(channels_in, channels_out, 1, stride)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels_in, h, w)`` to ``(batch, channels_out, h / stride, w / stride)``."""
        return self.activation(self.body(x) + self.shortcut(x))  # type: ignore[no-any-return]


def _stage(channels_in: int, channels_out: int, blocks: int, stride: int) -> nn.Module:
    first = ResidualBlock(channels_in, channels_out, stride)
    return nn.Sequential(first, *(ResidualBlock(channels_out, channels_out, 1) for _ in range(blocks - 1)))


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Module:
    """Convolve and normalise; the norm makes a bias in the convolution pointless."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))
