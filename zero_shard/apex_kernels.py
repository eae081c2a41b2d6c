"""NVIDIA apex's fused AdamW on the local shard: ``kernels="apex"``.

# Note [apex]
``amp_C.multi_tensor_adam`` takes lists of tensors, one step count and one set of hyper-parameters for all of them.
It drops the work it has gathered when the last tensor of a list is empty, and counts elements in 32 bits; so lists
here hold neither empty tensors nor ones of 2^31 elements. It reads no table on the device: each step waits for the
GPU, and sends one launch for each group and step count.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_Kernels = TypeVar("_Kernels", bound=NamedTuple)  # ops.Kernels, which lies above this file

_MAX_NUMEL = 1 << 30
_TEMPORARY_NUMEL = 1 << 24
"""Bounds the copy of the gradient that a factor needs, as apex takes none."""
_ADAMW_MODE = 1
_HAS_BIAS_CORRECTION = 1
_PROBE_RTOL = 1e-5
_PROBE_STEPS = 3
_IS_AMSGRAD = 5  # the column of group_hyper
_BUILD = (
    "kernels='apex' needs NVIDIA's apex (https://github.com/NVIDIA/apex), which comes as source only and needs CUDA: "
    "git clone https://github.com/NVIDIA/apex && cd apex && "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
)


class _Apex(NamedTuple):
    """The two things that are used of apex."""

    applier: Callable[..., Any]
    multi_tensor_adam: Any


class _Lists(NamedTuple):
    """Four lists of equal length, in the order that apex takes them; aliases of the shard."""

    grads: list[Tensor]
    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


class _Piece(NamedTuple):
    """A contiguous part of the shard that lies in one gradient."""

    start: int
    numel: int
    grad_index: int


def status() -> str:
    """Return in words which apex is installed; imports nothing."""
    has_extension = importlib.util.find_spec("amp_C") is not None
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "not installed"
    # Looked for as a file: importing the unrelated package runs, and fails in, whatever that one needs.
    places = [Path(place) / "multi_tensor_apply" for place in spec.submodule_search_locations or ()]
    if not any(place.is_dir() or place.with_suffix(".py").is_file() for place in places):
        return "the unrelated package called apex on PyPI, not NVIDIA's"
    return "NVIDIA's apex" if has_extension else "NVIDIA's apex, built without its CUDA extensions (no amp_C)"


def load(native: _Kernels, device: torch.device | str | None = None) -> _Kernels:
    """Return ``native`` with the update done by apex, after a probe has shown that it gives our numbers.

    Args:
        native: The operators; all but ``adamw_`` stay as they are.
        device: Where the probe runs; None = the GPU.
    Raises:
        RuntimeError: NVIDIA's apex is missing or does not load, there is no GPU, or its numbers differ from those of
            ``torch.optim.AdamW``.
    """
    found = status()
    if found != "NVIDIA's apex":
        raise RuntimeError(f"{_BUILD} Found: {found}.")
    try:
        applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        apex = _Apex(applier, importlib.import_module("amp_C").multi_tensor_adam)
    except (ImportError, AttributeError, OSError) as error:
        raise RuntimeError(f"{_BUILD} Found NVIDIA's apex, but it does not load: {error}") from error

    if device is None and not torch.cuda.is_available():
        raise RuntimeError("kernels='apex' runs on CUDA GPUs only, and torch sees none; use kernels='auto'")

    def adamw_(*args: Any, **kwargs: Any) -> None:
        _adamw(apex, *args, **kwargs)

    _probe(adamw_, torch.device("cuda" if device is None else device))
    return native._replace(name="apex", adamw_=adamw_)


@torch.no_grad()
def _adamw(
    apex: _Apex,
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
    """Update a shard as ``twins.adamw_`` does, where apex can; waits for the GPU to read the tables."""
    _check_precision(param, low, grads, exp_avg, exp_avg_sq, exp_avg_scale is not None or stochastic)
    hyper, steps, groups = group_hyper.tolist(), slot_steps.tolist(), slot_groups.tolist()
    is_active = slot_is_active.tolist()
    if any(active and hyper[group][_IS_AMSGRAD] for active, group in zip(is_active, groups, strict=True)):
        raise NotImplementedError("kernels='apex' has no amsgrad; use kernels='auto' for it")
    if found_inf is not None and found_inf.item() != 0:
        return
    together: dict[tuple[int, float], list[tuple[int, int]]] = {}
    for start, numel, slot, _ in segments.tolist():
        if is_active[slot] and numel:
            together.setdefault((groups[slot], steps[slot]), []).append((start, numel))
    noop_flag = torch.zeros(1, dtype=torch.int32, device=param.device)
    shard = (param, exp_avg, exp_avg_sq)
    for (group, step), ranges in together.items():
        lr, beta1, beta2, eps, weight_decay, _, is_maximize = hyper[group]
        settings = (lr, beta1, beta2, eps, int(step), _ADAMW_MODE, _HAS_BIAS_CORRECTION, weight_decay)
        factor = _factor(grad_scale, is_maximize != 0, param)
        max_numel = _MAX_NUMEL if factor is None else _TEMPORARY_NUMEL
        pieces = list(_pieces(ranges, grads, grad_offsets, max_numel))
        for batch in [pieces] if factor is None else _batches(pieces):
            lists = _lists(batch, shard, grads, grad_offsets, factor)
            apex.applier(apex.multi_tensor_adam, noop_flag, list(lists), *settings)


def _check_precision(
    param: Tensor, low: Tensor | None, grads: Sequence[Tensor], exp_avg: Tensor, exp_avg_sq: Tensor, is_special: bool
) -> None:
    dtypes = {tensor.dtype for tensor in (param, exp_avg, exp_avg_sq, *grads)}
    if is_special or low is not None or dtypes != {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise NotImplementedError(
            "kernels='apex' updates float32 parameters with float32 gradients and moments, without a master weight, "
            f"8-bit moments or stochastic rounding, got {names}; use kernels='auto', which has all of them"
        )


def _factor(grad_scale: Tensor | None, is_maximize: bool, param: Tensor) -> Tensor | None:
    """Return what the gradient is multiplied by, on the device; None where that is 1."""
    if grad_scale is None and not is_maximize:
        return None
    scale = torch.ones((), device=param.device) if grad_scale is None else grad_scale.to(torch.float32)
    return -scale if is_maximize else scale


def _pieces(
    ranges: Sequence[tuple[int, int]], grads: Sequence[Tensor], offsets: Sequence[int], max_numel: int
) -> Iterator[_Piece]:
    """Join neighbouring ranges that lie in one gradient, and cut what is too long.

    Raises:
        RuntimeError: A range lies in no gradient.
    """
    joined: list[_Piece] = []
    index = 0
    for start, numel in ranges:
        while index < len(grads) and offsets[index] + grads[index].numel() < start + numel:
            index += 1
        if index == len(grads) or offsets[index] > start:
            raise RuntimeError(
                f"adamw_: each active segment must lie within one of the gradients, got start {start}, numel {numel}"
            )
        before = joined[-1] if joined else None
        if before is not None and before.grad_index == index and before.start + before.numel == start:
            joined[-1] = before._replace(numel=before.numel + numel)
        else:
            joined.append(_Piece(start, numel, index))
    for piece in joined:
        for first in range(0, piece.numel, max_numel):
            yield _Piece(piece.start + first, min(max_numel, piece.numel - first), piece.grad_index)


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Split into lists whose gradients together fit the temporary copy."""
    batch: list[_Piece] = []
    numel = 0
    for piece in pieces:
        if batch and numel + piece.numel > _TEMPORARY_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(piece)
        numel += piece.numel
    if batch:
        yield batch


