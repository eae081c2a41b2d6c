"""What must come out: plain torch in one process, and the comparison of every element with it.

A snapshot is a plain dictionary ``{parameter name: {"param": ..., "exp_avg": ..., "exp_avg_sq": ..., "step": ...}}``
with full tensors on the CPU; a parameter without optimizer state has only ``"param"``. The moments are always part of
it: AdamW divides the scale of the gradient out again, so weights alone don't show a wrong one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_shard

Snapshot = dict[str, dict[str, Tensor]]
Loss = Callable[[], Tensor]


class Tolerance(NamedTuple):
    """Allowed difference from the oracle: ``atol + rtol * |expected|``."""

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)
# Per step. fp64: a handful of roundings of 1.1e-16, over which the shards only reorder the sum of W gradients. fp32:
# the same with 6e-8. 16 bits: one unit in the last place, since weights are rounded once, from a float32 master.
TOLERANCE = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-6, 1e-6),
    torch.float16: Tolerance(2.0**-10, 1e-7),
    torch.bfloat16: Tolerance(2.0**-7, 1e-7),
    torch.complex64: Tolerance(1e-6, 1e-6),
}
# The numbers in the reports were written down with ten digits.
REPORTED = Tolerance(1e-10, 1e-10)


def mean_over_ranks(params: Iterable[nn.Parameter], per_rank: Sequence[Sequence[Loss]]) -> dict[nn.Parameter, Tensor]:
    """Leave in every ``p.grad`` the mean over ranks of the sum over the rank's micro-batches, and return what was made.

    A rank that makes no gradient for a parameter counts as zero; where no rank makes one, ``p.grad`` is None.
    Micro-batches are summed in the parameter's dtype as autograd does, ranks in rank order and at least float32;
    ``p.grad`` is that, rounded.

    Args:
        params: Parameters of one plain model; repeated ones count once.
        per_rank: For each of the W ranks its micro-batches, each a function that returns a scalar loss.
    """
    unique = list(dict.fromkeys(params))
    sums: dict[nn.Parameter, Tensor] = {}
    for losses in per_rank:
        for param in unique:
            param.grad = None
        for loss in losses:
            loss().backward()
        for param in unique:
            if param.grad is not None:
                local = param.grad.to(wide_dtype(param.dtype), copy=True)
                sums[param] = sums[param] + local if param in sums else local
    means = {param: total / len(per_rank) for param, total in sums.items()}
    for param in unique:
        param.grad = means[param].to(param.dtype) if param in means else None
    return means


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that gradients are summed and 16-bit weights updated in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class MasterAdamW:
    """Plain AdamW on float32 masters of 16-bit parameters, and on all other parameters themselves.

    Args:
        groups: Parameters or param groups, as ``torch.optim.AdamW`` takes them.
        hyper: Its other arguments.
    """

    def __init__(self, groups: Any, **hyper: Any) -> None:
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self._master_of: dict[nn.Parameter, nn.Parameter] = {}
        for group in groups:
            for param in group["params"]:
                wide = wide_dtype(param.dtype)
                self._master_of[param] = param if wide == param.dtype else nn.Parameter(param.detach().to(wide))
        inner_groups = [{**group, "params": [self._master_of[param] for param in group["params"]]} for group in groups]
        self.inner = torch.optim.AdamW(inner_groups, **hyper)

    def step(self, grads: dict[nn.Parameter, Tensor], max_norm: float | None) -> list[Tensor]:
        """Update with the given gradients; returns the norm before clipping, or an empty list if nothing is clipped."""
        for param, master in self._master_of.items():
            master.grad = grads.get(param)
        norms = [] if max_norm is None else [torch.nn.utils.clip_grad_norm_(self._master_of.values(), max_norm)]
        self.inner.step()
        with torch.no_grad():
            for param, master in self._master_of.items():
                param.copy_(master)
        return norms

    def snapshot(self, model: nn.Module) -> Snapshot:
        """Return the snapshot of the model that has the parameters."""
        snapshot: Snapshot = {}
        for name, param in model.named_parameters():
            state = self.inner.state.get(self._master_of[param], {})
            snapshot[name] = {"param": param.detach().clone(), **{key: value.clone() for key, value in state.items()}}
        return snapshot


def plain_snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Return the snapshot of an unsharded model and a plain optimizer."""
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return _snapshot(model, optimizer, weights, optimizer.state_dict())


