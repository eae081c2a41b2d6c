"""torch.compile of blocks and whole models at every stage: graphs, recompilations, names, plain AdamW's numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import torch
import torch._dynamo
import torch.distributed as dist
from oracle import Tolerance, assert_snapshots_close, mean_over_ranks, plain_snapshot, sharded_snapshot
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zero_shard

_F64 = torch.float64
_CLOSE = Tolerance(1e-9, 1e-11)
_NUM_STEPS = 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9, dtype=_F64), nn.Linear(9, 6, dtype=_F64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Net(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.blocks = nn.Linear(6, 6, dtype=_F64), nn.ModuleList(_Block() for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def _blocks_in_place(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(**options)
    return model


def _blocks_replaced(model: nn.Module, **options: Any) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, **options)
    return model


def _forwards(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **options)
    return model


def _whole(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, **options)


Compile = Callable[..., nn.Module]


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, dtype=_F64, generator=torch.Generator().manual_seed(50 * rank + step))
    return model(x).square().sum()


def _train(stage: int, compile_: Compile, is_before: bool, options: dict[str, Any], is_checkpointed: bool) -> None:
    """Train a compiled model; check its numbers, and that nothing is compiled after the second step."""
    torch._dynamo.reset()
    counters.clear()
    where = f"stage {stage}, {compile_}, before={is_before}, {options}"
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = _Net(is_checkpointed), _Net()
    compiled = compile_(model, **options) if is_before else model
    optimizer = zero_shard.AdamW(compiled.parameters(), lr=0.05, module=compiled, config={"stage": stage})
    compiled = compiled if is_before else compile_(model, **options)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.05)
    graphs = []
    for step in range(_NUM_STEPS):
        optimizer.zero_grad()
        _loss(compiled, rank, step).backward()
        optimizer.step()
        graphs.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
        losses = [[lambda r=r, step=step: _loss(plain_model, r, step)] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)
        plain.step()
    assert graphs[0][0] > 0, f"{where}: nothing was compiled"
    assert len(set(graphs[1:])) == 1, f"{where}: compiled again and again, {graphs}"
    if stage < 3 and not is_checkpointed:
        assert not counters["graph_break"], f"{where}: {dict(counters['graph_break'])}"
    assert all("zero_shard" in reason for reason in counters["graph_break"]) or is_checkpointed, counters["graph_break"]
    assert [slot.name for slot in optimizer._reducer.slots if "_orig_mod" in slot.name] == []
    model.blocks = nn.ModuleList(getattr(block, "_orig_mod", block) for block in model.blocks)  # as in the plain model
    snapshot = sharded_snapshot(model, optimizer)
    if rank == 0:
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), _CLOSE, where)


def _train_all(cases: list[tuple[int, Compile, bool, dict[str, Any], bool]]) -> None:
    warnings.filterwarnings("ignore", "The .grad attribute")  # torch's own, from looking at inputs of a block
    for case in cases:
        _train(*case)


_EAGER = {"backend": "aot_eager"}
_FULL = {"backend": "aot_eager", "fullgraph": True}


def test_compiled_models_have_whole_graphs_where_parameters_are_whole() -> None:
    cases = [
        (2, _blocks_in_place, True, _FULL, False),
        (2, _blocks_in_place, False, _FULL, False),
        (2, _blocks_replaced, True, _FULL, False),
        (2, _whole, False, _FULL, False),
        (1, _whole, True, _FULL, False),
    ]
    ranks.run(2, _train_all, cases)


def test_compiled_models_have_whole_graphs_in_each_unit_at_stage_3() -> None:
    cases = [
        *((3, compile_, True, _FULL, False) for compile_ in (_blocks_replaced, _forwards)),
        (3, _forwards, False, _FULL, False),
        *(
            (3, compile_, is_before, _EAGER, False)
            for compile_ in (_blocks_in_place, _whole)
            for is_before in (True, False)
        ),
        (3, _blocks_replaced, False, _EAGER, False),
        (3, _blocks_replaced, True, _EAGER, True),
    ]
    ranks.run(2, _train_all, cases)


def _interchange(path: str) -> None:
    """Save a model in wrappers of all kinds and load it without them, and the other way round."""
    models: list[nn.Module] = []
    for is_wrapped in (True, False):
        for is_loading in (False, True):
            model: nn.Module = nn.Sequential(_Net(), nn.BatchNorm1d(6, dtype=_F64))
            whole = model
            if is_wrapped != is_loading:
                _blocks_replaced(model[0], **_EAGER)
                model = torch.compile(DistributedDataParallel(model), **_EAGER)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* DistributedDataParallel", UserWarning)
                optimizer = zero_shard.AdamW(model.parameters(), lr=0.05, module=model, config={"stage": 1})
            if is_loading:
                zero_shard.load(f"{path}/{is_wrapped}", model, optimizer)
            else:
                _loss(model, dist.get_rank(), 0).backward()
                optimizer.step()
                zero_shard.save(f"{path}/{is_wrapped}", model, optimizer)
            models.append(whole)
            if is_loading:
                tensors = [list(each.state_dict().values()) for each in models[-2:]]
                for saved, loaded in zip(*tensors, strict=True):
                    assert torch.equal(saved, loaded) or dist.get_rank() > 0  # buffers are rank 0's


def test_checkpoints_of_wrapped_and_plain_models_interchange(tmp_path: Path) -> None:
    ranks.run(2, _interchange, str(tmp_path))
