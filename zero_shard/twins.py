"""The operators in pure PyTorch: signatures, checks and bits of the compiled ones, at a lower speed.

They run where the compiled part is missing, and in the tests as its plain counterpart. None communicates. Temporaries
are bounded: none grows with the shard. The arithmetic lies beside this file: ``adamw_math``, ``block_codec``,
``canonical_sums``, ``number_formats`` and ``random_bits``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_shard import canonical_sums
from zero_shard.adamw_math import BATCH_NUMEL, Piece, Shard, batches, make_constants, spread_constants, update_
from zero_shard.block_codec import decode_blocks, encode_blocks
from zero_shard.layout import BLOCK_NUMEL, SCALE_NBYTES, WIRE_BLOCK_NBYTES
from zero_shard.number_formats import join_remainder, split_remainder
from zero_shard.operator_checks import (
    FLOAT_DTYPES,
    MAX_DIMS,
    Checker,
    StepRows,
    Tables,
    check,
    check_adamw,
    count_dims,
    find_runs,
    kind_of,
    read_tables,
)
from zero_shard.random_bits import RandomKey, make_random_key
from zero_shard.wire_codec import dequantize, quantize

__all__ = [
    "adamw_",
    "decode_blocks",
    "encode_blocks",
    "flatten_",
    "join_remainder",
    "quantize_",
    "reduce_slices_",
    "split_remainder",
    "sum_pairs_",
    "sum_squares_",
    "unflatten_",
]

_CHUNK_NUMEL = 1 << 20


@torch.no_grad()
def flatten_(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], scale: Tensor | None) -> None:
    """Copy tensors, each in row-major order and cast to the dtype of ``flat``, into one flat buffer.

    Elements of ``flat`` that no tensor covers become zero. Casts round to nearest even (from float64 to a
    16-bit type through float32, as ``Tensor.to`` does).

    Args:
        flat: [N] contiguous, mutated.
        tensors: Of any shape and strides (at most 6 dimensions when neighbours that are one run of memory are joined)
            and of differing floating dtypes.
        offsets: Where each tensor starts in ``flat``; ascending, the ranges disjoint.
        scale: 0-dim float32, a factor: the product is taken in float32, in float64 where either dtype is that. None:
            no product; between equal dtypes the bits stay.
    Raises:
        RuntimeError: a wrong dtype, device, shape, or ranges that overlap or leave ``flat``.
    """
    _check_copies("flatten_", flat, tensors, offsets, scale)
    end = 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        flat[end:offset].zero_()
        end = offset + tensor.numel()
        for first, piece in _pieces(tensor, offset):
            target = flat[first : first + piece.numel()].view(piece.shape)
            target.copy_(_scaled(piece, scale, flat.dtype))
    flat[end:].zero_()


@torch.no_grad()
def unflatten_(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], scale: Tensor | None) -> None:
    """Copy ranges of one flat buffer into tensors, the reverse of ``flatten_``; nothing else is touched.

    Args:
        tensors: As for ``flatten_``, mutated; no element may lie where another one does.
        flat: [N] contiguous.
        offsets: Where the range of each tensor starts in ``flat``; ascending, the ranges disjoint.
        scale: As for ``flatten_``.
    Raises:
        RuntimeError: a wrong dtype, device, shape, strides of 0, or ranges that overlap or leave ``flat``.
    """
    _check_copies("unflatten_", flat, tensors, offsets, scale)
    for index, tensor in enumerate(tensors):
        if any(length > 1 and not step for length, step in zip(tensor.shape, tensor.stride(), strict=True)):
            strides = list(tensor.stride())
            raise RuntimeError(
                f"unflatten_: tensors[{index}] must have no two elements in one place, got strides {strides}"
            )
    for tensor, offset in zip(tensors, offsets, strict=True):
        for first, piece in _pieces(tensor, offset):
            source = flat[first : first + piece.numel()].view(piece.shape)
            piece.copy_(_scaled(source, scale, tensor.dtype))


def _check_copies(
    op: str, flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], scale: Tensor | None
) -> None:
    checker = Checker(op, flat.device)
    checker.tensor("flat", flat, FLOAT_DTYPES, [flat.numel()])
    checker.optional("scale", scale, (torch.float32,), [])
    checker.floats("tensors", tensors)
    checker.offsets(("offsets", "tensors", "flat"), offsets, tensors, flat.numel())
    for index, tensor in enumerate(tensors):
        if tensor.numel() and count_dims(tensor) > MAX_DIMS:
            raise RuntimeError(
                f"{op}: tensors[{index}] must have at most {MAX_DIMS} dimensions that are not one run of memory with "
                f"their neighbour, got {kind_of(tensor)} with strides {list(tensor.stride())}"
            )


def _pieces(tensor: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
    """Cut a tensor into parts (aliases) of at most ``_CHUNK_NUMEL`` elements, in row-major order from ``start`` on."""
    if tensor.numel() <= _CHUNK_NUMEL:
        yield start, tensor
        return
    inner = tensor.numel() // len(tensor)
    if inner > _CHUNK_NUMEL:
        for index, part in enumerate(tensor):
            yield from _pieces(part, start + index * inner)
        return
    num_rows = _CHUNK_NUMEL // inner
    for first in range(0, len(tensor), num_rows):
        yield start + first * inner, tensor[first : first + num_rows]


def _scaled(values: Tensor, scale: Tensor | None, target: torch.dtype) -> Tensor:
    if scale is None:
        return values
    wide = torch.float64 if torch.float64 in (values.dtype, target) else torch.float32
    return values.to(wide) * scale.to(wide)


@torch.no_grad()
def quantize_(wire: Tensor, values: Tensor) -> None:
    """Write values to blocks of 260 bytes: a float32 scale and 256 int8 codes; see ``wire_codec``.

    Args:
        wire: [N / 256 * 260] uint8, mutated.
        values: [N] float32, bfloat16 or float16, N a multiple of 256.
    Raises:
        RuntimeError: a wrong dtype, device or shape.
    """
    checker, numel = Checker("quantize_", values.device), values.numel()
    checker.tensor("values", values, (torch.float32, torch.bfloat16, torch.float16), [numel])
    check(numel % BLOCK_NUMEL == 0, f"quantize_: values must have a multiple of {BLOCK_NUMEL} elements, got {numel}")
    checker.tensor("wire", wire, (torch.uint8,), [numel // BLOCK_NUMEL * WIRE_BLOCK_NBYTES])
    blocks = wire.view(-1, WIRE_BLOCK_NBYTES)
    for start in range(0, numel, _CHUNK_NUMEL):
        scales, codes = quantize(values[start : start + _CHUNK_NUMEL])
        rows = blocks[start // BLOCK_NUMEL :][: len(scales)]
        rows[:, :SCALE_NBYTES] = scales[:, None].view(torch.uint8)
        rows[:, SCALE_NBYTES:] = codes.view(torch.uint8)


@torch.no_grad()
def reduce_slices_(
    out: Tensor,
    slices: Tensor,
    divisor: int,
    accumulate: bool,
    segments: Tensor | None,
    sums: Tensor | None,
    own: Tensor | None = None,
    own_rank: int = 0,
) -> None:
    """Add W slices in rank order, divide the sum, and write it to ``out`` or add it there.

    Args:
        out: [N] float32 (float64 with float64 slices), mutated.
        slices: [W, N] contiguous, W >= 1; each slice is widened to the dtype of ``out`` before it is added. Or uint8
            [W, N / 256 * 260]: what ``quantize_`` has written.
        divisor: At least 1; a true division of the finished sum.
        accumulate: Whether the quotient is added to ``out`` instead of replacing it.
        segments: [S, 4] int64, as for ``adamw_``; None where ``sums`` is None.
        sums: [S, 2] float64, mutated: the sum of squares of ``out``, as it is then, over each segment; see
            ``sum_squares_``. None: none is wanted.
        own: [N], the slice of ``own_rank`` where it lies apart from the other W - 1 in ``slices``.
        own_rank: 0 <= own_rank < W; read where ``own`` is given.
    Raises:
        RuntimeError: a wrong dtype, device, shape or table entry.
    """
    is_wire = slices.dtype == torch.uint8
    is_known = is_wire or slices.dtype in FLOAT_DTYPES
    check(
        slices.dim() == 2 and slices.shape[0] >= 1 and is_known and slices.is_contiguous(),
        f"reduce_slices_: slices must be contiguous floating or uint8 [W, N] with W >= 1, got {kind_of(slices)}",
    )
    check(
        not is_wire or slices.shape[1] % WIRE_BLOCK_NBYTES == 0,
        f"reduce_slices_: uint8 slices must be whole blocks of {WIRE_BLOCK_NBYTES} bytes, got {kind_of(slices)}",
    )
    dtype = torch.float64 if slices.dtype == torch.float64 else torch.float32
    checker = Checker("reduce_slices_", slices.device)
    numel = slices.shape[1] // WIRE_BLOCK_NBYTES * BLOCK_NUMEL if is_wire else slices.shape[1]
    checker.tensor("out", out, (dtype,), [numel])
    check(divisor >= 1, f"reduce_slices_: divisor must be at least 1, got {divisor}")
    rows = list(slices)
    if own is not None:
        checker.tensor("own", own, (slices.dtype,), [slices.shape[1]])
        last = len(rows)
        check(
            0 <= own_rank <= last, f"reduce_slices_: own_rank must be at least 0 and below {last + 1}, got {own_rank}"
        )
        rows.insert(own_rank, own)
    if sums is None:
        checker.absent("segments", segments, "where sums are not given")
    else:
        checker.present("segments", segments, "where sums are")
        _check_sums(checker, sums, segments)
    table = _read_segments(checker, segments, out.numel())
    # A 0-dim tensor on the device: CUDA replaces the division by a host scalar with a multiplication.
    full_divisor = torch.full((), divisor, dtype=dtype, device=out.device)
    for start in range(0, out.numel(), _CHUNK_NUMEL):
        chunk = slice(start, start + _CHUNK_NUMEL)
        total = _widened(rows[0], chunk, dtype)
        for row in rows[1:]:
            total.add_(_widened(row, chunk, dtype))
        total.div_(full_divisor)
        if accumulate:
            out[chunk].add_(total)
        else:
            out[chunk].copy_(total)
    if sums is not None:
        _write_pairs(sums, canonical_sums.sum_squares_by_segment([out], [0], table))


def _widened(piece: Tensor, chunk: slice, dtype: torch.dtype) -> Tensor:
    """Return a chunk of a slice as a new tensor of the dtype that it is added in."""
    if piece.dtype != torch.uint8:
        return piece[chunk].to(dtype, copy=True)
    start, stop = chunk.start // BLOCK_NUMEL * WIRE_BLOCK_NBYTES, chunk.stop // BLOCK_NUMEL * WIRE_BLOCK_NBYTES
    return dequantize(piece[start:stop])


@torch.no_grad()
def sum_squares_(sums: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, segments: Tensor) -> None:
    """Write the sum of squares of each segment of a shard as an unevaluated sum of two numbers.

    The first is the sum, rounded once; it does not depend on instruction set, threads, device, or on where a parameter
    is cut into shards (see Note [Canonical chunks] in csrc/pair_sum.h). NaN or inf among the values make it NaN or inf.

    Args:
        sums: [S, 2] float64, mutated.
        tensors: The values, in the shard's memory order: contiguous, of one floating dtype. 16-bit values are widened
            to float32; what no tensor covers counts as 0.
        offsets: Where each tensor starts in the shard; ascending, the ranges disjoint.
        numel: Length N of the shard.
        segments: [S, 4] int64, as for ``adamw_``; slots are not looked at.
    Raises:
        RuntimeError: a wrong dtype, device, shape or table entry.
    """
    checker = Checker("sum_squares_", sums.device)
    check(numel >= 0, f"sum_squares_: numel must be at least 0, got {numel}")
    _check_sums(checker, sums, segments)
    checker.offsets(("offsets", "tensors", "the shard"), offsets, tensors, numel)
    checker.runs("tensors", tensors, FLOAT_DTYPES)
    table = _read_segments(checker, segments, numel)
    flat = [tensor.view(-1) for tensor in tensors]
    _write_pairs(sums, canonical_sums.sum_squares_by_segment(flat, offsets, table))


@torch.no_grad()
def sum_pairs_(total: Tensor, pairs: Tensor) -> None:
    """Write the sum of K unevaluated pairs, as ``sum_squares_`` writes them, as one pair.

    Args:
        total: [2] float64, mutated.
        pairs: [K, 2] float64; K may be 0.
    Raises:
        RuntimeError: a wrong dtype, device or shape.
    """
    checker = Checker("sum_pairs_", total.device)
    checker.tensor("total", total, (torch.float64,), [2])
    checker.tensor("pairs", pairs, (torch.float64,), [pairs.numel() // 2, 2])
    _write_pairs(total, [canonical_sums.add_pairs(pairs.view(-1).tolist())])


def _check_sums(checker: Checker, sums: Tensor, segments: Tensor | None) -> None:
    assert segments is not None
    checker.segments(segments)
    checker.tensor("sums", sums, (torch.float64,), [len(segments), 2])


def _read_segments(checker: Checker, segments: Tensor | None, numel: int) -> list[list[int]]:
    table: list[list[int]] = [] if segments is None else segments.tolist()
    checker.segment_rows(table, numel)
    return table


def _write_pairs(sums: Tensor, pairs: list[canonical_sums.Pair]) -> None:
    sums.copy_(torch.tensor(pairs, dtype=torch.float64).view(sums.shape))


@torch.no_grad()
def adamw_(
    param: Tensor,
    low: Tensor | None,
    grads: Sequence[Tensor],
    grad_offsets: Sequence[int],
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    segments: Tensor,
    slot_steps: Tensor,
    slot_is_active: Tensor,
    slot_groups: Tensor,
    slot_numbers: Tensor,
    group_hyper: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    stochastic: bool,
) -> None:
    """Update a shard of N elements by one AdamW step, in place; elements outside all segments stay.

    With P slots (parameters), S segments, G param groups; all tensors contiguous and on one device:

    Args:
        param: [N] float32, float64, bfloat16 or float16.
        low: [N] the part of the float32 master weight that a 16-bit ``param`` cannot hold: int16 remainder
            for bfloat16, the whole float32 master for float16 (made again from ``param`` where the two
            disagree). None: no master; must be None for float32 and float64.
        grads: The gradient, in the shard's memory order: tensors of any shape, all of the dtype of ``param`` or all
            float32 (float64 with a float64 ``param``). Each active segment lies within one of them.
        grad_offsets: Where each of them starts in the shard; ascending, the ranges disjoint.
        exp_avg: [N] float32 (float64 with a float64 ``param``), bfloat16, or int8 codes (neither with float64).
        exp_avg_sq: [N] of the dtype of ``exp_avg``; uint8 beside int8.
        max_exp_avg_sq: [N] the same; None where no group asks for amsgrad, and beside int8.
        exp_avg_scale: [ceil(N / 256)] float32 beside int8, else None; see ``block_codec``. Blocks are counted in
            the shard, and every segment begins with one there and in its parameter.
        exp_avg_sq_scale: The same.
        segments: [S, 4] int64: start, numel, slot, start in the parameter; ascending and disjoint.
        slot_steps: [P] float32 step count, this step included.
        slot_is_active: [P] uint8; 0 leaves the slot's elements untouched.
        slot_groups: [P] int32 row of ``group_hyper``.
        slot_numbers: [P] int64 number of the parameter: with its step the key of its random bits.
        group_hyper: [G, 7] float64: lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize.
        grad_scale: 0-dim float32 or float64; the gradient is multiplied by it first.
        found_inf: 0-dim float32; anything but 0 leaves everything untouched.
        stochastic: Round the new weight up or down at random, keeping its expected value; only for a bfloat16
            ``param`` without ``low``.
    Raises:
        RuntimeError: a wrong dtype, device, shape or table entry.
    Source: arXiv:1711.05101, algorithm 2; see Note [One arithmetic].
    """
    shard = Shard(
        param, low, exp_avg, exp_avg_sq, max_exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, is_stochastic=stochastic
    )
    tables = Tables(segments, slot_steps, slot_is_active, slot_groups, slot_numbers, group_hyper)
    check_adamw(shard, grads, grad_offsets, tables, grad_scale, found_inf)
    rows = read_tables(shard, tables)
    runs = find_runs(rows, grads, grad_offsets)
    if found_inf is not None and found_inf.item() != 0:  # nor is NaN 0
        return
    settings = {
        (group, step): None
        for group, step, active in zip(rows.groups, rows.steps, rows.is_active, strict=True)
        if active
    }
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    constants = make_constants(
        [(rows.hyper[group], step) for group, step in settings],
        grad_scale,
        torch.empty(0, dtype=dtype, device=param.device),
    )
    place_of = {setting: place for place, setting in enumerate(settings)}
    flat_grads = [grad.view(-1) for grad in grads]
    for batch in batches(_segment_pieces(rows, runs, place_of), param.device):
        parts = [
            flat_grads[piece.run][piece.start - grad_offsets[piece.run] :][: piece.numel] for piece in batch.pieces
        ]
        grad = parts[0] if len(parts) == 1 else torch.cat(parts)
        update_(shard, grad.to(dtype), batch, spread_constants(constants, batch))


def _segment_pieces(rows: StepRows, runs: Sequence[int], place_of: dict[tuple[int, float], int]) -> Iterator[Piece]:
    """Cut the active segments into pieces of at most ``BATCH_NUMEL`` elements."""
    for (start, numel, slot, param_start), run in zip(rows.segments, runs, strict=True):
        if run < 0:
            continue
        step = rows.steps[slot]
        place, key = place_of[rows.groups[slot], step], _key(rows.numbers[slot], step)
        for first in range(0, numel, BATCH_NUMEL):
            length = min(numel - first, BATCH_NUMEL)
            yield Piece(start + first, length, param_start + first, run, place, key)


def _key(number: int, step: float) -> RandomKey:
    return make_random_key(number, int(step) if math.isfinite(step) else 0)