def sharded_snapshot(model: nn.Module, optimizer: zero_shard.AdamW) -> Snapshot:
    """Return the full snapshot on rank 0 and an empty one elsewhere; all ranks call it."""
    weights, state = zero_shard.full_state_dict(model), optimizer.full_state_dict()
    return _snapshot(model, optimizer, weights, state) if state else {}


def _snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor], state: dict[str, Any]
) -> Snapshot:
    in_order = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    index_of = {id(param): index for param, index in zip(in_order, indices, strict=True)}
    snapshot: Snapshot = {}
    for name, param in model.named_parameters():
        entry = state["state"].get(index_of.get(id(param)), {})
        tensors = {key: torch.as_tensor(value).detach().clone() for key, value in entry.items()}
        snapshot[name] = {"param": weights[name].detach().clone(), **tensors}
    return snapshot


def assert_snapshots_close(
    got: Snapshot, want: Snapshot, tolerance: Tolerance | None = None, where: str = "", num_steps: int = 1
) -> None:
    """Compare every element, shape and dtype of two snapshots; NaN equals NaN.

    Args:
        got: What the library made.
        want: What the oracle made.
        tolerance: None takes each parameter's from ``TOLERANCE`` by its dtype, times ``num_steps``.
        where: Start of the message, e.g. the stage.
        num_steps: Steps since the two were equal.
    """
    assert list(got) == list(want), f"{where}: parameters {list(got)}, expected {list(want)}"
    for name, expected in want.items():
        entry = got[name]
        assert sorted(entry) == sorted(expected), f"{where}: {name} has {sorted(entry)}, expected {sorted(expected)}"
        for key, tensor in expected.items():
            if _are_equal(entry[key], tensor):
                continue  # assert_close would say the same, in 200 times the time
            # Moments of 16-bit parameters are float32, and as exact as that.
            rtol, atol = tolerance or [num_steps * value for value in TOLERANCE[tensor.dtype]]
            if key == "step":
                rtol, atol = EXACT
            torch.testing.assert_close(
                entry[key],
                tensor,
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text, name=name, key=key: f"{where}: {key} of {name}: {text}",
            )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout) and torch.equal(one, other)


def full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the full averaged gradient after backward; all ranks call it."""
    grad = param.grad
    return grad.full() if isinstance(grad, zero_shard.ShardedGrad) else grad


def fingerprint(model: nn.Module) -> str:
    """Return a hash of every full parameter as this rank sees it; all ranks call it."""
    digest = hashlib.sha256()
    with zero_shard.gathered(model):
        for name, param in model.named_parameters():
            data = param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            digest.update(name.encode() + str(param.dtype).encode() + str(tuple(param.shape)).encode() + data)
    return digest.hexdigest()


def assert_ranks_agree(model: nn.Module, where: str = "") -> None:
    """Check that all ranks hold the same bits in every full parameter; all ranks call it."""
    prints: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(model))
    assert len(set(prints)) == 1, f"{where}: ranks hold different parameters: {prints}"


class PlainWithMean(torch.optim.AdamW):
    """torch's AdamW on gradients that are averaged over the ranks: the oracle."""

    def average(self) -> None:
        """Average the gradients; one that no rank has stays away. All ranks call."""
        for group in self.param_groups:
            for param in group["params"]:
                has = torch.tensor(float(param.grad is not None))
                dist.all_reduce(has)
                if has:
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()


def weights_and_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return all weights and all optimizer state by name; ours on rank 0 only. All ranks call."""
    names = {param: name for name, param in model.named_parameters()}
    if isinstance(optimizer, zero_shard.AdamW):
        full, state = zero_shard.full_state_dict(model), optimizer.full_state_dict()
    else:
        full, state = model.state_dict(), optimizer.state_dict()
    found = {f"weight {name}": tensor for name, tensor in full.items()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, entry in state.get("state", {}).items():
        found |= {f"{kind} {names[params[number]]}": value for kind, value in entry.items()}
    return found


def assert_trained_alike(
    model: nn.Module, optimizer: Any, plain_model: nn.Module, plain: torch.optim.Optimizer
) -> None:
    """Compare weights and state with the oracle's. All ranks call; rank 0 compares."""
    want, got = weights_and_state(plain_model, plain), weights_and_state(model, optimizer)
    if dist.get_rank() == 0:
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=1e-10, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
            )
