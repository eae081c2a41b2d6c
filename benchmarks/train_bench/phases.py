"""What a rank holds after each phase of a step, beside what the optimizer promises."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import zero_shard
from train_bench import memory
from train_bench.contenders import BUILDERS, Contender, Setup, touch
from train_bench.models import Shape, make_batch, make_model

NUM_WARM_UPS = 2
POINTS = ("build", "forward", "backward", "step", "zero_grad")


def measure_phases(name: str, shape: Shape, batch: int, device: torch.device) -> dict[str, Any]:
    """Return this rank's bytes after each phase of a step that is not the first. All ranks call.

    ``resident`` is what the process, or the GPU's allocator, holds above what it did before the model was built;
    ``held`` is the optimizer's own count of model state, so that the difference is activations and what nobody planned.
    """
    touch(shape, device)
    memory.settle(device)
    before_nbytes = memory.present_nbytes(device)
    contender = BUILDERS[name](make_model(shape, device), Setup(device, False, batch))
    resident, held = {}, {}

    def note(point: str) -> None:
        memory.settle(device)
        resident[point] = memory.present_nbytes(device) - before_nbytes
        held[point] = _usage(contender).held_nbytes

    note("build")
    for step in range(NUM_WARM_UPS + 1):
        is_last = step == NUM_WARM_UPS
        if is_last:
            memory.reset_peak(device)
        data = make_batch(shape, batch, step, dist.get_rank(), device)
        loss = contender.forward(data)
        if is_last:
            note("forward")
        contender.backward(loss)
        del loss
        if is_last:
            note("backward")
        contender.step()
        if is_last:
            note("step")
        contender.zero_grad()
        if is_last:
            note("zero_grad")
    return {
        "promised_nbytes": _usage(contender).promised_nbytes,
        "resident_nbytes": resident,
        "held_nbytes": held,
        "peak_nbytes": memory.peak_nbytes(device) - before_nbytes,
    }


def _usage(contender: Contender) -> zero_shard.Usage:
    usage = contender.usage()
    assert usage is not None, "only zero_shard says what it holds"
    return usage
