"""Faults that people reported in other sharded optimizers: wrong numbers. Each test says where it was reported.

Every test runs at every stage; the gradients are known, so the expected numbers can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from models import Cells, Use, linear_use
from oracle import (
    REPORTED,
    Snapshot,
    Tolerance,
    assert_ranks_agree,
    assert_snapshots_close,
    full_grad,
    mean_over_ranks,
    plain_snapshot,
    sharded_snapshot,
)
from torch import Tensor

import zero_shard

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
every_world = pytest.mark.parametrize("world_size", [1, 2, 3, 4])

UsesOfStep = Callable[[int, int, int], dict[int, Use]]


def build(model: torch.nn.Module, stage: int, params: Any = None, config: Any = None, **hyper: Any) -> zero_shard.AdamW:
    """Make the optimizer of a test; ``params`` is what plain AdamW would get, by default all parameters."""
    full_config = {"stage": stage, **(config or {})}
    return zero_shard.AdamW(model.parameters() if params is None else params, module=model, config=full_config, **hyper)


def ones(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def weight_name(index: int) -> str:
    return f"cells.{index}.weight"


def assert_first_values(snapshot: Snapshot, key: str, expected: list[float], tolerance: Tolerance = REPORTED) -> None:
    """Compare the first element of every parameter's ``key`` with a list of numbers."""
    got = torch.stack([entry[key].flatten()[0].to(torch.float64) for entry in snapshot.values()])
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64), rtol=tolerance.rtol, atol=tolerance.atol
    )


# --- averaging ---


def _average(stage: int, dtype: torch.dtype) -> Snapshot:
    model = Cells([ones(4, dtype=dtype)])
    optimizer = build(model, stage, lr=0.1, weight_decay=0.0)
    gradient = torch.arange(1.0, 5.0, dtype=dtype) * (dist.get_rank() + 1)
    model({0: linear_use(gradient)}).backward()
    mean = full_grad(model.weights[0])
    world = dist.get_world_size()
    assert mean is not None
    expected = torch.arange(1.0, 5.0, dtype=torch.float64) * (world + 1) / 2
    torch.testing.assert_close(mean.to(torch.float64), expected, rtol=2.0**-8 if dtype.itemsize == 2 else 1e-7, atol=0)
    optimizer.step()
    assert_ranks_agree(model)
    return sharded_snapshot(model, optimizer)


@every_stage
@every_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradient_is_the_mean_and_not_the_sum(world_size: int, stage: int, dtype: torch.dtype) -> None:
    """An averaging reduce-scatter returned the sum on gloo; the weights hardly show it, ``exp_avg`` does.

    Source: pytorch/pytorch issue #162338.
    """
    snapshot = ranks.run(world_size, _average, stage, dtype)[0]
    entry = snapshot[weight_name(0)]
    rtol = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[dtype]
    expected = 0.1 * (world_size + 1) / 2 * torch.arange(1.0, 5.0, dtype=torch.float64)
    torch.testing.assert_close(entry["exp_avg"].to(torch.float64), expected, rtol=rtol, atol=0)
    torch.testing.assert_close(
        entry["exp_avg_sq"].to(torch.float64), 0.001 * (10 * expected) ** 2, rtol=2 * rtol + 1e-6, atol=0
    )
    torch.testing.assert_close(
        entry["param"].to(torch.float64), torch.full_like(expected, 0.9), rtol=rtol + 1e-6, atol=0
    )
    assert entry["param"].dtype == dtype
    assert entry["step"].item() == 1


# --- accumulation ---


def _uses_in_second_micro_batch(step: int, rank: int, micro: int) -> dict[int, Use]:
    scale = (rank + 1.0) * (micro + 1.0)
    uses: dict[int, Use] = {0: linear_use(scale * ones(5))}
    if micro == 1:
        uses[1] = linear_use(scale * ones(3))
    return uses


def _train(
    stage: int, shapes: list[tuple[int, ...]], micros: list[int], uses: UsesOfStep, hyper: dict[str, Any]
) -> Any:
    """Train ``Cells`` of ones; return the snapshot after each step (rank 0)."""
    model = Cells([ones(*shape) for shape in shapes])
    optimizer = build(model, stage, **hyper)
    snapshots = []
    for step, num_micros in enumerate(micros):
        optimizer.zero_grad()
        for micro in range(num_micros):
            model(uses(step, dist.get_rank(), micro)).backward()
        optimizer.step()
        assert_ranks_agree(model, f"step {step}")
        snapshots.append(sharded_snapshot(model, optimizer))
    return snapshots


