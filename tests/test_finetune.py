"""The fine-tuning example: torch's AdamW in one process, and by one changed line ours on two ranks, give one result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import Tolerance, assert_snapshots_close, plain_snapshot, sharded_snapshot
from torch import Tensor, nn

import zero_shard

EXAMPLES = str(Path(__file__).parent.parent / "examples")
STAGES = (0, 1, 2, 3)
NUM_STEPS, NUM_ROWS, NUM_TOKENS, NUM_IDS = 3, 4, 16, 256


def _example() -> Any:
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    import finetune  # type: ignore[import-not-found]

    return finetune


def _minilm() -> nn.Module:
    """The first two layers of the real encoder, and the tokens of `_data`: half of it are the other 30,000 tokens."""
    torch.manual_seed(0)
    model: Any = _example().minilm(num_hidden_layers=2)
    model.encoder.resize_token_embeddings(NUM_IDS)
    return model.double()  # type: ignore[no-any-return]


def _llama() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = _example().ByteLlama(hidden_size=32, intermediate_size=48, num_hidden_layers=3)
    return model.double()


MODELS = {"minilm": _minilm, "llama": _llama}


def _data(name: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(NUM_IDS, (4 * NUM_ROWS, NUM_TOKENS), generator=generator)
    if name == "llama":
        return (ids,)
    lengths = torch.randint(3, NUM_TOKENS, (len(ids), 1), generator=generator)
    return ids, (torch.arange(NUM_TOKENS) < lengths).long(), ids[:, 0] % len(_example().PACKAGES)


def _train(name: str, number: int, num_ranks: int, build: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    """Run the example's loop as rank ``number``; ``build`` is the line that the user changes."""
    example, model, built = _example(), MODELS[name](), []

    def make_optimizer(model: nn.Module) -> Any:
        built.append(build(model))
        return built[0]

    peers = example.Ranks(number, num_ranks, torch.device("cpu"))
    example.train(model, make_optimizer, _data(name), NUM_STEPS, NUM_ROWS, peers)
    return model, built[0]


def _compare(name: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    plain = _train(name, 0, 1, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    want = plain_snapshot(*plain)
    for stage in STAGES:

        def build(model: nn.Module, stage: int = stage) -> Any:
            return zero_shard.AdamW(model.parameters(), lr=1e-3, module=model, config={"stage": stage})

        got = sharded_snapshot(*_train(name, rank, num_ranks, build))
        if rank == 0:
            assert_snapshots_close(got, want, Tolerance(1e-9, 1e-9), f"stage {stage}")


@pytest.mark.parametrize("name", MODELS)
def test_one_changed_line_gives_the_same_model(name: str) -> None:
    ranks.run(2, _compare, name, limit_s=180)
