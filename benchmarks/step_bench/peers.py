"""Other optimizers: torch's, DeepSpeed's, torchao's, bitsandbytes' and apex's."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from step_bench import names
from step_bench.contender import HYPER, MAX_NORM, Contender, Entry, Variant
from step_bench.workload import Workload

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def peer(name: str, factory: Factory, nbytes: float | None, is_foreach: bool = True) -> Entry:
    """Return an optimizer on fp32 parameters, alone and after ``clip_grad_norm_``."""

    def build(work: Workload) -> Contender:
        params = work.params()
        optimizer = factory(params)

        def clipped_step() -> None:
            nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=is_foreach)
            optimizer.step()

        # The norm reads the gradient, the scaling reads and writes it.
        clipped_nbytes = None if nbytes is None else nbytes + 12
        variants = [Variant(optimizer.step, nbytes), Variant(clipped_step, clipped_nbytes, names.BY_TORCH)]
        return Contender.of_optimizer(optimizer, params, variants)

    return Entry(name, build)


def installed(module: str, name: str, **options: Any) -> Factory:
    """Return a factory of an optimizer that may not be installed."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(params, **HYPER, **options)
        return optimizer

    return make


def torch_adamw(**options: Any) -> Factory:
    """Return a factory of ``torch.optim.AdamW``."""
    return installed("torch.optim", "AdamW", **options)


deepspeed_adam = installed("deepspeed.ops.adam", "DeepSpeedCPUAdam")


def torch_with_master(is_flat: bool) -> Entry:
    """Return what torch has for bf16 weights with an fp32 master: cast the gradient, fused step, copy back."""

    def build(work: Workload) -> Contender:
        params = work.params(torch.bfloat16, is_flat)
        masters = [nn.Parameter(param.detach().float()) for param in params]
        wide = [torch.zeros_like(master) for master in masters]
        for master, grad in zip(masters, wide, strict=True):
            master.grad = grad
        grads = [param.grad for param in params if param.grad is not None]
        stored, full = [param.detach() for param in params], [master.detach() for master in masters]
        optimizer = torch_adamw(fused=True)(masters)

        @torch.no_grad()
        def step(is_clipped: bool = False) -> None:
            torch._foreach_copy_(wide, grads)
            if is_clipped:
                nn.utils.clip_grad_norm_(masters, MAX_NORM, foreach=True)
            optimizer.step()
            torch._foreach_copy_(stored, full)

        variants = [Variant(step, 40), Variant(lambda: step(True), 52, names.BY_TORCH)]
        return Contender.of_optimizer(optimizer, params, variants)

    return Entry(names.WITH_MASTER_FLAT if is_flat else names.WITH_MASTER, build)


def deepspeed_with_copy(work: Workload) -> Contender:
    """DeepSpeed's step on bf16 weights with fp32 moments and no master, and the copy to where they are sent from."""
    params = work.params(torch.bfloat16)
    optimizer = deepspeed_adam(params)
    stored = [param.detach() for param in params]
    copies = [torch.empty_like(param) for param in stored]

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        torch._foreach_copy_(copies, stored)

    return Contender.of_optimizer(optimizer, params, [Variant(step, 26)])


def distributed_fused_adam(work: Workload) -> Contender:
    """DistributedFusedAdam in a world of one; backward, which fills its buffers, is not timed."""
    factory = installed("apex.contrib.optimizers.distributed_fused_adam", "DistributedFusedAdam", adam_w_mode=True)
    if not torch.distributed.is_initialized():
        store = tempfile.mkdtemp()
        torch.distributed.init_process_group("nccl", f"file://{store}/store", rank=0, world_size=1)
    params = work.params()
    grads = [param.grad for param in params]
    optimizer: Any = factory(params)

    def prepare() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(params, grads)

    def clipped_step() -> None:
        optimizer.clip_grad_norm(MAX_NORM)
        optimizer.step()

    return Contender([Variant(optimizer.step, None, "", prepare), Variant(clipped_step, None, "its own", prepare)])