def _oracle(
    world_size: int, shapes: list[tuple[int, ...]], micros: list[int], uses: UsesOfStep, hyper: dict[str, Any]
) -> list[Snapshot]:
    """Do what ``_train`` does in plain torch."""
    model = Cells([ones(*shape) for shape in shapes])
    optimizer = torch.optim.AdamW(model.parameters(), **hyper)
    snapshots = []
    for step, num_micros in enumerate(micros):
        losses = [
            [lambda step=step, rank=rank, micro=micro: model(uses(step, rank, micro)) for micro in range(num_micros)]
            for rank in range(world_size)
        ]
        mean_over_ranks(model.parameters(), losses)
        optimizer.step()
        snapshots.append(plain_snapshot(model, optimizer))
    return snapshots


def _assert_equal_to_oracle(world_size: int, stage: int, *recipe: Any) -> list[Snapshot]:
    got, want = ranks.run(world_size, _train, stage, *recipe)[0], _oracle(world_size, *recipe)
    for step, (ours, plain) in enumerate(zip(got, want, strict=True)):
        assert_snapshots_close(ours, plain, REPORTED, f"W={world_size}, stage {stage}, step {step}")
    return got


@every_stage
@every_world
def test_accumulation_with_a_parameter_used_in_some_micro_batches(world_size: int, stage: int) -> None:
    """Only the last micro-batch survived, or a left-over of the unused parameter's gradient came back a step later.

    Source: deepspeedai/DeepSpeed PR #545 and issue #1488.
    """
    hyper = {"lr": 0.1, "weight_decay": 0.1}
    got = _assert_equal_to_oracle(world_size, stage, [(5,), (3,)], [3, 1, 2], _uses_in_second_micro_batch, hyper)
    if world_size == 2:
        assert_first_values(got[0], "exp_avg", [0.9, 0.3])
        assert_first_values(got[0], "param", [0.8900000001, 0.8900000003])
        assert_first_values(got[1], "exp_avg", [0.96, 0.3])
        assert_first_values(got[1], "param", [0.8027672654, 0.8900000003])
        assert_first_values(got[1], "step", [2, 1])
        assert_first_values(got[2], "exp_avg", [1.314, 0.57])
        assert_first_values(got[2], "param", [0.7121654546, 0.7811000007])
        assert_first_values(got[2], "step", [3, 2])
    torch.testing.assert_close(got[1][weight_name(1)]["param"], got[0][weight_name(1)]["param"], rtol=0, atol=0)


# --- shapes ---


def _alternating(stage: int, config: dict[str, Any]) -> tuple[Snapshot, dict[str, tuple[int, ...]]]:
    shapes = [(), (1,), (2,), (3, 5), (7,)]
    model = Cells([ones(*shape) for shape in shapes])
    weights = model.weights
    groups = [{"params": weights[:1], "weight_decay": 0.0}, {"params": weights[1:], "weight_decay": 0.1}]
    optimizer = build(model, stage, groups, config, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(
            {
                index: linear_use(
                    (-1) ** step * (index + 1) * torch.arange(1.0, ones(*shape).numel() + 1).reshape(shape)
                )
                for index, shape in enumerate(shapes)
            }
        ).backward()
        optimizer.step()
        assert_ranks_agree(model, f"step {step}")
    return sharded_snapshot(model, optimizer), {name: tuple(p.shape) for name, p in model.named_parameters()}


@every_stage
@every_world
@pytest.mark.parametrize("bucket_mib", [1e-5, 25])
def test_parameters_smaller_than_the_world(world_size: int, stage: int, bucket_mib: float) -> None:
    """Groups with fewer elements than ranks crashed, and 0-dim parameters were refused.

    The last element is the one that padding or a wrong offset spoils.
    Source: deepspeedai/DeepSpeed issue #129; pytorch/pytorch PR #132934.
    """
    snapshot, shapes = ranks.run(world_size, _alternating, stage, {"bucket_mib": bucket_mib})[0]
    assert list(shapes.values()) == [(), (1,), (2,), (3, 5), (7,)]
    for name, entry in snapshot.items():
        for key in ("param", "exp_avg", "exp_avg_sq"):
            assert tuple(entry[key].shape) == shapes[name], f"{key} of {name}"
        assert entry["step"].item() == 3
    last = [[entry[key].flatten()[-1].item() for entry in snapshot.values()] for key in ("param", "exp_avg")]
    weights = [0.8716838234, 0.8439201912, 0.8439201907, 0.8439201905, 0.8439201906]
    expected = torch.tensor([weights, [0.091, 0.182, 0.546, 5.46, 3.185]], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(last, dtype=torch.float64), expected, rtol=1e-10, atol=1e-10)


# --- strides ---

_STRIDES = [(1, 4), (12, 1, 6, 3), (100, 100, 1)]


def _strided_model() -> Cells:
    generator = torch.Generator().manual_seed(3)
    transposed = torch.randn(3, 4, dtype=torch.float64, generator=generator).t()
    image = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=generator)
    batched = torch.randn(2, 1, 100, dtype=torch.float64, generator=generator)
    return Cells([transposed, image.contiguous(memory_format=torch.channels_last), batched])


