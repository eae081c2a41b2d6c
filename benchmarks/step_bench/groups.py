"""Which kernels are timed together; the first of a group is the limit that memory sets."""

from __future__ import annotations

import torch

from step_bench import names, peers
from step_bench.bandwidth import bandwidth_loop, copy_bandwidth
from step_bench.contender import MAX_NORM, Entry
from step_bench.ours import BLOCK_NUMEL, our_optimizer, ours

BF16, FP16, INT8 = torch.bfloat16, torch.float16, torch.int8
SCALES_NBYTES = 2 * 2 * 4 / BLOCK_NUMEL  # of both moments, read and written

_WITH_REST = {"dtype": BF16, "has_master": True}
_LOOP, _COPY = Entry(names.LOOP, bandwidth_loop), Entry(names.COPY, copy_bandwidth)
_OURS, _OUR_ADAMW = ours("", 28), our_optimizer("", 28)
_FP32 = [
    ours("", 28, clip_nbytes=4),
    _OUR_ADAMW,
    our_optimizer("", 32, max_grad_norm=MAX_NORM),
    peers.peer(names.FUSED, peers.torch_adamw(fused=True), 28),
]
_FOREACH = peers.peer(names.FOREACH, peers.torch_adamw(foreach=True), None)
_OUR_BF16 = ours(" bf16", 26, 2, is_split=True, grad_dtype=BF16, **_WITH_REST)
_OUR_ADAMW_BF16 = our_optimizer(" bf16", 26, BF16)
_BF16_MOMENTS = ours(" fp32, bf16 moments", 20, moment_dtype=BF16)
_FP32_8_BIT = ours(f" fp32{names.EIGHT_BIT}", 16 + SCALES_NBYTES, moment_dtype=INT8)
_FP32_GRAD = ours(" bf16 + rest, fp32 gradient", 28, **_WITH_REST)
_16_BIT = [
    ours(" bf16 + rest, bf16 moments", 18, moment_dtype=BF16, grad_dtype=BF16, **_WITH_REST),
    ours(f" bf16 + rest{names.EIGHT_BIT}", 14 + SCALES_NBYTES, moment_dtype=INT8, grad_dtype=BF16, **_WITH_REST),
    ours(" bf16, stochastic", 22, dtype=BF16, grad_dtype=BF16, is_stochastic=True),
    ours(" fp16 + fp32 master", 30, dtype=FP16, grad_dtype=FP16, has_master=True),
]

CPU_GROUPS: dict[str, list[Entry]] = {
    "fp32": [_LOOP, *_FP32, peers.peer(names.DEEPSPEED, peers.deepspeed_adam, 28)],
    "fp32-unfused": [
        _LOOP,
        peers.peer(names.FOR_LOOP, peers.torch_adamw(foreach=False), None, is_foreach=False),
        _FOREACH,
    ],
    "bf16-master": [
        _LOOP,
        _OUR_BF16,
        _OUR_ADAMW_BF16,
        our_optimizer(" bf16", 28, BF16, max_grad_norm=MAX_NORM),
        peers.torch_with_master(is_flat=False),
        peers.torch_with_master(is_flat=True),
        Entry(names.DEEPSPEED_WITH_COPY, peers.deepspeed_with_copy),
    ],
    "8-bit": [
        _LOOP,
        ours(names.EIGHT_BIT, 16 + SCALES_NBYTES, 4, moment_dtype=INT8),
        _OURS,
        our_optimizer(names.EIGHT_BIT, 16 + SCALES_NBYTES, state_dtype="int8"),
        peers.peer(names.TORCHAO, peers.installed("torchao.optim", "AdamW8bit"), None),
        peers.peer(names.BITSANDBYTES, peers.installed("bitsandbytes.optim", "AdamW8bit"), None),
    ],
    "precisions": [_LOOP, _BF16_MOMENTS, _FP32_GRAD, *_16_BIT],
    "small": [
        _LOOP,
        ours(names.SMALL, 28, 4),
        our_optimizer(names.SMALL, 28),
        peers.peer(names.FUSED + names.SMALL, peers.torch_adamw(fused=True), 28),
    ],
    "small-others": [
        _LOOP,
        peers.peer(names.FOR_LOOP + names.SMALL, peers.torch_adamw(foreach=False), None, is_foreach=False),
        peers.peer(names.FOREACH + names.SMALL, peers.torch_adamw(foreach=True), None),
        peers.peer(names.DEEPSPEED + names.SMALL, peers.deepspeed_adam, 28),
    ],
}
# Beside the small ones, in the same rounds, those of the transformer.
ALSO_LARGE: dict[str, list[Entry]] = {"small": [_OURS, _OUR_ADAMW]}

GPU_GROUPS: dict[str, list[Entry]] = {
    "fp32": [
        _COPY,
        *_FP32,
        peers.peer(names.APEX, peers.installed("apex.optimizers", "FusedAdam", adam_w_mode=True), 28),
    ],
    "fp32-foreach": [_COPY, _FOREACH],
    "fp32-apex-kernels": [_COPY, our_optimizer(", apex kernels", 28, kernels="apex")],
    "bf16-master": [_COPY, _OUR_BF16, _OUR_ADAMW_BF16, peers.torch_with_master(is_flat=False)],
    "precisions": [_COPY, _BF16_MOMENTS, _FP32_8_BIT, _FP32_GRAD],
    "precisions-16-bit": [_COPY, *_16_BIT],
    # Last, because it leaves a process group behind.
    "fp32-apex-distributed": [_COPY, Entry(names.APEX_DISTRIBUTED, peers.distributed_fused_adam)],
}
