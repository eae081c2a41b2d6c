"""A small GPT over bytes, in plain PyTorch: nothing in this file knows that its weights may be sharded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY_NUMEL = 256
"""One token is one byte, so there is no tokenizer to train and none to ship."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of the model: the ``[model]`` table of the configuration file.

    Args:
        context: Longest sequence T the model can look at, in tokens.
        width: Features D of the residual stream.
        num_layers: Blocks in the stack.
        num_heads: Attention heads; ``width`` must divide by it.
    """

    context: int = 128
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4

    def __post_init__(self) -> None:
        if min(self.context, self.width, self.num_layers, self.num_heads) < 1:
            raise ValueError(f"every number in [model] must be at least 1, got {self}")
        if self.width % self.num_heads:
            raise ValueError(f"width must be a multiple of num_heads={self.num_heads}, got {self.width}")


class Attention(nn.Module):
    """Causal self-attention, ``[B, T, D] -> [B, T, D]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class GPT(nn.Module):
    """Decoder-only transformer whose output layer shares its weight with the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCABULARY_NUMEL, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.output_norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, VOCABULARY_NUMEL, bias=False)
        self.output.weight = self.token_embedding.weight
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, T, 256]`` of the byte after each of ``tokens`` (``[B, T]``, int64)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.output(self.output_norm(hidden))

    def _initialise(self) -> None:
        """Draw the weights from torch's global generator, which the caller seeds."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Each block adds to the stream twice; so its variance does not grow with the depth (GPT-2, 2.3).
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for block in self.blocks:
            nn.init.normal_(block.attention.output.weight, std=residual_std)
            nn.init.normal_(block.mlp[2].weight, std=residual_std)


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of each byte of ``windows`` given those before, a scalar in nats.

    Args:
        model: A ``GPT``, or a wrapper that is called like one.
        windows: Byte windows ``[B, T + 1]``, int64.
    """
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
