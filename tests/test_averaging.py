"""Averages of the weights: torch's AveragedModel where the model can be copied, and ours at every stage."""

from __future__ import annotations

import io
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import EXACT, assert_snapshots_close, mean_over_ranks, sharded_snapshot
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero_shard
from zero_shard import ExponentialMovingAverage, averaging, collectives

LIMIT_S = 150.0  # many cases in one launch

D = torch.float64
DECAY = 0.75
STEPS = 5
Weights = dict[str, Tensor]


def _net(dtype: torch.dtype = D) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    model[2].weight = nn.Parameter(torch.randn(7, 3).t())  # not row-major
    model[4].bias.requires_grad_(False)
    return model.to(dtype)


def _build(model: nn.Module, stage: int, **config: Any) -> zero_shard.AdamW:
    config = {"stage": stage, "bucket_mib": 1e-4, **config}
    return zero_shard.AdamW(model.parameters(), lr=0.05, module=model, config=config)


def _rows(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, dtype=D, generator=torch.Generator().manual_seed(31 * rank + step))


def _step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(_rows(dist.get_rank(), step).to(model[0].weight.dtype)).square().mean().backward()
    optimizer.step()


def _silently(call: Any) -> Any:
    def refuse(label: str) -> None:
        raise AssertionError(f"communicates: {label}")

    collectives.pending.before_collective = refuse
    try:
        return call()
    finally:
        collectives.pending.before_collective = None


