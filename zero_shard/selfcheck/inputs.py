"""What the cases of all operators are made from: numbers, segments, and the precision of the dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_NUMEL = 256
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WEIGHT_STEP = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_SPECIAL = [float(text) for text in "0 -0 inf -inf nan 1e-45 -1e-40 3.4e38 -3.39e38 1 -1 65504 65520 6e-8".split()]


def normal(numel: int, dtype: torch.dtype, seed: int, is_special: bool = False) -> Tensor:
    """Return numbers of very different magnitude, on the CPU."""
    random = torch.Generator().manual_seed(1000 * seed + numel % 1000)
    values = torch.randn(numel, generator=random, dtype=torch.float64)
    values *= torch.exp(torch.randn(numel, generator=random, dtype=torch.float64))
    if is_special and numel:
        places = torch.randint(numel, (max(1, numel // 8),), generator=random)
        kinds = torch.randint(len(_SPECIAL), places.shape, generator=random)
        values[places] = torch.tensor(_SPECIAL, dtype=torch.float64)[kinds]
    return values.to(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return it as users write it, without torch in front."""
    return str(dtype).removeprefix("torch.")


def segments(numel: int, alignment: int = 1) -> list[list[int]]:
    """Return rows of start, numel, slot, param_start: five parts of the shard, the third of them in no segment.

    Two parameters are so long that their elements' numbers pass 32 bits, within a segment or before it.
    """
    cuts = [numel * part // 5 // alignment * alignment for part in range(5)] + [numel]
    starts_in_param = [512, (1 << 32) - 256, 0, 0, (1 << 33) + 512]
    return [
        [cuts[part], cuts[part + 1] - cuts[part], slot, starts_in_param[part]] for slot, part in enumerate((0, 1, 3, 4))
    ]
