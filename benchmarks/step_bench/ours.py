"""Our operators, and our optimizer in a world of one."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

import zero_shard
from step_bench import names
from step_bench.contender import HYPER, MAX_NORM, SAMPLE_NUMEL, Contender, Entry, Variant
from step_bench.workload import Workload
from zero_shard import ops

BLOCK_NUMEL = 256
"""Elements that share a scale of 8-bit moments."""


class OurShard:
    """A shard under our operators: what zero_shard.AdamW holds of one bucket, without its Python.

    Args:
        work: Weights and gradients.
        dtype, moment_dtype, grad_dtype: Of the shard's tensors; int8 moments have scales beside them.
        has_master: Whether the rest of an fp32 master is kept beside a 16-bit weight.
        is_stochastic: Whether a bf16 weight is rounded stochastically.
    """

    def __init__(
        self,
        work: Workload,
        dtype: torch.dtype = torch.float32,
        moment_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        has_master: bool = False,
        is_stochastic: bool = False,
    ) -> None:
        device = work.values.device
        self.kernels = ops.select("auto", device)
        is_code = moment_dtype == torch.int8
        segments, numel = _segments(work, BLOCK_NUMEL if is_code else 1)
        self.offsets = segments[:, 0].tolist()
        self.numels = segments[:, 1].tolist()
        self.segments = segments.to(device)
        self.param = torch.zeros(numel, dtype=dtype, device=device)
        self.grad = torch.zeros(numel, dtype=grad_dtype, device=device)
        # As a world of one has it: a gradient for each parameter, where autograd left it.
        self.grads = self._parts(self.grad)
        torch._foreach_copy_(self._parts(self.param), list(work.values.split(self.numels)))
        torch._foreach_copy_(self.grads, list(work.grad.split(self.numels)))
        self.low: Tensor | None = None
        if has_master and dtype == torch.bfloat16:
            self.low = torch.zeros(numel, dtype=torch.int16, device=device)
        elif has_master:
            self.low = self.param.float()
        self.exp_avg = torch.zeros(numel, dtype=moment_dtype, device=device)
        self.exp_avg_sq = torch.zeros(numel, dtype=torch.uint8 if is_code else moment_dtype, device=device)
        self.scales = [torch.zeros(-(-numel // BLOCK_NUMEL), device=device) if is_code else None for _ in range(2)]
        self.is_stochastic = is_stochastic
        num_slots = len(segments)
        self.steps = torch.zeros(num_slots, device=device)
        hyper = [[HYPER["lr"], *HYPER["betas"], HYPER["eps"], HYPER["weight_decay"], 0.0, 0.0]]
        self.tables = (
            torch.ones(num_slots, dtype=torch.uint8, device=device),
            torch.zeros(num_slots, dtype=torch.int32, device=device),
            torch.arange(num_slots, device=device),
            torch.tensor(hyper, dtype=torch.float64, device=device),
        )
        self.pairs = torch.zeros(num_slots, 2, dtype=torch.float64, device=device)
        self.total = torch.zeros(2, dtype=torch.float64, device=device)
        self.sum_squares()

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [flat[start : start + count] for start, count in zip(self.offsets, self.numels, strict=True)]

    def sample(self) -> Tensor:
        """Return the first weights, of the first parameter only: alignment may have moved the others."""
        return self.param[: min(self.numels[0], SAMPLE_NUMEL)].float()

    def step(self, scale: Tensor | None = None, is_split: bool = False) -> None:
        """Update; the gradient comes as one flat tensor, or as one for each parameter."""
        self.steps += 1
        grads, offsets = (self.grads, self.offsets) if is_split else ([self.grad], [0])
        self.kernels.adamw_(
            *(self.param, self.low, grads, offsets, self.exp_avg, self.exp_avg_sq, None, *self.scales),
            *(self.segments, self.steps, *self.tables, scale, None, self.is_stochastic),
        )

    def sum_squares(self) -> None:
        """Fill the sums of squares that a reduction would have left behind."""
        self.kernels.sum_squares_(self.pairs, self.grads, self.offsets, self.grad.numel(), self.segments)

    def clipped_step(self, is_split: bool = False) -> None:
        """Clip by the sums that the reduction left behind, and update; nothing waits for the device."""
        self.kernels.sum_pairs_(self.total, self.pairs)
        self.step(torch.clamp(MAX_NORM / (self.total[0].sqrt() + 1e-6), max=1.0), is_split)

    def clipped_step_alone(self) -> None:
        """Sum the squares in a pass of their own, clip, and update."""
        self.sum_squares()
        self.clipped_step(is_split=True)

    def moment_nbytes(self) -> int:
        """Bytes of both moments with their scales."""
        return sum(each.nbytes for each in (self.exp_avg, self.exp_avg_sq, *self.scales) if each is not None)


def _segments(work: Workload, alignment: int) -> tuple[Tensor, int]:
    """Return the segment table of a shard that is the whole, each start a multiple: [S, 4] int64, and the end."""
    rows, start, end = [], 0, 0
    for slot, shape in enumerate(work.shapes):
        rows.append([start, math.prod(shape), slot, 0])
        end = start + rows[-1][1]
        start = -(-end // alignment) * alignment
    return torch.tensor(rows, dtype=torch.int64), end


def ours(label: str, nbytes: float, clip_nbytes: float | None = None, is_split: bool = False, **options: Any) -> Entry:
    """Return our operators.

    Args:
        label: What is added to the name.
        nbytes: Bytes per parameter of a step.
        clip_nbytes: What a pass over the gradient adds to them; None: clipped steps are not timed.
        is_split: Whether the unclipped step takes one gradient for each parameter.
        options: Of ``OurShard``.
    """

    def build(work: Workload) -> Contender:
        shard = OurShard(work, **options)
        variants = [Variant(functools.partial(shard.step, is_split=is_split), nbytes)]
        if clip_nbytes is not None:
            variants.append(Variant(shard.clipped_step, nbytes, names.BY_REDUCTION))
            variants.append(Variant(shard.clipped_step_alone, nbytes + clip_nbytes, names.BY_PASS))
        return Contender(variants, shard.sample, shard.moment_nbytes)

    return Entry(names.OURS + label, build)


def our_optimizer(
    label: str, nbytes: float, dtype: torch.dtype = torch.float32, max_grad_norm: float | None = None, **config: Any
) -> Entry:
    """Return ``zero_shard.AdamW`` in a world of one."""

    def build(work: Workload) -> Contender:
        params = work.params(dtype)
        optimizer = zero_shard.AdamW(params, **HYPER, config={**config, "max_grad_norm": max_grad_norm})
        clipping = "" if max_grad_norm is None else names.BY_CONFIG
        return Contender.of_optimizer(optimizer, params, [Variant(optimizer.step, nbytes, clipping)])

    return Entry(names.OUR_ADAMW + label, build)
