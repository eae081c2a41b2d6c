"""Run steps of an optimizer on a skeleton and write down what happens."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from zero_shard.config import ZeroConfig
from zero_shard.fake_group import FakeGroup, Message
from zero_shard.rehearsal.memory import Ledger
from zero_shard.rehearsal.skeleton import Skeleton

_PACKAGE = str(Path(__file__).parent.parent)
_NUM_TIMED_STEPS = 3
_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


@dataclass(frozen=True)
class Phase:
    """One part of a step: "forward", "backward" or "step".

    Attributes:
        peak: Bytes of each kind when their sum is highest.
        messages: What the rank has sent, in order.
        host_s: Seconds that our Python takes on this host.
        num_calls: How many functions of this package were called.
    """

    peak: dict[str, int]
    messages: tuple[Message, ...]
    host_s: float
    num_calls: int


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in a step that is neither the first nor the second.

    Attributes:
        held: Bytes of each kind between steps.
        held_with_gradients: The same before the step, where gradients are there.
        promised_nbytes: Model state by the formula.
        sent_nbytes: What the communicator counts for the step.
        update_nbytes: That the update reads and writes.
    """

    config: ZeroConfig
    num_ranks: int
    phases: dict[str, Phase]
    held: dict[str, int]
    held_with_gradients: dict[str, int]
    promised_nbytes: int
    sent_nbytes: int
    update_nbytes: int