def _strided_uses(gradient_strides: list[tuple[int, ...]]) -> dict[int, Use]:
    def multiply(weight: Tensor) -> Tensor:
        if weight.requires_grad:
            weight.register_hook(lambda grad: gradient_strides.append(grad.stride()))
        factors = torch.arange(1.0, 11.0, dtype=torch.float64).reshape(2, 1, 5)
        return torch.bmm(weight.transpose(1, 2), factors).sum()

    counted = [torch.arange(1.0, n + 1, dtype=torch.float64) for n in (12, 48)]
    return {0: linear_use(counted[0].reshape(4, 3)), 1: linear_use(counted[1].reshape(4, 3, 2, 2)), 2: multiply}


def _strided_step(stage: int, path: str) -> tuple[Any, ...]:
    """Take one step, write a checkpoint if ``path`` isn't empty, and return everything that a load needs (rank 0)."""
    model = _strided_model()
    optimizer = build(model, stage, lr=0.1, weight_decay=0.1)
    gradient_strides: list[tuple[int, ...]] = []
    model(_strided_uses(gradient_strides)).backward()
    # The recipe is worth something only if autograd hands back another order of strides than the parameter's.
    assert gradient_strides == [(100, 1, 1)], gradient_strides
    optimizer.step()
    assert [weight.stride() for weight in model.weights] == _STRIDES
    assert_ranks_agree(model)
    if path:
        zero_shard.save(path, model, optimizer)
    return sharded_snapshot(model, optimizer), zero_shard.full_state_dict(model), optimizer.full_state_dict()


def _strided_second_step(stage: int, weights: dict[str, Tensor], state: dict[str, Any], path: str) -> Any:
    model = _strided_model()
    optimizer = build(model, stage, lr=0.1, weight_decay=0.1)
    if path:
        zero_shard.load(path, model, optimizer)
    else:
        with zero_shard.gathered(model, modify=True):
            model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    loaded = sharded_snapshot(model, optimizer)
    model(_strided_uses([])).backward()
    optimizer.step()
    with zero_shard.gathered(model):
        assert [weight.stride() for weight in model.weights] == _STRIDES
    return loaded, sharded_snapshot(model, optimizer)


def _strided_oracle() -> list[Snapshot]:
    model = _strided_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    snapshots = []
    for _ in range(2):
        optimizer.zero_grad()
        model(_strided_uses([])).backward()
        optimizer.step()
        snapshots.append(plain_snapshot(model, optimizer))
    return snapshots


def _check_strided(world_size: int, stage: int, path: str) -> None:
    plain = _strided_oracle()
    saved, weights, state = ranks.run(world_size, _strided_step, stage, path)[0]
    assert_snapshots_close(saved, plain[0], REPORTED, "after the first step")
    counted = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)
    torch.testing.assert_close(saved[weight_name(0)]["exp_avg"], 0.1 * counted, rtol=1e-10, atol=0)
    loaded, final = ranks.run(1, _strided_second_step, stage, weights, state, path)[0]
    assert_snapshots_close(loaded, saved, Tolerance(0, 0), "after loading")
    assert_snapshots_close(final, plain[1], REPORTED, "after the second step")


@every_stage
@every_world
def test_strided_parameters_and_gradients_keep_their_places(world_size: int, stage: int) -> None:
    """The right values came back in the wrong places, and only after loading: a flat copy was read in another order.

    Source: pytorch/pytorch PR #137000, issue #106951 and PR #137382.
    """
    _check_strided(world_size, stage, "")


@every_stage
def test_strided_parameters_through_a_checkpoint(stage: int, tmp_path: Path) -> None:
    """The same through a checkpoint on disk, written by two ranks and read by one."""
    _check_strided(2, stage, str(tmp_path / "checkpoint"))


