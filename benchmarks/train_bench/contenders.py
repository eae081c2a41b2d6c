"""The implementations: how each shards a model, and what it takes to drive it. All have equal AdamW settings."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_shard
from train_bench.models import SHAPES, Batch, Shape, make_batch, make_model

HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
REFERENCE = "ddp"
DEEPSPEED_BUCKET_NUMEL = 8 * 2**20
"""Its default of 500 M elements would be the whole of most models here, and the memory that it reports."""


class Setup(NamedTuple):
    """What an implementation is built for.

    Attributes:
        device: Of the model.
        is_half: Compute and communicate in bfloat16 (masters and moments stay fp32).
        batch: Samples per rank; DeepSpeed wants to know.
    """

    device: torch.device
    is_half: bool
    batch: int


class Contender:
    """A model and what trains it, driven as its documentation says.

    Args:
        model: Its parameters' names are what weights are compared by.
        module: What is called instead of the model, if something wraps it.
        optimizer: Steps and zeroes; None: the subclass does.
        autocast: dtype of torch.autocast around the forward; None: the implementation casts by itself, or nothing is.
        input_dtype: dtype that images are cast to before the forward, where the implementation leaves it to the user.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        module: nn.Module | None = None,
        autocast: torch.dtype | None = None,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.module = model if module is None else module
        self._autocast, self._input_dtype = autocast, input_dtype

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss."""
        device = batch.inputs.device.type
        if self._input_dtype is not None and batch.inputs.is_floating_point():
            batch = batch._replace(inputs=batch.inputs.to(self._input_dtype))
        with torch.autocast(device, self._autocast) if self._autocast else contextlib.nullcontext():
            loss: Tensor = self.module(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def step(self) -> None:
        """Update the weights."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights, fp32 on the CPU of rank 0, {} elsewhere. All ranks call."""
        if dist.get_rank():
            return {}
        return {name: _on_host(param) for name, param in self.model.named_parameters()}

    def usage(self) -> zero_shard.Usage | None:
        """Return what the implementation itself counts."""
        return None

    def close(self) -> None:
        """Give up what deleting would leave behind."""


class ZeroShard(Contender):
    """zero_shard.AdamW at one stage."""

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights on rank 0."""
        full = zero_shard.full_state_dict(self.model)
        return {name: full[name].float() for name, _ in self.model.named_parameters() if name in full}

    def usage(self) -> zero_shard.Usage:
        """Return the optimizer's own count."""
        usage: zero_shard.Usage = self.optimizer.usage()
        return usage


class FSDP2(Contender):
    """fully_shard around each block and the rest."""

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights on rank 0, gathered one by one."""
        full = {}
        for name, param in self.model.named_parameters():
            weight = param.full_tensor()  # type: ignore[attr-defined]
            if dist.get_rank() == 0:
                full[name] = _on_host(weight)
        return full


class DeepSpeed(Contender):
    """DeepSpeed's engine, which is the module, the optimizer and ``zero_grad`` in one."""

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        self.module.backward(loss)

    def step(self) -> None:
        """Update the weights and drop the gradients."""
        self.module.step()

    def zero_grad(self) -> None:
        """Do nothing: ``step`` has done it."""

    def full_weights(self) -> dict[str, Tensor]:
        """Return all weights on rank 0."""
        deepspeed = importlib.import_module("deepspeed")
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return super().full_weights()

    def close(self) -> None:
        """Free what the engine has registered."""
        self.module.destroy()


def _on_host(weight: Tensor) -> Tensor:
    return weight.detach().float().cpu().clone()


Build = Callable[[nn.Module, Setup], Contender]


def _half_dtype(setup: Setup) -> torch.dtype | None:
    return torch.bfloat16 if setup.is_half else None


def _ddp(model: nn.Module, setup: Setup, is_sharded: bool) -> Contender:
    device_ids = None if setup.device.type == "cpu" else [setup.device]
    module = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    params = model.parameters()
    optimizer: torch.optim.Optimizer
    if is_sharded:
        # Here, because it loads TorchScript, which warns that it is deprecated.
        make = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        optimizer = make(params, optimizer_class=torch.optim.AdamW, fused=True, **HYPER)
    else:
        optimizer = torch.optim.AdamW(params, fused=True, **HYPER)
    return Contender(model, optimizer, module, _half_dtype(setup))


def _fsdp2(model: nn.Module, setup: Setup, is_resharding: bool) -> Contender:
    mesh = init_device_mesh(setup.device.type, (dist.get_world_size(),))
    half = torch.bfloat16
    policy = MixedPrecisionPolicy(half, half) if setup.is_half else MixedPrecisionPolicy()
    for part in [*model.blocks, model]:  # type: ignore[misc]
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=is_resharding)
    return FSDP2(model, torch.optim.AdamW(model.parameters(), fused=True, **HYPER))


