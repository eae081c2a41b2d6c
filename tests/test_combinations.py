"""Features that meet: each of these gave wrong numbers at some stage."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import ranks
import torch
from oracle import assert_snapshots_close, plain_snapshot, sharded_snapshot
from scripts import Job, loss_of, net
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero_shard

DECAY = 0.5


def _compare(script: Any, stage: int, where: str = "") -> None:
    """Run a script (job -> model, optimizer) on this rank and with plain AdamW, and compare weights and moments."""
    got = sharded_snapshot(*script(Job(stage)))
    if got:
        want = plain_snapshot(*script(Job(None)))
        assert_snapshots_close(got, want, where=f"stage {stage} {where}", num_steps=100)


def _scaled_and_clipped(stage: int, config: dict[str, Any]) -> None:
    model = net().float()
    optimizer = zero_shard.AdamW(
        model.parameters(), module=model, config={"stage": stage, "param_dtype": "float16", **config}
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        x, y = Job(stage).batch(step)
        scaler.scale(nn.functional.mse_loss(model(x.float()).float(), y.float())).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), norm, rtol=1e-5, atol=0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(("stage", "config"), [(0, {}), (2, {}), (2, {"shard_size": 1})])
def test_the_norm_of_unscaled_float16_gradients(stage: int, config: dict[str, Any]) -> None:
    ranks.run(2, _scaled_and_clipped, stage, config)


def _unfrozen(job: Job) -> Any:
    model = net()
    model[0].requires_grad_(False)
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    for step in range(5):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        loss_of(model, job.batch(step)).backward()
        loss_of(model, job.batch(step + 50)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stage", range(4))
def test_unfrozen_gradients_are_averaged_from_the_first_one_on(stage: int) -> None:
    ranks.run(2, _compare, _unfrozen, stage)


def _averages(stage: int, way: str) -> None:
    """As AveragedModel, whatever becomes trainable later."""
    found = []
    for job in (Job(stage), Job(None)):
        model = net()
        model[0].requires_grad_(way == "add")
        optimizer = job.adamw(model[2:].parameters() if way == "add" else model.parameters(), model, lr=0.05)
        sharded = isinstance(optimizer, zero_shard.AdamW)
        average: Any = (
            zero_shard.ExponentialMovingAverage(optimizer, DECAY)
            if sharded
            else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        )
        for step in range(5):
            if step == 2 and way == "add":
                optimizer.add_param_group({"params": model[0].parameters()})
            elif step == 2:
                model[0].requires_grad_(True)
            model.zero_grad()
            loss_of(model, job.batch(step)).backward()
            optimizer.step()
            average.update() if sharded else average.update_parameters(model)
        found.append(average.full_state_dict().get("averages") if sharded else dict(average.module.named_parameters()))
    got, want = found
    for name, value in (got or {}).items():
        torch.testing.assert_close(value, want[name].detach(), rtol=1e-9, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("way", ["add", "unfreeze"])
@pytest.mark.parametrize("stage", range(4))
def test_averages_of_what_trains_later_begin_at_the_weights_before(stage: int, way: str) -> None:
    ranks.run(2, _averages, stage, way)


def _copied_averages(stage: int) -> None:
    job, model = Job(stage), net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    average = zero_shard.ExponentialMovingAverage(optimizer, DECAY)

    def go(model: Any, optimizer: Any, average: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, job.batch(step)).backward()
            optimizer.step()
            average.update()

    go(model, optimizer, average, range(2))
    twins = copy.deepcopy((model, optimizer, average))
    go(*twins, range(2, 4))
    go(model, optimizer, average, range(2, 4))
    one, other = average.full_state_dict(), twins[2].full_state_dict()
    for name, value in one.get("averages", {}).items():
        assert torch.equal(value, other["averages"][name]), name


@pytest.mark.parametrize("stage", range(3))
def test_a_copy_of_averages_goes_on_from_them(stage: int) -> None:
    ranks.run(2, _copied_averages, stage)


def _copied_precision(stage: int) -> None:
    model = net().float()
    optimizer = zero_shard.AdamW(
        model[:3].parameters(), module=model, config={"stage": stage, "param_dtype": "bfloat16"}
    )
    alive = weakref.ref(model)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    del model, optimizer
    gc.collect()
    assert alive() is None
    twin_optimizer.add_param_group({"params": twin[3:].parameters()})
    assert twin[5].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("stage", range(3))
def test_the_copy_of_a_cast_model_casts_what_comes_later(stage: int) -> None:
    ranks.run(2, _copied_precision, stage)


def _clipped_then_replaced(job: Job) -> Any:
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    clip = getattr(optimizer, "clip_grad_norm_", lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, job.batch(step)).backward()
        clip(0.1)
        for param in model.parameters():
            assert param.grad is not None
            param.grad = param.grad * 0.5
        loss_of(model, job.batch(step + 9)).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stage", range(4))
def test_a_clip_holds_for_gradients_that_were_replaced_after_it(stage: int) -> None:
    ranks.run(2, _compare, _clipped_then_replaced, stage)


def _data_set(job: Job) -> Any:
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, job.batch(step)).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.data = param.grad.data * 2
        if step == 1:
            loss_of(model, job.batch(step + 9)).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stage", range(4))
def test_gradients_set_by_data_count(stage: int) -> None:
    ranks.run(2, _compare, _data_set, stage)


def _zeros_first(job: Job) -> Any:
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        if step % 2:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
                assert not param.grad.requires_grad and param.grad.stride() == param.stride()
                assert torch.full_like(param, 2.0, dtype=torch.float32).eq(2).all()
                assert torch.empty_like(param, requires_grad=True).requires_grad
        loss_of(model, job.batch(step)).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_may_begin_as_zeros_like_the_parameters(stage: int) -> None:
    ranks.run(2, _compare, _zeros_first, stage)


def _clipped_with_one_set_by_hand(stages: list[int], foreach: bool) -> None:
    for stage in stages:
        job, model = Job(stage), net()
        optimizer = job.adamw(model.parameters(), model, lr=0.05)
        for _ in range(2):
            loss_of(model, job.batch(0)).backward()
            model[0].bias.grad = torch.full_like(model[0].bias, float(job.rank))
            with pytest.raises(NotImplementedError, match=r"plain tensor.*optimizer\.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
            optimizer.clip_grad_norm_(0.01)
            optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
def test_the_norm_with_a_gradient_set_by_hand_is_refused(foreach: bool) -> None:
    ranks.run(2, _clipped_with_one_set_by_hand, [1, 2, 3], foreach)


def _loaded_and_edited(stages: list[int]) -> None:
    found: list[Any] = []
    for stage in stages:
        model = net().float()
        optimizer = zero_shard.AdamW(
            model.parameters(), module=model, config={"stage": stage, "param_dtype": "bfloat16"}
        )
        with zero_shard.gathered(model, modify=True):
            model.load_state_dict({name: torch.full(p.shape, 0.1234567) for name, p in model.state_dict().items()})
            with torch.no_grad():
                model[2].weight[0].mul_(2)
        found.append(zero_shard.full_state_dict(model))
        del optimizer
    for stage, weights in zip(stages, found, strict=True):
        for name, value in weights.items():
            if name == "2.weight":
                assert torch.equal(value, value.bfloat16().float()), (stage, value)
            else:
                assert value.unique().tolist() == pytest.approx([0.1234567], rel=1e-5), (stage, name)


def test_a_weight_that_is_edited_after_loading_has_no_loaded_digits() -> None:
    ranks.run(2, _loaded_and_edited, list(range(4)))


def _wrapped_before_the_cast(stages: list[int]) -> None:
    for stage in stages:
        model = net().float()
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match=r"0\.weight is torch\.float32 and would be cast.*optimizer first"):
            zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage, "param_dtype": "bfloat16"})
        del wrapped
        gc.collect()
        optimizer = zero_shard.AdamW(
            model.parameters(), module=model, config={"stage": stage, "param_dtype": "bfloat16"}
        )
        wrapped = nn.parallel.DistributedDataParallel(model)
        x, y = Job(stage).batch(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            nn.functional.mse_loss(wrapped(x.float()).float(), y.float()).backward()
        optimizer.step()
        del wrapped
        gc.collect()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_cast_of_wrapped_parameters_is_refused(num_ranks: int) -> None:
    ranks.run(num_ranks, _wrapped_before_the_cast, [0, 2] if num_ranks == 2 else [0])


def _taken_over(stages: list[int], param_dtype: str) -> None:
    for stage in stages:
        config = {"stage": stage, "param_dtype": param_dtype, "bucket_mib": 1e-4}

        def train(model: Any, optimizer: Any, steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                x, y = Job(0).batch(step)
                nn.functional.mse_loss(model(x.float()).float(), y.float()).backward()
                optimizer.step()

        found = []
        for is_replaced in (False, True):
            model = net().float()
            optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config=config)
            train(model, optimizer, range(2))
            if is_replaced:
                before = zero_shard.full_state_dict(model)
                with pytest.raises(ValueError, match=r"is what another.*pass param_dtype"):
                    zero_shard.AdamW(model.parameters(), config={"stage": stage})
                loss = model(Job(0).batch(7)[0].float()).float().sum()
                loss.backward()  # these gradients are dropped
                later = zero_shard.AdamW(
                    reversed(list(model.parameters())), lr=0.01, module=model, config={**config, "bucket_mib": 25}
                )
                assert model[0].weight.grad is None
                for name, value in zero_shard.full_state_dict(model).items():
                    assert value.dtype == torch.float32 and torch.equal(value, before[name]), (stage, name)
                saved = optimizer.full_state_dict()
                if saved:
                    numbers = list(reversed(range(len(saved["state"]))))
                    saved["state"] = {numbers[number]: entry for number, entry in saved["state"].items()}
                box = [saved]
                torch.distributed.broadcast_object_list(box)
                later.load_state_dict(box[0])
                optimizer = later
            train(model, optimizer, range(2, 4))
            found.append(zero_shard.full_state_dict(model))
        for name, value in found[0].items():
            assert torch.equal(value, found[1][name]), (stage, name)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float16"])
def test_a_later_optimizer_takes_masters_over(param_dtype: str) -> None:
    ranks.run(2, _taken_over, [0, 1, 2], param_dtype)