def _step_by_hand(stage: int) -> Snapshot:
    model = _strided_model()
    optimizer = build(model, stage, lr=0.1, weight_decay=0.1)
    for weight in model.weights:
        counted = torch.arange(1.0, weight.numel() + 1, dtype=torch.float64) * (dist.get_rank() + 1)
        weight.grad = counted.reshape(weight.shape)  # row-major, whatever the strides of the parameter
    optimizer.step()
    assert_ranks_agree(model)
    return sharded_snapshot(model, optimizer)


@every_stage
@every_world
def test_gradient_assigned_by_hand_is_averaged_in_logical_order(world_size: int, stage: int) -> None:
    """A gradient with other strides than its parameter was read in memory order.

    Autograd copies gradients to the parameter's strides, a user doesn't. Source: pytorch/pytorch issue #106951.
    """
    snapshot = ranks.run(world_size, _step_by_hand, stage)[0]
    model = _strided_model()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for weight in model.weights:
        counted = torch.arange(1.0, weight.numel() + 1, dtype=torch.float64) * (world_size + 1) / 2
        weight.grad = counted.reshape(weight.shape)
    plain.step()
    assert_snapshots_close(snapshot, plain_snapshot(model, plain), REPORTED, f"stage {stage}")


# --- dtypes ---


def _mixed_dtypes(stage: int, dtypes: list[torch.dtype]) -> Snapshot:
    values = [torch.full((2,), 1 + 1j if dtype.is_complex else 1, dtype=dtype) for dtype in dtypes]
    model = Cells(values)
    optimizer = build(model, stage, lr=0.1, weight_decay=0.1)

    def use(dtype: torch.dtype) -> Use:
        if dtype.is_complex:  # the gradient of Re(w c) is conj(c)
            return lambda weight: (weight * (0.5 + 0.5j)).real.sum()
        return linear_use(torch.full((2,), 0.5, dtype=dtype))

    model({index: use(dtype) for index, dtype in enumerate(dtypes)}).backward()
    optimizer.step()
    assert [weight.dtype for weight in model.weights] == dtypes
    assert_ranks_agree(model)
    return sharded_snapshot(model, optimizer)


_REAL_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


@every_stage
@every_world
def test_one_group_with_several_dtypes(world_size: int, stage: int) -> None:
    """A gather of tensors of several dtypes into one output crashed; float64 must not pass through float32 on the way.

    Source: deepspeedai/DeepSpeed issue #8072.
    """
    snapshot = ranks.run(world_size, _mixed_dtypes, stage, _REAL_DTYPES)[0]
    weights = [entry["param"] for entry in snapshot.values()]
    assert [weight.dtype for weight in weights] == _REAL_DTYPES
    expected = [0.8900000453, 0.890625, 0.890000002, 0.8901]
    tolerances = [1e-7, 0, 1e-10, 1e-4]
    for weight, value, atol in zip(weights, expected, tolerances, strict=True):
        torch.testing.assert_close(weight.double(), torch.full((2,), value, dtype=torch.float64), rtol=0, atol=atol)
    for entry in snapshot.values():
        torch.testing.assert_close(entry["exp_avg"].double(), torch.full((2,), 0.05).double(), rtol=1e-6, atol=0)


@every_stage
@pytest.mark.parametrize("world_size", [2, 3])
def test_complex_parameters_are_two_reals_or_refused_by_name(world_size: int, stage: int) -> None:
    """The second moment of a complex parameter was its square instead of that of its real and imaginary part.

    Source: pytorch/pytorch issue #59998.
    """
    dtypes = [*_REAL_DTYPES, torch.complex64]
    errors = ranks.run_expecting_errors(world_size, _mixed_dtypes, stage, dtypes)
    if errors == [None] * world_size:
        snapshot = ranks.run(world_size, _mixed_dtypes, stage, dtypes)[0]
        expected = torch.full((2,), 0.89 + 1.09j, dtype=torch.complex64)
        torch.testing.assert_close(snapshot[weight_name(4)]["param"], expected, rtol=1e-6, atol=0)
    else:
        for error in errors:
            assert isinstance(error, ValueError | TypeError | NotImplementedError), repr(error)
            assert weight_name(4) in str(error) and "complex" in str(error)


# --- hidden steps ---


def _build_only(stage: int) -> tuple[Tensor, Snapshot]:
    model = Cells([ones(2)])
    optimizer = build(model, stage, lr=0.1, weight_decay=0.1)
    with zero_shard.gathered(model):
        weight = model.weights[0].detach().clone()
    return weight, sharded_snapshot(model, optimizer)


