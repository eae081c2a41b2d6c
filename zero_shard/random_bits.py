"""Random bits for stochastic rounding, from a counter, in pure PyTorch: the counterpart of ``csrc/random_bits.h``.

See Note [Keyed rounding] there: a word depends on the parameter's number, its step and the element's index in the
parameter, and on nothing else. PyTorch has no unsigned arithmetic, so 32-bit words lie in int64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = (1 << 32) - 1
_LONG_WORD = (1 << 64) - 1
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
_GOLDEN_RATIO_32 = 0x9E3779B9


class RandomKey(NamedTuple):
    """What the elements of one parameter share at one step: two 32-bit words."""

    first: int
    second: int


def mix_bits(bits: int) -> int:
    """Return the finalizer of SplitMix64 (Steele, Lea, Flood, 2014) of 64 bits."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _LONG_WORD
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _LONG_WORD
    return bits ^ (bits >> 31)


def make_random_key(param_number: int, step: int) -> RandomKey:
    """Return the key of the first stream, which rounds weights."""
    inner = mix_bits((param_number + _GOLDEN_RATIO_64) & _LONG_WORD)
    bits = mix_bits((inner + step) & _LONG_WORD)
    return RandomKey(bits & _WORD, bits >> 32)


def moment_key(key: RandomKey) -> RandomKey:
    """Return the key of the second stream, which rounds 8-bit moments."""
    return RandomKey(key.second, key.first)


def random_bits(first: Tensor, second: Tensor, index: Tensor) -> Tensor:
    """Return 32 random bits for each element, in int64.

    Args:
        first: int64, the first word of the element's key; broadcast against ``index``.
        second: int64, the second word.
        index: int64, of the element in its parameter; may pass 2^32.
    """
    upper = index >> 32
    first = (first + upper * _GOLDEN_RATIO_32) & _WORD
    second = second ^ upper
    bits = (index & _WORD) ^ first
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & _WORD
    bits = (bits + second) & _WORD
    # The multiplier less 2^32: the same modulo 2^32, and the product fits an int64.
    bits = (bits ^ (bits >> 15)) * (0x846CA68B - (1 << 32)) & _WORD
    return bits ^ (bits >> 16)


def words_of(keys: list[RandomKey], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the second words of keys, each [K] int64."""
    table = torch.tensor(keys, dtype=torch.int64).view(-1, 2).to(device)
    return table[:, 0], table[:, 1]
