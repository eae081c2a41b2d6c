"""8-bit moments in pure PyTorch: the counterpart of ``csrc/block_codec.h``, see Note [Block codec] there.

One code for each element, and one float32 scale for each block of 256: the largest magnitude in it. A level L of 128
stands for scale * (L / 128)^2 with a sign (int8: first moments), a level of 256 for scale * (L / 256)^4 (uint8:
second moments). Level 1 does not exist: code 0 is level 0, and code k is level k + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from zero_shard.layout import BLOCK_NUMEL
from zero_shard.number_formats import square_root

NEAREST_LEVEL = 0x8000  # random bits that choose the nearest of two levels
_SMALLEST_SCALE = 2.0**-100  # so that the lowest level is no zero in float32
_TOP = {torch.int8: 128, torch.uint8: 256}
_CHUNK_NUMEL = 1 << 14  # bounds the temporaries, of which there are twenty


def scales_of(blocks: Tensor) -> Tensor:
    """Return the scale [B] of each row of values [B, 256]."""
    largest = blocks.abs().amax(1)  # NaN and inf stay
    return torch.where((largest > 0) & (largest < _SMALLEST_SCALE), _SMALLEST_SCALE, largest)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return float32 values; ``scales`` has one entry for each element."""
    wide = codes.to(torch.int32)
    magnitude = wide.abs()
    value = _level_value(torch.where(magnitude == 0, 0, magnitude + 1), scales, codes.dtype)
    return torch.where(wide < 0, -value, value)


def encode(
    values: Tensor, scales: Tensor, random: Tensor | int, dtype: torch.dtype, nearest_from: Tensor | None = None
) -> Tensor:
    """Return codes; between two levels the random bits decide, with the odds that keep the expected value.

    Args:
        values: [N] float32.
        scales: [N] float32, of the element's block.
        random: [N] int64 or one number, 0 to 65535.
        dtype: int8 or uint8 (second moments: a positive one never becomes zero).
        nearest_from: [N] or 0-dim; where the level below is at least this, the nearest one is taken instead.
    """
    top = _TOP[dtype]
    magnitude = values.abs() if dtype == torch.int8 else values
    # A true division: torch replaces that of a number by a tensor with a reciprocal.
    inverse = torch.where(scales == 0, 0.0, torch.ones_like(scales).div_(scales))
    root = square_root(magnitude * inverse)
    position = (root if dtype == torch.int8 else square_root(root)) * top
    below = torch.where(position < top, position, float(top)).to(torch.int32)  # a NaN is at the top
    below = torch.where(below < 2, 0, below)
    above = torch.where(below == 0, 2, below + 1)
    low, high = _level_value(below, scales, dtype), _level_value(above, scales, dtype)
    random = torch.as_tensor(random, device=values.device)
    if nearest_from is not None:
        random = torch.where(below >= nearest_from, NEAREST_LEVEL, random)
    chance = random.to(torch.float32) * 2.0**-16
    is_up = (below < top) & (chance * (high - low) < magnitude - low)
    level = torch.where(is_up, above, below)
    if dtype == torch.uint8:
        level = torch.where((level == 0) & (values > 0), 2, level)
    code = torch.where(level == 0, 0, level - 1)
    return torch.where(values < 0, -code, code).to(dtype) if dtype == torch.int8 else code.to(dtype)


def _level_value(level: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    wide = level.to(torch.float32)
    square = wide * wide
    if dtype == torch.int8:
        return square * 2.0**-14 * scales
    square = square * 2.0**-16
    return square * square * scales


@torch.no_grad()
def encode_blocks(values: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of values and the scales of their blocks; each value takes the nearest level.

    Encoding what ``decode_blocks`` returned gives the same codes and scales.

    Args:
        values: [N] float32; blocks are counted from its first element.
        is_signed: First moments; otherwise second ones.
    Returns:
        Codes [N], int8 or uint8, and scales [ceil(N / 256)] float32.
    """
    codes = torch.empty(values.numel(), dtype=torch.int8 if is_signed else torch.uint8, device=values.device)
    scales = torch.empty(-(-values.numel() // BLOCK_NUMEL), dtype=torch.float32, device=values.device)
    for first in range(0, values.numel(), _CHUNK_NUMEL):
        part = values[first : first + _CHUNK_NUMEL]
        chunk_scales = scales_of(pad(part, (0, -part.numel() % BLOCK_NUMEL)).reshape(-1, BLOCK_NUMEL))
        spread = chunk_scales.repeat_interleave(BLOCK_NUMEL)[: part.numel()]
        codes[first : first + _CHUNK_NUMEL] = encode(part, spread, NEAREST_LEVEL, codes.dtype)
        scales[first // BLOCK_NUMEL : first // BLOCK_NUMEL + len(chunk_scales)] = chunk_scales
    return codes, scales


def decode_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values [N] of codes [N] (int8: signed; uint8) with scales [ceil(N / 256)]."""
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    for first in range(0, codes.numel(), _CHUNK_NUMEL):
        part = codes[first : first + _CHUNK_NUMEL]
        stop = -(-(first + part.numel()) // BLOCK_NUMEL)
        spread = scales[first // BLOCK_NUMEL : stop].repeat_interleave(BLOCK_NUMEL)[: part.numel()]
        values[first : first + _CHUNK_NUMEL] = decode(part, spread)
    return values