def _lists(
    pieces: Sequence[_Piece],
    shard: tuple[Tensor, Tensor, Tensor],
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    factor: Tensor | None,
) -> _Lists:
    lists = _Lists([], [], [], [])
    for start, numel, index in pieces:
        for tensors, flat in zip(lists[1:], shard, strict=True):
            tensors.append(flat[start : start + numel])
        grad = grads[index].view(-1)[start - offsets[index] : start - offsets[index] + numel]
        lists.grads.append(grad if factor is None else grad * factor)
    return lists


class _ProbeResult(NamedTuple):
    """One kind of number after the steps of the probe, from apex and from ``torch.optim.AdamW``."""

    name: str
    actual: Tensor
    expected: Tensor


def _probe(adamw_: Callable[..., None], device: torch.device) -> None:
    """Compare a few steps of a small shard with ``torch.optim.AdamW``.

    Raises:
        RuntimeError: A number differs, or apex itself raises.
    """
    try:
        results = _take_probe_steps(adamw_, device)
    except (RuntimeError, TypeError) as error:
        raise RuntimeError(
            f"kernels='apex': the probe of amp_C.multi_tensor_adam on {device} failed: {error}. "
            "Build apex again with this torch and CUDA, or use kernels='auto'"
        ) from error
    for name, actual, expected in results:
        magnitude = expected.abs()
        # Of a number near zero the digits that cancelled cannot be asked for.
        allowed = _PROBE_RTOL * (magnitude + 0.01 * magnitude.max())
        excess = ((actual - expected).abs() - allowed).nan_to_num(nan=torch.inf)
        worst = int(excess.argmax())
        if excess[worst] > 0:
            raise RuntimeError(
                f"kernels='apex': after {_PROBE_STEPS} steps apex gives {name} {actual[worst].item():.9g} where "
                f"torch.optim.AdamW gives {expected[worst].item():.9g}; use kernels='auto', or another version of apex"
            )


def _take_probe_steps(adamw_: Callable[..., None], device: torch.device) -> list[_ProbeResult]:
    # Not beta2 = 0.999: 1 - beta2 in float32, as apex forms it, would alone be off by 1.3e-5.
    sizes, lr, betas, eps, weight_decay = (257, 0, 3, 0), 1e-2, (0.9, 0.99), 1e-8, 0.1
    values = torch.linspace(-1.0, 1.0, sum(sizes), device=device)
    param, exp_avg, exp_avg_sq = values.clone(), torch.zeros_like(values), torch.zeros_like(values)
    plain = torch.nn.Parameter(values.clone())
    optimizer = torch.optim.AdamW([plain], lr, betas, eps, weight_decay, foreach=False, fused=False)
    segments = torch.tensor([[sum(sizes[:slot]), size, slot, 0] for slot, size in enumerate(sizes)])
    slots = torch.arange(len(sizes))
    hyper = torch.tensor([[lr, *betas, eps, weight_decay, 0.0, 0.0]], dtype=torch.float64)
    for step in range(1, _PROBE_STEPS + 1):
        grad = torch.sin(values * 10 * step)
        plain.grad = grad.clone()
        optimizer.step()
        steps = torch.full_like(slots, step, dtype=torch.float32)
        tables = [segments, steps, torch.ones_like(slots), torch.zeros_like(slots), slots, hyper]
        moments = (exp_avg, exp_avg_sq, None, None, None)
        adamw_(param, None, [grad], [0], *moments, *(table.to(device) for table in tables), None, None, False)
    state = optimizer.state[plain]
    return [
        _ProbeResult("weight", param, plain.detach()),
        _ProbeResult("exp_avg", exp_avg, state["exp_avg"]),
        _ProbeResult("exp_avg_sq", exp_avg_sq, state["exp_avg_sq"]),
    ]