def _full(model: nn.Module) -> Weights:
    with zero_shard.gathered(model):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _torch_average(world_size: int, decay: Any) -> tuple[Weights, Tensor]:
    """Return what AveragedModel holds after training with plain AdamW, and what it computes."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    average = None
    for step in range(STEPS):
        losses = [[lambda r=r, s=step: model(_rows(r, s)).square().mean()] for r in range(world_size)]
        mean_over_ranks(model.parameters(), losses)
        optimizer.step()
        if average is None:
            average = AveragedModel(model)
        average.multi_avg_fn = get_ema_multi_avg_fn(decay(step) if callable(decay) else decay)
        average.update_parameters(model)
    assert average is not None
    return dict(average.module.named_parameters()), average(_rows(9, 9)).detach()


def _warm_up(num_updates: int) -> float:
    return min(DECAY, (1 + num_updates) / (4 + num_updates))


RUNS: list[tuple[Any, list[int]]] = [(DECAY, [0, 1, 2, 3]), (_warm_up, [1, 3])]


def _train_and_average(stage: int, decay: Any) -> tuple[Weights, Weights, Tensor]:
    """Train, average, use the averages, and go on as if nothing had happened; return the full averages."""
    model = _net()
    optimizer = _build(model, stage)
    average = ExponentialMovingAverage(optimizer, decay)
    for step in range(STEPS):
        _step(model, optimizer, step)
        _silently(average.update)
    full = average.full_state_dict()
    before = sharded_snapshot(model, optimizer)
    with average.applied():
        applied = _full(model)
        with torch.no_grad():
            output = model(_rows(9, 9))
    after = sharded_snapshot(model, optimizer)
    if dist.get_rank() == 0:
        assert_snapshots_close(after, before, EXACT, "after the context")
        assert full["num_updates"] == STEPS
        assert sorted(full["averages"]) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    else:
        assert full == {}
    return full.get("averages", {}), applied, output


def _average_everywhere() -> list[Any]:
    return [_train_and_average(stage, decay) for decay, stages in RUNS for stage in stages]


@pytest.mark.parametrize("world_size", [1, 3])
def test_average_is_that_of_averaged_model_and_the_same_at_every_stage(world_size: int) -> None:
    results = ranks.run(world_size, _average_everywhere, limit_s=LIMIT_S)
    for start, (decay, stages) in zip((0, 4), RUNS, strict=True):
        want, output = _torch_average(world_size, decay)
        full, applied, _ = results[0][start]
        for name, tensor in full.items():
            torch.testing.assert_close(tensor, want[name].detach(), rtol=1e-12, atol=1e-12)
            assert tensor.stride() == want[name].stride()
        for of_rank in results:
            for number in range(start, start + len(stages)):
                torch.testing.assert_close(of_rank[number][2], output, rtol=1e-12, atol=1e-12)
                for name, tensor in of_rank[number][1].items():
                    assert torch.equal(tensor, applied[name]), f"stage {stages[number - start]}, {name}"
        for number in range(start, start + len(stages)):
            for name, tensor in results[0][number][0].items():
                assert torch.equal(tensor, full[name]) and torch.equal(tensor, applied[name]), name


# --- the object ---


def _roundtrips(stage: int) -> None:
    model = _net()
    optimizer = _build(model, stage)
    average = ExponentialMovingAverage(optimizer, DECAY)
    for step in range(2):
        _step(model, optimizer, step)
        average.update()
    file = io.BytesIO()
    torch.save(_silently(average.state_dict), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    full = [average.full_state_dict()]
    dist.broadcast_object_list(full)
    _step(model, optimizer, 2)
    average.update()
    want = average.full_state_dict()
    for source in (state, full[0]):
        again = ExponentialMovingAverage(optimizer, DECAY)
        _silently(lambda again=again, source=source: again.load_state_dict(source))
        again.update()
        got = again.full_state_dict()
        assert got.get("num_updates") == want.get("num_updates")
        for name, tensor in want.get("averages", {}).items():
            assert torch.equal(got["averages"][name], tensor)
    held = sum(part.numel() for part in state["averages"].values())
    total = torch.tensor(held)
    dist.all_reduce(total)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert total.item() == trained * (dist.get_world_size() if stage == 0 else 1)

    missing = {**full[0], "averages": {k: v for k, v in full[0]["averages"].items() if k != "0.bias"}}
    unknown = {**full[0], "averages": {**full[0]["averages"], "9.bias": torch.zeros(1)}}
    misshapen = {**full[0], "averages": {**full[0]["averages"], "0.bias": torch.zeros(1)}}
    elsewhere = {**state, "zero_shard": dict.fromkeys(state["zero_shard"], (1, 1, 3))}
    words = ["have no 0.bias", "have 9.bias", r"0.bias has shape \(1,\), expected \(7,\)", "another stage, world size"]
    before = {name: part.clone() for name, part in average.state_dict()["averages"].items()}
    for bad, text in zip((missing, unknown, misshapen, elsewhere), words, strict=True):
        with pytest.raises(ValueError, match=text):
            average.load_state_dict(bad)
    for name, part in average.state_dict()["averages"].items():
        assert torch.equal(part, before[name])


def _order_of_calls(stage: int) -> None:
    model = _net()
    optimizer = _build(model, stage)
    average = ExponentialMovingAverage(optimizer, DECAY)
    with pytest.raises(RuntimeError, match="no average of the weights yet"), average.applied():
        pass
    for bad in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"decay must be in \[0, 1\]"):
            ExponentialMovingAverage(optimizer, bad)
    for step in range(2):
        _step(model, optimizer, step)
        average.update()
    before = sharded_snapshot(model, optimizer)
    with pytest.raises(ArithmeticError), average.applied():
        with pytest.raises(RuntimeError, match="which a step would train"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="average the averages"):
            average.update()
        with pytest.raises(RuntimeError, match="active already"), average.applied():
            pass
        with pytest.raises(RuntimeError, match="would be undone"):
            average.load_state_dict(average.state_dict())
        raise ArithmeticError
    after = sharded_snapshot(model, optimizer)
    if dist.get_rank() == 0:
        assert_snapshots_close(after, before, EXACT, "after an exception")
    loss = model(_rows(0, 0)).sum()
    with average.applied():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    with torch.inference_mode(), average.applied():
        model(_rows(0, 0))
    _step(model, optimizer, 5)


def _later_parameters(stage: int) -> None:
    """What is unfrozen or added later starts at its weights before the first step."""
    model = _net()
    optimizer = _build(model, stage)
    average = ExponentialMovingAverage(optimizer, DECAY)
    _step(model, optimizer, 0)
    average.update()
    model[4].bias.requires_grad_(True)
    extra = nn.Parameter(torch.ones(3, dtype=D))
    optimizer.add_param_group({"params": [extra]})
    for step in (1, 2):
        optimizer.zero_grad()
        (model(_rows(dist.get_rank(), step)).square().mean() + extra.sum()).backward()
        if step == 1:
            with zero_shard.gathered(model):
                first = model[4].bias.detach().clone(), extra.detach().clone()
        optimizer.step()
        if step == 1:
            with zero_shard.gathered(model):
                second = model[4].bias.detach().clone(), extra.detach().clone()
        average.update()
    full = average.full_state_dict()
    with zero_shard.gathered(model):
        last = model[4].bias.detach().clone(), extra.detach().clone()
    if dist.get_rank() == 0:
        got = full["averages"]["4.bias"], full["averages"]["param_groups[1]['params'][0]"]
        for value, begin, then, end in zip(got, first, second, last, strict=True):
            want = torch.lerp(torch.lerp(begin, then, 1 - DECAY), end, 1 - DECAY)
            torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)


def _sixteen_bits(stage: int, dtype: torch.dtype) -> None:
    """16-bit weights are averaged by their float32 masters, and masters come back to the bit."""
    alone = _net(dtype)
    alone_optimizer = _build(alone, stage)
    for step in range(4):
        _step(alone, alone_optimizer, step)
    without = sharded_snapshot(alone, alone_optimizer)
    model = _net(dtype)
    optimizer = _build(model, stage)
    average = ExponentialMovingAverage(optimizer, 0.9)
    for step in range(3):
        _step(model, optimizer, step)
        average.update()
    lows = [bucket.low.clone() for bucket in optimizer._reducer.buckets if bucket.low is not None]
    before, full = sharded_snapshot(model, optimizer), average.full_state_dict()
    with average.applied():
        applied = _full(model)
        for bucket, held in average._averages.items():  # masters too, as a save inside would write them
            assert all(torch.equal(part, weights) for part, weights in averaging._chunks(bucket, held))
    after = sharded_snapshot(model, optimizer)
    now = [bucket.low for bucket in optimizer._reducer.buckets if bucket.low is not None]
    assert lows and all(torch.equal(left, right) for left, right in zip(now, lows, strict=True))
    if dist.get_rank() == 0:
        assert_snapshots_close(after, before, EXACT, "after the context")
        assert any(
            not torch.equal(full["averages"][name].to(dtype).float(), full["averages"][name])
            for name in full["averages"]
        )
        for name, tensor in full["averages"].items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor.to(dtype), applied[name])
    _step(model, optimizer, 3)
    after = sharded_snapshot(model, optimizer)
    if dist.get_rank() == 0:
        assert_snapshots_close(after, without, EXACT, "trained on")
    for mine, theirs in zip(optimizer._reducer.buckets, alone_optimizer._reducer.buckets, strict=True):
        assert mine.low is None or torch.equal(mine.low, theirs.low), "the masters were rounded"


def _through_a_checkpoint(stage: int, path: str) -> None:
    """``zero_shard.save`` takes the full averages as an extra, and the averages themselves as weights."""
    model = _net()
    optimizer = _build(model, stage)
    average = ExponentialMovingAverage(optimizer, DECAY)
    for step in range(2):
        _step(model, optimizer, step)
        average.update()
    zero_shard.save(path, model, optimizer, average=average.full_state_dict())
    with average.applied():
        averages = _full(model)
        zero_shard.save(f"{path}-averaged", model, optimizer)
    other = _net()
    other_optimizer = _build(other, 2)
    other_average = ExponentialMovingAverage(other_optimizer, DECAY)
    other_average.load_state_dict(zero_shard.load(path, other, other_optimizer)["average"])
    with other_average.applied():
        got = _full(other)
    zero_shard.load(f"{path}-averaged", other, other_optimizer)
    for weights in (got, _full(other)):
        for name, param in other.named_parameters():
            assert torch.equal(weights[name], averages[name]), (name, param.shape)


def _every_stage(*tests: Any) -> None:
    for test in tests:
        for stage in range(4):
            test(stage)


def _all_objects(path: str) -> None:
    _every_stage(_roundtrips, _order_of_calls, _later_parameters)
    for stage in range(4):
        _sixteen_bits(stage, torch.bfloat16)
    _sixteen_bits(2, torch.float16)
    _through_a_checkpoint(3, path)


def test_average_as_an_object(tmp_path: Any) -> None:
    ranks.run(2, _all_objects, str(tmp_path / "checkpoint"), limit_s=LIMIT_S)


# --- torch's own ---


def _torch_averaged_model(stage: int) -> Weights:
    model = _net()
    optimizer = _build(model, stage)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        _step(model, optimizer, step)
        average.update_parameters(model)
    return dict(average.module.named_parameters())


def _torch_average_at_stage_3() -> None:
    model = _net()
    optimizer = _build(model, 3)
    for copied in (model, model[0]):
        with pytest.raises(RuntimeError, match=r"stage 3.*zero_shard\.ExponentialMovingAverage\(optimizer\)"):
            AveragedModel(copied)
    del optimizer


def _torch_averages() -> list[Weights]:
    _torch_average_at_stage_3()
    return [_torch_averaged_model(stage) for stage in range(3)]


def test_averaged_model_works_where_the_model_is_whole() -> None:
    want, _ = _torch_average(2, DECAY)
    for of_rank in ranks.run(2, _torch_averages, limit_s=LIMIT_S):
        for weights in of_rank:
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, want[name], rtol=1e-12, atol=1e-12)
