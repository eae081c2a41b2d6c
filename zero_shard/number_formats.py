"""How a weight is stored in 16 bits, in pure PyTorch: the counterpart of ``csrc/number_formats.h``."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

_MAGNITUDE = 0x7FFFFFFF
_INF = 0x7F800000
_BF16_QUIET_BIT = 0x40
_LOWER_16 = 0xFFFF
_CHUNK_NUMEL = 1 << 14  # bounds the temporaries, of which there are ten


def square_root(tensor: Tensor) -> Tensor:
    """Return the correctly rounded square root, which IEEE 754 asks for.

    On the CPU by NumPy, because torch.sqrt there calls MKL's vector library, which is one ulp off at times
    (0.7 % of uniform float32 values, measured with torch 2.13).
    """
    if tensor.device.type != "cpu":
        return tensor.sqrt()
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(tensor.numpy()))


def join_remainder(param: Tensor, low: Tensor) -> Tensor:
    """Return the float32 master weight of a bfloat16 ``param`` and its int16 remainder ``low``.

    A remainder that the split of no float32 value leaves behind (the weight was edited: zero, inf or NaN with
    a stale remainder) counts as 0; joining it blindly would turn an edited zero into a NaN.
    """
    high = param.view(torch.int16).to(torch.int32) << 16
    remainder = low.to(torch.int32)
    magnitude = high & _MAGNITUDE
    is_stale = ((magnitude == 0) & (remainder < 0)) | ((magnitude == _INF) & (remainder > 0)) | (magnitude > _INF)
    return (high + remainder.masked_fill_(is_stale, 0)).view(torch.float32)


def split_remainder(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weight and the int16 remainder that hold a float32 ``master`` without loss."""
    bits = master.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    high = (bits + 0x8000) >> 16
    remainder = bits - (high << 16)
    # Rounding would carry a NaN into the sign bit (-0.0), and truncation could drop the last bit of a NaN.
    special = (bits >> 16) | ((magnitude > _INF).to(torch.int32) * _BF16_QUIET_BIT)
    is_special = magnitude >= _INF
    high = torch.where(is_special, special, high)
    return high.to(torch.int16).view(torch.bfloat16), remainder.masked_fill_(is_special, 0).to(torch.int16)


def join_master(param: Tensor, low: Tensor) -> Tensor:
    """Return the float32 master of a 16-bit weight and what is kept beside it: int16, or (float16) the master itself.

    A float32 master that does not round to the weight counts for nothing: the weight has been edited or loaded.
    """
    if low.dtype == torch.int16:
        return join_remainder(param, low)
    is_stale = low.to(torch.float16).view(torch.int16) != param.view(torch.int16)
    return torch.where(is_stale, param.to(torch.float32), low)


def join_masters(param: Tensor, low: Tensor) -> Tensor:
    """Return what `join_master` does for tensors [n] of any length, with small temporaries."""
    master = torch.empty(param.numel(), dtype=torch.float32, device=param.device)
    for start in range(0, param.numel(), _CHUNK_NUMEL):
        chunk = slice(start, start + _CHUNK_NUMEL)
        master[chunk] = join_master(param[chunk], low[chunk])
    return master


def split_masters_(master: Tensor, param: Tensor, low: Tensor) -> None:
    """Store float32 masters [n] as 16-bit weights and what `join_master` needs beside them."""
    for start in range(0, master.numel(), _CHUNK_NUMEL):
        chunk = slice(start, start + _CHUNK_NUMEL)
        if low.dtype == torch.int16:
            param[chunk], low[chunk] = split_remainder(master[chunk])
        else:
            param[chunk], low[chunk] = master[chunk], master[chunk]


def round_to_bfloat16_by(master: Tensor, random: Tensor) -> Tensor:
    """Round float32 up or down in magnitude with the odds that keep the expected value; finite stays finite.

    Args:
        random: int64 of the shape of ``master``; the lower 16 bits decide.
    """
    bits = master.view(torch.int32)
    magnitude = (bits & _MAGNITUDE).to(torch.int64)
    rounded = magnitude + (random & _LOWER_16)
    rounded = torch.where(rounded >= _INF, magnitude, rounded) >> 16
    rounded |= (magnitude > _INF).to(torch.int64) * _BF16_QUIET_BIT
    rounded |= (bits >> 16) & ~0x7FFF  # the sign, as an int16 has it
    return rounded.to(torch.int16).view(torch.bfloat16)
