"""Models to plan for by name or by plain numbers: plain modules on the meta device, which are never run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class LlamaShape(NamedTuple):
    """Numbers of a Llama."""

    vocabulary_numel: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    inner_width: int


# Source: The Llama 3 Herd of Models (arXiv:2407.21783), table 3.
LLAMAS = {
    "llama-3-8b": LlamaShape(128256, 4096, 32, 32, 8, 14336),
    "llama-3-70b": LlamaShape(128256, 8192, 80, 64, 8, 28672),
    "llama-3-405b": LlamaShape(128256, 16384, 126, 128, 8, 53248),
}
_BLOCK_PARTS = (1, 1, 1, 1, 4, 4)  # of a block of plain numbers: query, key, value, output, up, down


class LlamaBlock(nn.Module):
    """The parameters of one layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, kv_width = shape.width, shape.width // shape.num_heads * shape.num_kv_heads
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, shape.inner_width, bias=False)
        self.up = nn.Linear(width, shape.inner_width, bias=False)
        self.down = nn.Linear(shape.inner_width, width, bias=False)


class Llama(nn.Module):
    """The parameters of a Llama, in the order of their use."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary_numel, shape.width)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary_numel, bias=False)


class PlainBlock(nn.Module):
    """Parameters of so many elements together, in the proportions of a transformer's block."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        sizes = [numel * part // sum(_BLOCK_PARTS) for part in _BLOCK_PARTS]
        sizes[-1] += numel - sum(sizes)
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)


class PlainModel(nn.Module):
    """A stack of equal layers of so many elements together."""

    def __init__(self, numel: int, num_layers: int) -> None:
        super().__init__()
        first = numel - (num_layers - 1) * (numel // num_layers)
        self.layers = nn.ModuleList(
            PlainBlock(numel // num_layers if number else first) for number in range(num_layers)
        )


def build_by_name(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model by its name, on the meta device.

    Raises:
        ValueError: No such name.
    """
    if name not in LLAMAS:
        raise ValueError(f"model must be one of {', '.join(LLAMAS)}, an nn.Module or a function, got {name!r}")
    with torch.device("meta"):
        return Llama(LLAMAS[name]).to(dtype)


def build_of_numbers(numel: int, num_layers: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a stack of ``num_layers`` layers of ``numel`` parameters together, on the meta device.

    Raises:
        ValueError: A number is below 1, or there are fewer parameters than layers.
    """
    if num_layers < 1 or numel < num_layers:
        raise ValueError(f"layers must be at least 1 and at most the number of parameters {numel}, got {num_layers}")
    with torch.device("meta"):
        return PlainModel(numel, num_layers).to(dtype)
