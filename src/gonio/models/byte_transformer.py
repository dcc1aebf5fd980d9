"""The small language model of the task `bytes`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ByteTransformer", "byte_transformer"]


class ByteTransformer(nn.Module):
    r"""A causal transformer over bytes: embeddings, blocks of attention and MLP behind layer norms, logits.

    Args:
        vocabulary: number of symbols.
        width: of the residual stream; heads: of each attention; depth: number of blocks.
        context: the longest input.

    Shape:
        - input: :math:`(N, L)` integers below `vocabulary`, :math:`L \le` `context`.
        - output: :math:`(N, L, V)` logits of the symbol after each position.

    Example:
        >>> model = gonio.models.ByteTransformer(10, width=8, heads=2, depth=1, context=4)
        >>> first, second = model(torch.tensor([[1, 2, 3], [1, 2, 9]]))
        >>> torch.equal(first[:2], second[:2]), torch.equal(first[2], second[2])  # what comes later changes nothing
        (True, False)

    References:
        A. Vaswani et al., "Attention is all you need", 2017, arXiv 1706.03762; with the norms in front, as in
        R. Xiong et al., "On layer normalization in the transformer architecture", 2020, arXiv 2002.04745.
    """

    def __init__(self, vocabulary: int = 256, *, width: int = 64, heads: int = 4, depth: int = 2, context: int = 128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # torch draws embeddings with variance 1, next to which the blocks' first outputs would be small
        with torch.no_grad():
            self.embed.weight.mul_(width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x) + self.position[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(embedded)))
        return logits


class Block(nn.Module):
    """Attention, then an MLP, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        mixed: Tensor = x + self.down(F.relu(self.up(self.norm2(x))))
        return mixed

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed


def byte_transformer(num_classes: int = 256) -> nn.Module:
    """Two blocks of width 64 with 4 heads, for 128 bytes of context.

    Shape:
        - input: :math:`(N, L)` integers, :math:`L \\le 128`.
        - output: :math:`(N, L, K)` logits.

    Example:
        >>> model = gonio.models.byte_transformer()
        >>> sum(p.numel() for p in model.parameters())
        140544
        >>> model(torch.zeros(2, 16, dtype=torch.int64)).shape
        torch.Size([2, 16, 256])
    """
    return ByteTransformer(num_classes)
