"""A byte-level GPT: pre-norm blocks, learned positions, an untied output head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.data.source import DataSource
from trainer.errors import TrainerError


def gpt(data: DataSource, *, width: int = 384, layers: int = 6, heads: int = 6) -> nn.Module:
    """Build a GPT for the data's sequences; the default has 10.9 million parameters in 77 tensors.

    Raises:
        TrainerError: The data are not bytes, or the heads do not divide the width.
    """
    if data.kind != "bytes":
        raise TrainerError("model gpt takes text; try --data text, or --model resnet")
    if width % heads:
        raise TrainerError(f"model gpt: {heads} heads do not divide a width of {width}")
    return GPT(data.classes, width, layers, heads, data.shape[0])


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position attends to itself and to earlier ones."""

    def __init__(self, width: int, heads: int) -> None:
        """Project once for queries, keys and values, and once for the output."""
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return mixed


class Block(nn.Module):
    """Attention, then a feed-forward layer, each with a norm before it and a residual connection around it."""

    def __init__(self, width: int, heads: int) -> None:
        """Use the customary fourfold width inside the feed-forward layer."""
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, time, width)`` to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predict the next byte at every position.

    The head is not tied to the embedding: a tied weight receives its last gradient only when backward has
    reached the input, which would hold the first bucket back until the end and hide what overlap looks like.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, block_size: int) -> None:
        """Build a model for sequences of at most ``block_size`` bytes."""
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map byte values ``(batch, time)`` to logits ``(batch, time, 256)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.position(positions))))
        return logits


def _initialise(module: nn.Module) -> None:
    """Draw weights so small that the first loss is close to that of a uniform guess."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
