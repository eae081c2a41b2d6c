"""The rounds of one process group: every implementation in turn, built anew each time, from the same weights and data.

Building anew costs time and buys two things: what one implementation holds is not in the memory of the next, and the
largest model is limited by one implementation, not by the sum of all.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from step_bench import say
from torch import Tensor

from train_bench import memory
from train_bench.clocks import Clock, Times, exposed_ms_by_trace, make_clock
from train_bench.contenders import BUILDERS, DESCRIPTIONS, REFERENCE, Contender, Setup, missing_reason, touch
from train_bench.models import Batch, Shape, make_batch, make_model

NUM_TRACED_STEPS = 2


@dataclass(frozen=True)
class Plan:
    """What one process group measures.

    Attributes:
        model: Name among SHAPES.
        shape: Of the model.
        batch: Samples per rank.
        names: Implementations, in order.
        rounds, warmup, steps: Steps are those of each implementation in each round that are timed.
        is_half, is_recomputing: See `Setup` and `make_model`.
        network_device: Whose bytes are counted; "" if the wire is another one.
    """

    model: str
    shape: Shape
    batch: int
    names: Sequence[str]
    rounds: int
    warmup: int
    steps: int
    is_half: bool = False
    is_recomputing: bool = False
    network_device: str = "lo"


@dataclass
class Sample:
    """What one rank has measured of one implementation in one round; bytes are above those before it was built."""

    times: list[Times]
    traced_exposed_ms: float | None  # per step; CUDA only
    cpu_ms: float  # per step, of all threads of the process
    peak_nbytes: int | None
    held_nbytes: int
    sent_nbytes: int | None  # per step, by the implementation's own count
    floor_nbytes: int | None
    device_sent_nbytes: float | None  # per step, of all ranks on this machine
    loss: float


@dataclass
class Entry:
    """All rounds of one implementation.

    Attributes:
        rounds: A list with the sample of every rank for each round.
        missing: Why there are none.
        weights_diff: Largest difference of the weights after the first round to those of DDP.
    """

    name: str
    description: str
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)
    missing: str = ""
    weights_diff: float | None = None


class Rounds:
    """Measures a plan. All ranks do the same.

    Args:
        plan: What is measured.
        device: Of this rank.
        control: A gloo group of all ranks, for objects.
    """

    def __init__(self, plan: Plan, device: torch.device, control: Any) -> None:
        self._plan, self._device, self._control = plan, device, control
        self._clock: Clock = make_clock(device)
        self._reference: dict[str, Tensor] = {}
        self._num_params = 0

    def run(self) -> dict[str, Any]:
        """Return the run as JSON takes it, on rank 0."""
        entries = {name: Entry(name, DESCRIPTIONS[name]) for name in self._plan.names}
        for entry in entries.values():
            entry.missing = missing_reason(entry.name, self._device)
        touch(self._plan.shape, self._device)
        # The first round begins with what weights are compared to.
        order = sorted(entries.values(), key=lambda entry: entry.name != REFERENCE)
        for number in range(self._plan.rounds):
            for entry in order if number % 2 == 0 else reversed(order):
                if not entry.missing:
                    self._take(entry, number)
        plan = self._plan
        return {
            "world_size": dist.get_world_size(),
            "model": plan.model,
            "num_params": self._num_params,
            "tokens_per_rank": plan.batch * plan.shape.sequence,
            "plan": {name: value for name, value in asdict(plan).items() if name != "names"},
            "entries": [asdict(entry) for entry in entries.values()],
        }

    def _take(self, entry: Entry, number: int) -> None:
        """Measure one implementation once."""
        if dist.get_rank() == 0:
            say(f"round {number + 1} of {self._plan.rounds}, {dist.get_world_size()} ranks: {entry.name}")
        error, sample = "", None
        memory.settle(self._device)
        before_nbytes = memory.present_nbytes(self._device)
        try:
            sample = self._measure(entry, number, before_nbytes)
        except (RuntimeError, ImportError, ValueError, TypeError, AttributeError) as raised:  # a line in the report
            lines = str(raised).strip().splitlines() or [""]
            error = f"{type(raised).__name__}: {lines[0][:200]}"
        gc.collect()
        memory.settle(self._device)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (error, None if sample is None else asdict(sample)), group=self._control)
        errors = [text for text, _ in found if text]
        if errors:
            entry.missing = f"failed: {errors[0]}"
            entry.rounds.clear()
            if dist.get_rank() == 0:
                say(f"left out: {entry.name}: {entry.missing}")
            if len(errors) < len(found):
                # What the others have sent meanwhile would be taken for the next one's.
                raise RuntimeError(f"{entry.name} failed on {len(errors)} of {len(found)} ranks: {errors[0]}")
            return
        entry.rounds.append([each for _, each in found])

    def _measure(self, entry: Entry, number: int, before_nbytes: int) -> Sample:
        plan, device = self._plan, self._device
        model = make_model(plan.shape, device, plan.is_recomputing)
        self._num_params = sum(param.numel() for param in model.parameters())
        contender = BUILDERS[entry.name](model, Setup(device, plan.is_half, plan.batch))
        del model
        try:
            rank = dist.get_rank()
            batches = [make_batch(plan.shape, plan.batch, step, rank, device) for step in range(plan.steps)]
            for step in range(plan.warmup):
                self._step(contender, batches[step % plan.steps])
            self._clock.times()
            is_reset, sent = memory.reset_peak(device), self._wire()
            busy_s = time.process_time()
            for batch in batches:
                loss = self._step(contender, batch)
            busy_s = time.process_time() - busy_s
            times = self._clock.times()
            peak = memory.peak_nbytes(device) - before_nbytes if is_reset else None
            sent_after = self._wire()
            memory.settle(device)
            held = memory.present_nbytes(device) - before_nbytes
            usage = contender.usage()
            exposed = self._traced_exposed_ms(contender, batches[0])
            if number == 0:
                self._compare(entry, contender)
            return Sample(
                times=[Times(*([round(ms, 4) for ms in part] for part in each)) for each in times],
                traced_exposed_ms=exposed,
                cpu_ms=round(1e3 * busy_s / plan.steps, 4),
                peak_nbytes=peak,
                held_nbytes=held,
                sent_nbytes=None if usage is None else usage.sent_nbytes,
                floor_nbytes=None if usage is None else usage.floor_sent_nbytes,
                device_sent_nbytes=None if sent is None or sent_after is None else (sent_after - sent) / plan.steps,
                loss=loss.item(),
            )
        finally:
            contender.close()

    def _step(self, contender: Contender, batch: Batch) -> Tensor:
        clock = self._clock
        clock.mark()
        loss = contender.forward(batch)
        clock.mark()
        contender.backward(loss)
        clock.mark()
        contender.step()
        clock.mark()
        contender.zero_grad()
        clock.mark()
        return loss.detach()

    def _wire(self) -> int | None:
        """Return the network device's counter while all ranks are quiet."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self._control)
        return memory.device_sent_nbytes(self._plan.network_device)

    def _traced_exposed_ms(self, contender: Contender, batch: Batch) -> float | None:
        if self._device.type != "cuda":
            return None

        def steps() -> None:
            for _ in range(NUM_TRACED_STEPS):
                self._step(contender, batch)

        exposed = exposed_ms_by_trace(steps) / NUM_TRACED_STEPS
        self._clock.times()
        return exposed

    def _compare(self, entry: Entry, contender: Contender) -> None:
        """Note how far the weights are from those of DDP. All ranks call."""
        weights = contender.full_weights()
        if entry.name == REFERENCE:
            self._reference = weights
        if not self._reference or dist.get_rank():
            return
        if weights.keys() != self._reference.keys():
            raise RuntimeError(f"expected the weights {sorted(self._reference)[:3]}..., got {sorted(weights)[:3]}...")
        diffs = [float((weights[name] - wanted).abs().max()) for name, wanted in self._reference.items()]
        entry.weights_diff = max(diffs) if all(map(math.isfinite, diffs)) else math.inf
