"""The models that are trained: GPT, Llama and ViT, by names that say their size. Every forward returns the loss.

All have their blocks in ``model.blocks``, which is what FSDP2 shards by and where recomputation cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02
ROPE_BASE = 500_000.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, and of the batch it is timed with.

    Attributes:
        kind: "gpt", "llama" or "vit".
        layers, width, heads: Of the stack of blocks.
        hidden: Features inside the MLP.
        kv_heads: Key and value heads (llama).
        vocabulary: Tokens, or classes of a ViT.
        sequence: Tokens per sample; of a ViT the patches, a square.
        batch: Samples per rank.
        is_tied: Whether the output layer shares the embedding's weight.
        patch: Pixels along a patch (vit).
    """

    kind: str
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    batch: int
    kv_heads: int = 0
    is_tied: bool = False
    patch: int = 0


def _gpt(layers: int, width: int, vocabulary: int = 50304, sequence: int = 1024, **rest: Any) -> Shape:
    sizes = {"heads": max(1, width // 64), "hidden": 4 * width, "batch": 8, "is_tied": True, **rest}
    return Shape(kind="gpt", layers=layers, width=width, vocabulary=vocabulary, sequence=sequence, **sizes)


def _llama(layers: int, width: int, hidden: int, **rest: Any) -> Shape:
    sizes = {"heads": 32, "kv_heads": 8, "vocabulary": 128_256, "sequence": 2048, "batch": 1, **rest}
    return Shape(kind="llama", layers=layers, width=width, hidden=hidden, **sizes)


def _vit(layers: int, width: int, **rest: Any) -> Shape:
    sizes = {"heads": max(1, width // 64), "hidden": 4 * width, "vocabulary": 1000, "sequence": 196, "patch": 16}
    return Shape(kind="vit", layers=layers, width=width, **{**sizes, "batch": 32, **rest})


SHAPES = {
    "gpt-tiny": _gpt(2, 32, 64, 16, heads=2, batch=2),
    "gpt-46m": _gpt(12, 512, 8192, 128, batch=2, is_tied=False),
    "gpt-168m": _gpt(12, 1024, 8192, 128, batch=1, is_tied=False),
    "gpt2-124m": _gpt(12, 768),
    "gpt2-1.5b": _gpt(48, 1600, heads=25, batch=4),
    "llama-tiny": _llama(2, 32, 64, heads=4, kv_heads=2, vocabulary=64, sequence=16, batch=2),
    "llama-60m": _llama(8, 512, 1536, heads=8, kv_heads=4, vocabulary=32_000, sequence=128),
    "llama-1b": _llama(16, 2048, 8192, is_tied=True, batch=4),
    "llama3-8b": _llama(32, 4096, 14_336),
    "vit-tiny": _vit(2, 32, heads=2, vocabulary=10, sequence=4, patch=4, batch=2),
    "vit-b16": _vit(12, 768),
    "vit-l16": _vit(24, 1024),
}


class Batch(NamedTuple):
    """What a model's forward takes: tokens or images [B, ...], and the right answers."""

    inputs: Tensor
    targets: Tensor


def make_batch(shape: Shape, num_samples: int, step: int, rank: int, device: torch.device) -> Batch:
    """Return a rank's batch of a step; the same for every implementation, and something that can be learned."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    if shape.kind == "vit":
        targets = torch.randint(shape.vocabulary, (num_samples,), generator=generator)
        side = round(shape.sequence**0.5) * shape.patch
        images = torch.randn(num_samples, 3, side, side, generator=generator)
        images += targets.view(-1, 1, 1, 1) / shape.vocabulary
        return Batch(images.to(device), targets.to(device))
    start = torch.randint(shape.vocabulary, (num_samples, 1), generator=generator)
    tokens = (start + 7 * torch.arange(shape.sequence + 1)) % shape.vocabulary
    return Batch(tokens[:, :-1].to(device), tokens[:, 1:].contiguous().to(device))


def make_model(shape: Shape, device: torch.device, is_recomputing: bool = False) -> nn.Module:
    """Return a new model with the same weights on every rank, fp32."""
    torch.manual_seed(0)
    with device:
        model: nn.Module = {"gpt": GPT, "llama": Llama, "vit": ViT}[shape.kind](shape)
        for param in model.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=INIT_STD)
    for module in model.modules():
        if isinstance(module, Stack):
            module.is_recomputing = is_recomputing
    return model


def deepened(shape: Shape, layers: int) -> Shape:
    """Return the shape with another depth."""
    return replace(shape, layers=layers)


class Stack(nn.ModuleList):
    """Blocks, one after the other; recomputed in backward if so wanted."""

    is_recomputing = False

    def run(self, hidden: Tensor) -> Tensor:
        """Return what the blocks make of ``hidden``."""
        for block in self:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.is_recomputing else block(hidden)
        return hidden


class Block(nn.Module):
    """Attention and MLP of GPT and ViT."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.is_causal = shape.heads, shape.kind == "gpt"
        self.attention_norm, self.mlp_norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, shape.hidden), nn.Linear(shape.hidden, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        heads = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class GPT(nn.Module):
    """Decoder-only transformer with learned positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token, self.position = (
            nn.Embedding(shape.vocabulary, shape.width),
            nn.Embedding(shape.sequence, shape.width),
        )
        self.blocks = Stack(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        hidden = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return _token_loss(self.head(self.norm(self.blocks.run(hidden))), targets)


class LlamaBlock(nn.Module):
    """Attention with rotary positions and shared key and value heads, and a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        kv_width = shape.kv_heads * self.head_width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, kv_width, bias=False)
        self.value = nn.Linear(shape.width, kv_width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        positions = torch.arange(shape.sequence, dtype=torch.float32)
        rates = ROPE_BASE ** -(torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width)
        angles = torch.outer(positions, rates)
        # A constant and no buffer: DistributedDataParallel would broadcast it in every forward.
        self.rotation = torch.stack([angles.cos(), angles.sin()])

    def _heads(self, projected: Tensor, is_rotated: bool) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, H, T, W]
        if not is_rotated:
            return heads
        cos, sin = self.rotation[:, : heads.shape[2]].to(heads.dtype)
        left, right = heads.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        normed = self.attention_norm(hidden)
        query, key = self._heads(self.query(normed), True), self._heads(self.key(normed), True)
        value = self._heads(self.value(normed), False)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Decoder-only transformer as of Llama 3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = Stack(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        return _token_loss(self.head(self.norm(self.blocks.run(self.token(tokens)))), targets)


class ViT(nn.Module):
    """Vision transformer that averages its patches."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, shape.patch, shape.patch)
        self.position = nn.Parameter(torch.empty(shape.sequence, shape.width))
        self.blocks = Stack(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the classes."""
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return F.cross_entropy(self.head(self.norm(self.blocks.run(hidden)).mean(1)).float(), targets)


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
