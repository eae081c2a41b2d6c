"""Parameters and gradients that every kernel starts from."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Workload(NamedTuple):
    """Weights and gradients.

    Attributes:
        shapes: Of the parameters.
        values: [N] fp32, their elements one after the other.
        grad: [N] fp32.
    """

    shapes: list[tuple[int, ...]]
    values: Tensor
    grad: Tensor

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor, in the shapes of the parameters (aliases)."""
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def params(self, dtype: torch.dtype = torch.float32, is_flat: bool = False) -> list[nn.Parameter]:
        """Return new parameters with gradients, each in memory of its own."""
        params = []
        values, grads = ([self.values], [self.grad]) if is_flat else (self.split(self.values), self.split(self.grad))
        for value, grad in zip(values, grads, strict=True):
            param = nn.Parameter(value.to(dtype, copy=True))
            param.grad = grad.to(dtype, copy=True)
            params.append(param)
        return params


def transformer_shapes(width: int, num_layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT: embeddings, and per block two norms, attention and a two-layer perceptron."""
    block = [
        *((width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)),
    ]
    return [(width * 64 // 3, width), (width * 4 // 3, width), *(block * num_layers), (width,), (width,)]


def small_shapes(num_params: int, num_tensors: int) -> list[tuple[int, ...]]:
    """Return ``num_tensors`` shapes of three lengths, with about ``num_params`` elements in all."""
    mean = max(num_params // num_tensors, 3)
    lengths = [mean * 2 // 3 + 1, mean, mean * 4 // 3 - 1]
    return [(lengths[number % 3],) for number in range(num_tensors)]


def make_workload(shapes: list[tuple[int, ...]], device: str = "cpu") -> Workload:
    """Draw weights and gradients."""
    random = torch.Generator(device).manual_seed(0)
    numel = sum(math.prod(shape) for shape in shapes)
    values, grad = (torch.empty(numel, device=device).normal_(std=std, generator=random) for std in (0.02, 0.01))
    return Workload(shapes, values, grad)


def gpu_workload(numel: int) -> Workload:
    """Draw weights and gradients of a transformer with about ``numel`` parameters on the GPU."""
    width = 2048 if numel > 3e8 else 768 if numel > 3e7 else 96
    per_layer, rest = 12 * width * width, width * width * 68 // 3
    return make_workload(transformer_shapes(width, max(1, round((numel - rest) / per_layer))), "cuda")
