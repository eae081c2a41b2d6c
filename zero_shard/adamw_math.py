"""The AdamW update of many elements in pure PyTorch: the counterpart of ``csrc/adamw_math.h``.

# Note [One arithmetic]
Both use only IEEE basic operations (add, subtract, multiply, divide, square root) in one fixed order and never a fused
multiply-add, so that every instruction set, thread count, device and the twins give equal bits (the payload of a NaN
excepted). Constants are formed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zero_shard.block_codec import decode, encode, scales_of
from zero_shard.layout import BLOCK_NUMEL
from zero_shard.number_formats import join_master, round_to_bfloat16_by, split_remainder, square_root
from zero_shard.random_bits import RandomKey, moment_key, random_bits, words_of

# Bounds the temporaries: a step must not allocate anything that grows with the model. A multiple of BLOCK_NUMEL.
BATCH_NUMEL = 1 << 20
_LARGEST_STEP = 2.0**62


class Shard(NamedTuple):
    """What a step changes: tensors [N], scales [ceil(N / 256)]; see ``twins.adamw_``."""

    param: Tensor
    low: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None
    is_stochastic: bool


class Piece(NamedTuple):
    """A part of a segment, at most ``BATCH_NUMEL`` elements."""

    start: int  # in the shard
    numel: int
    param_start: int
    run: int  # which gradient tensor holds it
    constants: int  # its row in the table of constants
    key: RandomKey


class Batch:
    """Elements that are updated together: those of one long piece, or of many short ones.

    Attributes:
        where: What selects them from the shard, in the order of the pieces: a slice, or indices [n].
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.pieces, self.device = pieces, device
        numels = [piece.numel for piece in pieces]
        self._numel = sum(numels)
        self._numels = self._per_piece(numels)
        self._firsts = list(accumulate(numels, initial=0))[:-1]
        first = pieces[0].start
        self.where = slice(first, first + self._numel) if len(pieces) == 1 else self.elements()

    def _per_piece(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def spread(self, values: Tensor) -> Tensor:
        """Turn one value for each piece into one for each element, or into the only one (0-dim)."""
        if len(self.pieces) == 1:
            return values[0]
        return values.repeat_interleave(self._numels, output_size=self._numel)

    def _count_from(self, starts: Sequence[int]) -> Tensor:
        """Return [n]: the first element of each piece has its start, the next ones count on."""
        moves = [start - first for start, first in zip(starts, self._firsts, strict=True)]
        return torch.arange(self._numel, device=self.device).add_(self.spread(self._per_piece(moves)))

    def elements(self) -> Tensor:
        """Return where each element lies in the shard."""
        return self._count_from([piece.start for piece in self.pieces])

    def padded_positions(self) -> Tensor:
        """Return where each element lies when every piece begins a new row of ``BLOCK_NUMEL``."""
        num_rows = accumulate((-(-piece.numel // BLOCK_NUMEL) for piece in self.pieces), initial=0)
        return self._count_from([row * BLOCK_NUMEL for row in num_rows][:-1])

    def random_words(self, is_moment: bool) -> Tensor:
        """Return 32 random bits for each element, in int64; the stream for weights or that for moments."""
        keys = [moment_key(piece.key) if is_moment else piece.key for piece in self.pieces]
        first, second = words_of(keys, self.device)
        index = self._count_from([piece.param_start for piece in self.pieces])
        return random_bits(self.spread(first), self.spread(second), index)


def batches(pieces: Iterator[Piece], device: torch.device) -> Iterator[Batch]:
    """Put pieces together to batches of at most ``BATCH_NUMEL`` elements."""
    batch: list[Piece] = []
    numel = 0
    for piece in pieces:
        if batch and numel + piece.numel > BATCH_NUMEL:
            yield Batch(batch, device)
            batch, numel = [], 0
        batch.append(piece)
        numel += piece.numel
    if batch:
        yield Batch(batch, device)


class Constants(NamedTuple):
    """Of each element [n], or of all (0-dim), in the compute dtype."""

    grad_scale: Tensor  # negative when maximizing
    decay: Tensor  # 1 - lr * weight_decay
    signed_first_weight: Tensor  # 1 - beta1; where that is at least one half, -beta1
    beta2: Tensor
    one_minus_beta2: Tensor
    bias_correction2_sqrt: Tensor
    eps: Tensor
    minus_step_size: Tensor  # -(lr / (1 - beta1^t))
    is_first_weight_small: Tensor  # bool
    nearest_from: Tensor  # level of an 8-bit first moment, a whole number
    is_amsgrad: Tensor  # bool


def make_constants(rows: Sequence[tuple[Sequence[float], float]], grad_scale: Tensor | None, like: Tensor) -> Tensor:
    """Return the table of constants [K, 11] in the dtype and on the device of ``like``.

    Args:
        rows: Hyper-parameters (a row of ``group_hyper``) and step count.
        grad_scale: 0-dim.
    """
    hyper = torch.tensor([row for row, _ in rows], dtype=torch.float64).view(-1, 7)
    lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize = hyper.unbind(1)
    powers = [(_power(row[1], step), _power(row[2], step)) for row, step in rows]
    bias_corrections = 1.0 - torch.tensor(powers, dtype=torch.float64).view(-1, 2)
    weight = 1.0 - beta1
    is_small = weight < 0.5
    scale = torch.ones(()) if grad_scale is None else grad_scale.cpu()
    scale = scale.to(like.dtype).to(torch.float64)
    table = torch.stack(
        [
            torch.where(is_maximize != 0, -scale, scale),
            1.0 - lr * weight_decay,
            torch.where(is_small, weight, -(1.0 - weight)),
            beta2,
            1.0 - beta2,
            square_root(bias_corrections[:, 1].contiguous()),
            eps,
            -(lr / bias_corrections[:, 0]),
            is_small.to(torch.float64),
            _nearest_level_from(weight),
            (is_amsgrad != 0).to(torch.float64),
        ],
        dim=1,
    )
    return table.to(like.dtype).to(like.device)


def spread_constants(table: Tensor, batch: Batch) -> Constants:
    """Pick each element's constants from the table of ``make_constants``."""
    rows = table[torch.tensor([piece.constants for piece in batch.pieces]).to(table.device)]
    constants = Constants(*(batch.spread(column) for column in rows.unbind(1)))
    return constants._replace(
        is_first_weight_small=constants.is_first_weight_small != 0, is_amsgrad=constants.is_amsgrad != 0
    )


def _nearest_level_from(first_weight: Tensor) -> Tensor:
    """Return the level from which on first moments in 8 bits take the nearest: see Note [Stuck moments]."""
    level = torch.full_like(first_weight, 1.5).div_(first_weight).add_(0.5)  # a true division
    return torch.where(level < 129, level.clamp(min=2), 129.0).floor()


def _power(base: float, exponent: float) -> float:
    """Return ``base`` to a whole power by squaring: basic operations only, one result on every device.

    A library's ``pow`` differs between devices in the last bit. The error of 1 - base**t stays below 1e-13
    for betas up to 0.9995.
    """
    remaining = int(min(exponent, _LARGEST_STEP)) if exponent > 0 else 0
    result = 1.0
    while remaining:
        if remaining & 1:
            result *= base
        base *= base
        remaining >>= 1
    return result


def update_(shard: Shard, grad: Tensor, batch: Batch, constants: Constants) -> None:
    """Update the elements of a batch in place.

    Args:
        grad: [n], in the compute dtype, in the order of the batch.
    Source: arXiv:1711.05101, algorithm 2, in the operation order of torch.optim.AdamW.
    """
    where, dtype = batch.where, grad.dtype
    mean = _read_moment(shard.exp_avg, shard.exp_avg_scale, batch, dtype)
    square = _read_moment(shard.exp_avg_sq, shard.exp_avg_sq_scale, batch, dtype)
    grad = grad * constants.grad_scale
    master = _read_master(shard, batch, dtype) * constants.decay
    # torch's lerp, which starts from the nearer end: m + w * (g - m), or g - (1 - w) * (g - m).
    base = torch.where(constants.is_first_weight_small, mean, grad)
    mean = (grad - mean).mul_(constants.signed_first_weight).add_(base)
    square = (square * constants.beta2).add_((grad * constants.one_minus_beta2).mul_(grad))
    if shard.exp_avg_scale is None:
        shard.exp_avg[where] = mean.to(shard.exp_avg.dtype)
        shard.exp_avg_sq[where] = square.to(shard.exp_avg_sq.dtype)
    else:
        _write_codes(shard, mean, square, batch, constants.nearest_from)
    if shard.max_exp_avg_sq is not None:
        stored = shard.max_exp_avg_sq[where]
        largest = stored.to(dtype)
        largest = torch.where((largest > square) | largest.isnan(), largest, square)  # a NaN stays
        shard.max_exp_avg_sq[where] = torch.where(constants.is_amsgrad, largest.to(stored.dtype), stored)
        square = torch.where(constants.is_amsgrad, largest, square)
    # The divisor is a tensor on the device: CUDA replaces the division by a host scalar with a multiplication.
    denom = square_root(square).div_(constants.bias_correction2_sqrt).add_(constants.eps)
    master = master.add_((mean * constants.minus_step_size).div_(denom))
    _write_master(shard, batch, master)


def _read_moment(moment: Tensor, scales: Tensor | None, batch: Batch, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return moment[batch.where].to(dtype)
    return decode(moment[batch.where], scales[batch.elements() // BLOCK_NUMEL])


def _write_codes(shard: Shard, mean: Tensor, square: Tensor, batch: Batch, nearest_from: Tensor) -> None:
    """Store both moments as codes of new scales; the pieces of the batch begin where blocks do."""
    words, positions = batch.random_words(is_moment=True), batch.padded_positions()
    rows = positions // BLOCK_NUMEL
    blocks = batch.elements()[positions % BLOCK_NUMEL == 0] // BLOCK_NUMEL
    for codes, scales, values, random, first_nearest in (
        (shard.exp_avg, shard.exp_avg_scale, mean, words & 0xFFFF, nearest_from),
        (shard.exp_avg_sq, shard.exp_avg_sq_scale, square, words >> 16, None),
    ):
        assert scales is not None
        padded = values.new_zeros(len(blocks) * BLOCK_NUMEL)
        padded[positions] = values
        row_scales = scales_of(padded.view(-1, BLOCK_NUMEL))
        scales[blocks] = row_scales
        codes[batch.where] = encode(values, row_scales[rows], random, codes.dtype, first_nearest)


def _read_master(shard: Shard, batch: Batch, dtype: torch.dtype) -> Tensor:
    param = shard.param[batch.where]
    if shard.low is None:
        return param.to(dtype)
    return join_master(param, shard.low[batch.where])


def _write_master(shard: Shard, batch: Batch, master: Tensor) -> None:
    param, low, where = shard.param, shard.low, batch.where
    if shard.is_stochastic:
        param[where] = round_to_bfloat16_by(master, batch.random_words(is_moment=False))
    elif low is None:
        param[where] = master.to(param.dtype)
    elif param.dtype == torch.bfloat16:
        param[where], low[where] = split_remainder(master)
    else:
        param[where] = master.to(param.dtype)
        low[where] = master