def _look_then_step(stage: int, path: str) -> Snapshot:
    model = Cells([ones(2)])
    optimizer = build(model, stage, lr=0.1, weight_decay=0.0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.full_state_dict().get("state", {}) == {}
    zero_shard.full_state_dict(model)
    with zero_shard.gathered(model):
        model.state_dict()
    if path:
        zero_shard.save(path, model, optimizer)
    model({0: linear_use(torch.tensor([2.0, -3.0], dtype=torch.float64))}).backward()
    optimizer.step()
    assert_ranks_agree(model)
    return sharded_snapshot(model, optimizer)


@every_stage
@every_world
def test_no_hidden_step_at_construction_or_state_dict(world_size: int, stage: int, tmp_path: Path) -> None:
    """A step with zero gradients, made to create the state, decayed the weights or advanced the bias correction.

    Source: deepspeedai/DeepSpeed PR #5104; pytorch/pytorch issue #164929; NVIDIA/Megatron-LM PR #5976;
    pytorch/torchtitan PR #4382.
    """
    weight, snapshot = ranks.run(world_size, _build_only, stage)[0]
    assert torch.equal(weight, ones(2))
    assert torch.equal(snapshot[weight_name(0)]["param"], ones(2))
    path = str(tmp_path / "checkpoint")
    entry = ranks.run(world_size, _look_then_step, stage, path)[0][weight_name(0)]
    expected = torch.tensor([0.9000000005, 1.0999999997], dtype=torch.float64)
    torch.testing.assert_close(entry["param"], expected, rtol=1e-10, atol=1e-10)
    assert entry["step"].item() == 1


# --- groups ---

_GROUP_NUMELS = [5, 3, 1, 4, 7, 2]


def _edit_groups(groups: list[dict[str, Any]]) -> None:
    groups[0]["lr"], groups[0]["betas"] = 0.05, (0.8, 0.99)
    groups[1]["weight_decay"], groups[1]["eps"] = 0.2, 1e-3


def _group_run(optimizer: torch.optim.Optimizer, model: Cells) -> None:
    for step in range(4):
        if step == 2:
            _edit_groups(optimizer.param_groups)
        optimizer.zero_grad()
        factor = 1.0 if step % 2 == 0 else -0.5
        model({index: linear_use((index + 1) * factor * ones(n)) for index, n in enumerate(_GROUP_NUMELS)}).backward()
        optimizer.step()


def _groups_of(model: Cells) -> list[dict[str, Any]]:
    weights = model.weights
    return [
        {"params": weights[0::2], "lr": 0.1, "weight_decay": 0.1},
        {"params": weights[1::2], "lr": 0.01, "weight_decay": 0.0},
    ]


def _edited_groups(stage: int, config: dict[str, Any]) -> tuple[Snapshot, list[list[list[int]]]]:
    model = Cells([ones(n) for n in _GROUP_NUMELS])
    optimizer = build(model, stage, _groups_of(model), config)
    _group_run(optimizer, model)
    assert_ranks_agree(model)
    dicts = [optimizer.state_dict(), optimizer.full_state_dict()]
    indices = [[group["params"] for group in entry["param_groups"]] for entry in dicts if entry]
    return sharded_snapshot(model, optimizer), indices


@every_stage
@every_world
@pytest.mark.parametrize("bucket_mib", [1e-5, 25])
def test_interleaved_groups_edited_in_mid_run(world_size: int, stage: int, bucket_mib: float) -> None:
    """Only an edited lr took effect, or only the first rank's shard saw the edit; interleaved groups were renumbered.

    Source: facebookresearch/fairscale issue #66; deepspeedai/DeepSpeed issue #5063; pytorch/pytorch PR #54736.
    """
    snapshot, indices = ranks.run(world_size, _edited_groups, stage, {"bucket_mib": bucket_mib})[0]
    expected = [0.7951613476, 0.9749496656, 0.7951613462, 0.9749471560, 0.7951613459, 0.9749463191]
    assert_first_values(snapshot, "param", expected)
    assert indices == [[[0, 1, 2], [3, 4, 5]]] * 2
    model = Cells([ones(n) for n in _GROUP_NUMELS])
    plain = torch.optim.AdamW(_groups_of(model))
    _group_run(plain, model)
    assert_snapshots_close(snapshot, plain_snapshot(model, plain), REPORTED, f"stage {stage}")
