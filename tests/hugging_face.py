"""What the tests of transformers, accelerate and peft share: ranks as torchrun makes them, a model and its data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Snapshot, Tolerance, plain_snapshot, sharded_snapshot
from torch import Tensor, nn
from torch.utils.data import Dataset

import zero_shard

# 64-bit sums in another order, over a handful of steps.
CLOSE = Tolerance(1e-9, 1e-9)
# The first task imports transformers and its kin, which may take half a minute on busy cores.
LIMIT_S = 180.0
EXAMPLES = str(Path(__file__).parent.parent / "examples")


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Skip the tests of a file where a library is missing; nothing is imported, which would take seconds."""
    missing = [name for name in libraries if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install 'zero-shard[hf]'")


@contextmanager
def as_under_torchrun() -> Iterator[None]:
    """Let accelerate find the ranks of this task, run on their CPUs, and forget them afterwards."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}.items():
            patch.setenv(name, value)
        patch.setenv("LOCAL_WORLD_SIZE", world_size)
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("OMP_NUM_THREADS", "1")  # or accelerate sets the number of threads, and warns
        patch.setattr(Accelerator, "end_training", lambda self: None)  # would end the group of the task
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def run_example(name: str, *arguments: str) -> Any:
    """Run the main function of an example in this process and return what it returns.

    With few docstrings and one layer of the encoder: parsing and reading them all takes longer than the training.
    """
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    module, finetune = __import__(name), __import__("finetune")
    docstrings = finetune.docstrings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        patch.setattr(finetune, "docstrings", lambda: islice(docstrings(), 200))
        patch.setattr(module, "NUM_HELD_OUT", 32, raising=False)
        if hasattr(module, "joined"):
            here = module.Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
            patch.setattr(module, "joined", lambda **_: nullcontext(here))  # the task has a group
        if hasattr(module, "classifier"):
            patch.setattr(module, "classifier", partial(module.classifier, num_hidden_layers=1))
        return module.main()


class Rows(Dataset):  # type: ignore[type-arg]
    """Numbered rows of random tokens that a language model is to learn by heart."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def llama(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Return a tiny Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, use_cache=False, **sizes)).to(dtype)


def adamw(model: nn.Module, stage: int | None, **hyper: Any) -> torch.optim.AdamW:
    """Build the optimizer: the line that differs. ``stage`` None is torch's."""
    params = [param for param in model.parameters() if param.requires_grad]
    if stage is None:
        return torch.optim.AdamW(params, lr=0.01, **hyper)
    return zero_shard.AdamW(params, lr=0.01, module=model, config={"stage": stage}, **hyper)


def snapshot(model: nn.Module, optimizer: Any) -> Snapshot:
    """Return the snapshot of either kind of optimizer; full on rank 0. All ranks call."""
    inner = getattr(optimizer, "optimizer", optimizer)
    take: Callable[..., Snapshot] = sharded_snapshot if isinstance(inner, zero_shard.AdamW) else plain_snapshot
    return take(model, inner)
