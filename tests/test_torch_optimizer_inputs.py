"""Torch's own inputs for tests of AdamW, given to torch's AdamW and to ours at every stage."""

from __future__ import annotations

import re
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from models import Cells, linear_use
from oracle import Tolerance, assert_snapshots_close, mean_over_ranks, plain_snapshot, sharded_snapshot
from torch import Tensor, nn

import zero_shard

_F64 = torch.float64
_FLAGS: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}]
_NUM_STEPS = 3

every_stage = pytest.mark.parametrize("stage", range(4))


def _inputs() -> list[Any]:
    """Those for every kind of device: what they ask of a GPU works on a CPU too, or fails there."""
    from torch.testing._internal.common_optimizers import optim_inputs_func_adamw  # slow to import

    found = {each.desc: each for device in ("cpu", "mps", "cuda") for each in optim_inputs_func_adamw(device, _F64)}
    assert len(found) >= 11, list(found)
    return list(found.values())


def _error_inputs() -> list[Any]:
    from torch.testing._internal.common_optimizers import optim_error_inputs_func_adamw

    return optim_error_inputs_func_adamw("cpu", _F64)  # type: ignore[no-any-return]


def _model() -> Cells:
    torch.manual_seed(0)
    return Cells([torch.randn(shape, dtype=_F64) for shape in ((4, 3), (5,), (1,), ())])


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    uses = {
        number: linear_use(torch.randn(weight.shape, dtype=_F64, generator=generator))
        for number, weight in enumerate(model.weights)
    }
    return model(uses)


def _fresh(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    if isinstance(value, tuple):
        return tuple(_fresh(each, dtype) for each in value)
    return value.to(dtype, copy=True) if isinstance(value, Tensor) else value


def _plain_run(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Numbers given as tensors are made float64: torch computes with them as they are, and float32 would be seen."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), **{key: _fresh(value, _F64) for key, value in kwargs.items()})
    for step in range(_NUM_STEPS):

        def closure(step: int = step) -> float:
            losses = [[lambda r=r: _loss(model, r, step)] for r in range(dist.get_world_size())]
            mean_over_ranks(model.parameters(), losses)
            return 0.5

        assert optimizer.step(closure) == 0.5
    return plain_snapshot(model, optimizer)


def _run(kwargs: dict[str, Any], stage: int) -> tuple[dict[str, Any], zero_shard.AdamW]:
    model = _model()
    config = {"stage": stage, "bucket_mib": 1e-4}
    kwargs = {key: _fresh(value) for key, value in kwargs.items()}
    optimizer = zero_shard.AdamW(model.parameters(), **kwargs, module=model, config=config)
    for step in range(_NUM_STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            _loss(model, dist.get_rank(), step).backward()
            return 0.5

        assert optimizer.step(closure) == 0.5
    return sharded_snapshot(model, optimizer), optimizer


def _every_input(stage: int) -> list[str]:
    """Return the inputs that plain torch does not take."""
    refused = []
    for number, each in enumerate(_inputs()):
        # All flags on one rank, where a run costs little; on more ranks one each, another at every stage.
        for flags in _FLAGS if dist.get_world_size() == 1 else [_FLAGS[(number + stage) % len(_FLAGS)]]:
            kwargs, where = {**each.kwargs, **flags}, f"{each.desc} {flags}, stage {stage}"
            try:
                want = _plain_run(kwargs)
            except ValueError as error:  # when it is built
                refused.append(where)
                with pytest.raises(ValueError, match=re.escape(str(error))):
                    _run(kwargs, stage)
                continue
            except (AssertionError, RuntimeError):  # in its step, which has nothing for such numbers on a CPU
                refused.append(where)
                betas = tuple(float(beta) for beta in kwargs.get("betas", (0.9, 0.999)))
                want = _plain_run({**kwargs, "capturable": False, "foreach": False, "fused": False, "betas": betas})
            got, optimizer = _run(kwargs, stage)
            if got:
                assert_snapshots_close(got, want, Tolerance(1e-12, 1e-13), where)
            for key, value in flags.items():
                assert optimizer.param_groups[0][key] == value, where
    return refused


@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_inputs_give_what_torchs_adamw_gives(world_size: int, stage: int) -> None:
    for refused in ranks.run(world_size, _every_input, stage):
        assert not any(text.startswith(("default", "amsgrad", "maximize", "nonzero")) for text in refused), refused


def _every_error(stage: int) -> int:
    for each in _error_inputs():
        given = each.optimizer_error_input
        for kind in (torch.optim.AdamW, zero_shard.AdamW):
            model = _model()
            params = list(model.parameters()) if given.params is None else given.params
            ours = {} if kind is torch.optim.AdamW else {"module": model, "config": {"stage": stage}}
            with pytest.raises(each.error_type, match=each.error_regex):
                kind(params, **given.kwargs, **ours)
    combinations: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"foreach": True, "fused": True}, RuntimeError, "`fused` and `foreach` cannot be `True` together"),
        ({"differentiable": True}, NotImplementedError, "differentiable=True is not available.*torch.optim.AdamW"),
        ({"differentiable": True, "fused": True}, NotImplementedError, "differentiable=True is not available"),
    ]
    for kwargs, error_type, text in combinations:
        model = _model()
        with pytest.raises(error_type, match=text):
            zero_shard.AdamW(model.parameters(), **kwargs, module=model, config={"stage": stage})
        _run({}, stage)  # and the parameters are usable afterwards
    return len(_error_inputs())


@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_error_inputs_raise_the_same(world_size: int, stage: int) -> None:
    assert min(ranks.run(world_size, _every_error, stage)) >= 11
