"""Gradients in 8 bits on the wire, in pure PyTorch: the counterpart of ``csrc/wire_codec.h``.

A block of 256 elements travels as 260 bytes: a float32 scale, the largest magnitude divided by 127, and a code for each
element, the nearest multiple of it. See Note [Wire blocks] there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_shard.block_codec import scales_of
from zero_shard.layout import BLOCK_NUMEL, SCALE_NBYTES

_TOP_CODE = 127.0


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale [B] and the codes [B, 256] of values [256 B] of any floating dtype."""
    blocks = values.view(-1, BLOCK_NUMEL).to(torch.float32)
    largest, raised = blocks.abs().amax(1), scales_of(blocks)
    is_finite = largest < torch.inf
    top = torch.full_like(raised, _TOP_CODE)  # CUDA replaces the division by a host scalar with a multiplication
    scales = torch.where(is_finite, raised / top, torch.nan)
    inverse = torch.where(is_finite & (largest > 0), top / raised, 0.0)
    codes = torch.where(is_finite[:, None], (blocks * inverse[:, None]).round_(), 0.0)
    return scales, codes.to(torch.int8)


def dequantize(wire: Tensor) -> Tensor:
    """Return the float32 values [256 B] of blocks [260 B] uint8, contiguous."""
    blocks = wire.view(-1, SCALE_NBYTES + BLOCK_NUMEL)
    scales = blocks[:, :SCALE_NBYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return blocks[:, SCALE_NBYTES:].view(torch.int8).to(torch.float32).mul_(scales).view(-1)