def _zero_shard(model: nn.Module, setup: Setup, stage: int, **config: Any) -> Contender:
    config |= {"stage": stage, "param_dtype": _half_dtype(setup)}
    return ZeroShard(model, zero_shard.AdamW(model.parameters(), module=model, config=config, **HYPER))


def _deepspeed(model: nn.Module, setup: Setup, stage: int) -> Contender:
    os.environ.setdefault("DS_ACCELERATOR", setup.device.type)
    deepspeed, adam = importlib.import_module("deepspeed"), importlib.import_module("deepspeed.ops.adam")
    make = adam.DeepSpeedCPUAdam if setup.device.type == "cpu" else adam.FusedAdam
    bucket = DEEPSPEED_BUCKET_NUMEL
    sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "stage3_prefetch_bucket_size": bucket}
    config = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # its default clips
        "bf16": {"enabled": setup.is_half},
        "zero_optimization": {"stage": stage, **sizes},
    }
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist.get_backend())
    engine, *_ = deepspeed.initialize(model=model, optimizer=make(model.parameters(), **HYPER), config=config)
    return DeepSpeed(model, None, engine, input_dtype=_half_dtype(setup))


def _apex(model: nn.Module, setup: Setup) -> Contender:
    module = importlib.import_module("apex.contrib.optimizers.distributed_fused_adam")
    if setup.is_half:
        model = model.bfloat16()
    optimizer = module.DistributedFusedAdam(
        model.parameters(),
        adam_w_mode=True,
        overlap_grad_sync=True,
        store_params=False,
        store_param_remainders=setup.is_half,
        **HYPER,
    )
    return Contender(model, optimizer, input_dtype=_half_dtype(setup))


BUILDERS: dict[str, Build] = {
    REFERENCE: functools.partial(_ddp, is_sharded=False),
    "zero-redundancy": functools.partial(_ddp, is_sharded=True),
    "fsdp2": functools.partial(_fsdp2, is_resharding=True),
    "fsdp2-noreshard": functools.partial(_fsdp2, is_resharding=False),
    "zero_shard-0": functools.partial(_zero_shard, stage=0),
    "zero_shard-1": functools.partial(_zero_shard, stage=1),
    "zero_shard-2": functools.partial(_zero_shard, stage=2),
    "zero_shard-3": functools.partial(_zero_shard, stage=3),
    "zero_shard-3-noreshard": functools.partial(_zero_shard, stage=3, reshard_after_forward=False),
    "deepspeed-1": functools.partial(_deepspeed, stage=1),
    "deepspeed-2": functools.partial(_deepspeed, stage=2),
    "deepspeed-3": functools.partial(_deepspeed, stage=3),
    "apex-distributed": _apex,
}

DESCRIPTIONS = {
    REFERENCE: "DistributedDataParallel + torch.optim.AdamW(fused=True)",
    "zero-redundancy": "DistributedDataParallel + ZeroRedundancyOptimizer(AdamW, fused=True)",
    "fsdp2": "fully_shard per block, resharding after forward, + torch.optim.AdamW(fused=True)",
    "fsdp2-noreshard": "the same without resharding after forward",
    **{f"zero_shard-{stage}": f"zero_shard.AdamW, stage {stage}" for stage in range(4)},
    "zero_shard-3-noreshard": "zero_shard.AdamW, stage 3, reshard_after_forward = false",
    **{f"deepspeed-{stage}": f"DeepSpeed ZeRO {stage} with its own Adam" for stage in (1, 2, 3)},
    "apex-distributed": "apex DistributedFusedAdam",
}


def touch(shape: Shape, device: torch.device) -> None:
    """Train a tiny model of this kind, so that connections and lazily loaded code are in no memory that is measured."""
    tiny = SHAPES[f"{shape.kind}-tiny"]
    contender = BUILDERS[REFERENCE](make_model(tiny, device), Setup(device, False, tiny.batch))
    contender.backward(contender.forward(make_batch(tiny, tiny.batch, 0, 0, device)))
    contender.step()


def missing_reason(name: str, device: torch.device) -> str:
    """Return why an implementation can't run here, "" if it can. Local, and the same on equal machines."""
    package = {"deepspeed": "deepspeed", "apex": "apex"}.get(name.partition("-")[0])
    if package == "apex" and device.type != "cuda":
        return "apex runs on CUDA only"
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return ""


def checked_names(model: str, only: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """Return the implementations that are asked for; end with one line if there is no such model or implementation."""
    if model not in SHAPES:
        parser.error(f"--model must be one of {', '.join(SHAPES)}, got {model!r}")
    names = only.split(",") if only else list(BUILDERS)
    for name in names:
        if name not in BUILDERS:
            parser.error(f"--only knows {', '.join(BUILDERS)}, got {name!r}")
    return names