class _Rehearsing:
    """An optimizer on a skeleton, driven phase by phase."""

    def __init__(self, skeleton: Skeleton, optimizer: Any, group: FakeGroup) -> None:
        self.skeleton, self.optimizer, self.group = skeleton, optimizer, group
        self._stream: Tensor | None = None
        bucketed = {id(param) for bucket in optimizer.held.buckets for param in bucket.params}
        self._rest = [(kind, tensor) for kind, tensor in skeleton.tensors if id(tensor) not in bucketed]

    def phases(self) -> dict[str, Callable[[], None]]:
        return {"forward": self._forward, "backward": self._backward, "step": self.optimizer.step}

    def _forward(self) -> None:
        self._stream = self.skeleton.walk()

    def _backward(self) -> None:
        stream, self._stream = self._stream, None
        assert stream is not None
        if stream.requires_grad:
            stream.backward()

    def step(self) -> None:
        for run in self.phases().values():
            run()
        self.optimizer.zero_grad()

    def holdings(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is held for a purpose; a gradient that is a view of a bucket's counts once."""
        held = self.optimizer.held
        for bucket in held.buckets:
            yield "in flight" if bucket.owns_shard else "weights", bucket.full
            yield "weights", bucket.shard
            if bucket.grad is not None:
                yield "gradients", bucket.grad
            if bucket.low is not None:
                yield "masters", bucket.low
            yield from (("moments", each) for name in _STATE if (each := getattr(bucket, name)) is not None)
        for slot in held.slots:
            local = slot.local if slot.local is not None else slot.param.grad
            if local is not None and not hasattr(local, "source"):
                yield "gradients", local
        yield from self._rest

    def update_nbytes(self) -> int:
        """Bytes that the kernel of the update reads and writes."""
        total = 0
        for bucket in self.optimizer.held.buckets:
            if bucket.exp_avg is None:
                continue
            changed = [bucket.shard, bucket.low, *(getattr(bucket, name) for name in _STATE)]
            total += sum(2 * each.nbytes for each in changed if each is not None)
            total += bucket.layout.shard_numel * bucket.math_dtype.itemsize
        return total


def rehearse(
    make_optimizer: Callable[[Skeleton, FakeGroup], Any],
    skeleton: Skeleton,
    num_ranks: int,
    is_native: bool = True,
    is_timed: bool = True,
    ranks_per_node: int = 8,
) -> Rehearsal:
    """Run a few steps of the real code on the meta device as rank 0 of ``num_ranks``; nothing is sent or computed.

    Args:
        make_optimizer: Builds a zero_shard.AdamW over the parameters of the skeleton in the group.
        skeleton: Used up.
        is_native: Collectives as NCCL has them; False: as gloo has them.
        is_timed: Also measure the time on the host.
        ranks_per_node: Consecutive ranks that share a node.
    Raises:
        ValueError, NotImplementedError: What the optimizer refuses.
    """
    with _silenced(), torch.inference_mode(False), torch.enable_grad():
        bare_s = _bare_seconds(skeleton) if is_timed else 0.0
        run: list[_Rehearsing] = []
        ledger = Ledger(lambda: run[0].holdings() if run else [])
        for _, tensor in skeleton.tensors:
            ledger.track(tensor)
        with ledger:
            group = FakeGroup(num_ranks, is_native, ranks_per_node)
            run.append(_Rehearsing(skeleton, make_optimizer(skeleton, group), group))
            for _ in range(2):  # state comes into being, the order of buckets and units is learned
                run[0].step()
            recorded = _record(run[0], ledger)
        seconds, counts = _measure(run[0], bare_s) if is_timed else ({}, {})
        phases = {
            name: Phase(peak, recorded.messages[name], seconds.get(name, 0.0), counts.get(name, 0))
            for name, peak in recorded.peaks.items()
        }
        return Rehearsal(
            run[0].optimizer.config,
            num_ranks,
            phases,
            recorded.held,
            recorded.held_with_gradients,
            recorded.usage.promised_nbytes,
            recorded.usage.sent_nbytes,
            run[0].update_nbytes(),
        )


@dataclass
class _Recorded:
    peaks: dict[str, dict[str, int]]
    messages: dict[str, tuple[Message, ...]]
    held: dict[str, int]
    held_with_gradients: dict[str, int]
    usage: Any


def _record(run: _Rehearsing, ledger: Ledger) -> _Recorded:
    """Run one step and note its peaks and messages."""
    peaks, messages = {}, {}
    held_with_gradients: dict[str, int] = {}
    for name, phase in run.phases().items():
        if name == "step":
            held_with_gradients = ledger.present()
        run.group.messages.clear()
        ledger.begin_phase()
        phase()
        peaks[name], messages[name] = ledger.peak(), tuple(run.group.messages)
    usage = run.optimizer.usage()
    run.optimizer.zero_grad()
    return _Recorded(peaks, messages, ledger.present(), held_with_gradients, usage)


def _measure(run: _Rehearsing, bare_s: float) -> tuple[dict[str, float], dict[str, int]]:
    """Return the seconds and the calls of our Python in each phase, the least of a few steps."""
    seconds = dict.fromkeys(run.phases(), float("inf"))
    for _ in range(_NUM_TIMED_STEPS):
        for name, phase in run.phases().items():
            start = time.perf_counter()
            phase()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
        run.optimizer.zero_grad()
        run.group.messages.clear()
    walk_s = seconds["forward"] + seconds["backward"]
    own = max(walk_s - bare_s, 0.0) / walk_s if walk_s else 0.0
    seconds |= {name: seconds[name] * own for name in ("forward", "backward")}
    counts = {}
    for name, phase in run.phases().items():
        with _counting_calls() as counted:
            phase()
        counts[name] = counted[0]
    run.optimizer.zero_grad()
    return seconds, counts


def _bare_seconds(skeleton: Skeleton) -> float:
    """Seconds of forward and backward of the skeleton alone."""
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        stream = skeleton.walk()
        if stream.requires_grad:
            stream.backward()
        best = min(best, time.perf_counter() - start)
        for _, tensor in skeleton.tensors:
            tensor.grad = None
    return best


@contextmanager
def _counting_calls() -> Iterator[list[int]]:
    """Count calls of this package's functions inside of the context."""
    counted = [0]

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            counted[0] += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield counted
    finally:
        sys.setprofile(before)


@contextmanager
def _silenced() -> Iterator[None]:
    """Keep the line of a new optimizer out of the log, and the collector out of the times."""
    log, was_collecting = logging.getLogger("zero_shard"), gc.isenabled()
    before, log.disabled = log.disabled, True
    gc.disable()
    try:
        yield
    finally:
        log.disabled = before
        if was_collecting:
            gc.enable()


def optimizer_maker(
    kind: Callable[..., Any], config: Any, groups: Sequence[dict[str, Any]] | None = None
) -> Callable[[Skeleton, FakeGroup], Any]:
    """Return what `rehearse` takes.

    Args:
        kind: zero_shard.AdamW.
        config: For it.
        groups: Parameter groups of the real parameters; None: all of the model's.
    """

    def make(skeleton: Skeleton, group: FakeGroup) -> Any:
        module = skeleton.module if skeleton.has_model else None
        if groups is None:
            params: Any = skeleton.module.parameters()
        else:
            params = [{**each, "params": [skeleton.param(param) for param in each["params"]]} for each in groups]
        return kind(params, module=module, config=config, process_group=group)

    return make
