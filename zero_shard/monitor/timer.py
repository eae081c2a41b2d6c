"""How long the parts of a step take: by the host's clock, or by marks in the stream of a GPU that nobody waits for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero_shard import phases
from zero_shard.collectives import pending
from zero_shard.stages.backward_end import call_at_end, is_inside_node
from zero_shard.stages.hooks import is_in_graph_task, tensors_in, weakly

_OF_MODULE = ("forward", "backward")
_COMPILER_REASON = "zero_shard.Monitor takes the time of this module; a compiler goes on inside of it"


class _Hook:
    """A hook that no compiler looks into. With a copy of its module, or in a pickle, it is one that does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._call = torch.compiler.disable(weakly(method), reason=_COMPILER_REASON)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> Any:
        return _nothing_hook, ()


def _nothing_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass


class _Clock(Protocol):
    def now(self) -> Any: ...

    def ms(self, start: Any, end: Any) -> float: ...

    def settle(self, moment: Any) -> None: ...


class _HostClock:
    def now(self) -> float:
        return perf_counter()

    def ms(self, start: float, end: float) -> float:
        return 1e3 * (end - start)

    def settle(self, moment: float) -> None:
        pass


class _StreamClock:
    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))

    def settle(self, moment: torch.cuda.Event) -> None:
        moment.synchronize()


class Lap(NamedTuple):
    """What the timer saw between two moments; `ms` waits until a GPU has come past the last one."""

    clock: _Clock
    start: Any
    end: Any
    spans: dict[str, list[tuple[Any, Any]]]
    waited_ms: float  # by the host, for collectives

    def ms(self) -> dict[str, float]:
        """Return milliseconds: "step" for all, "exposed" for waits, and the parts that were seen."""
        self.clock.settle(self.end)
        sums = {name: sum(self.clock.ms(*span) for span in spans) for name, spans in self.spans.items()}
        sums["exposed"] = sums.get("exposed", 0.0) + (self.waited_ms if isinstance(self.clock, _HostClock) else 0.0)
        return {"step": self.clock.ms(self.start, self.end), **sums}


class Timer:
    """Takes the time of forward, backward and optimizer.

    Args:
        module: Whose forward and backward; None: those are not known.
        device: Of the parameters.
    """

    def __init__(self, module: nn.Module | None, device: torch.device) -> None:
        self.is_on_gpu = device.type == "cuda"
        self._clock: _Clock = _StreamClock() if self.is_on_gpu else _HostClock()
        self.has_parts = module is not None
        self._spans: dict[str, list[tuple[Any, Any]]] = {}
        self._open: dict[str, Any] = {}
        self._is_in_closure = False
        self._handles: list[Any] = []
        if module is not None:
            self._handles = [
                module.register_forward_pre_hook(_Hook(self._enter), prepend=True),
                module.register_forward_hook(_Hook(self._leave), always_call=True),
            ]
        if self.is_on_gpu:
            pending.around_native_wait = weakly(self._wait)
        self._begin_lap(self._clock.now())

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        if self.is_on_gpu:
            pending.around_native_wait = None

    def _begin_lap(self, now: Any) -> None:
        self._start, self._waited_s = now, phases.seconds["wait"]
        self._spans, self._open = {}, {}  # what an exception has left open is none of the next lap

    def lap(self) -> Lap:
        """End the present lap and begin the next one."""
        now, start, spans = self._clock.now(), self._start, self._spans
        waited_ms = 1e3 * (phases.seconds["wait"] - self._waited_s)
        self._begin_lap(now)
        return Lap(self._clock, start, now, spans, waited_ms)

    @property
    def has_backward(self) -> bool:
        """Whether the present lap has seen a backward."""
        return "backward" in self._spans or "backward" in self._open

    def begin(self, name: str) -> None:
        """Begin a part. A closure's forward and backward interrupt the optimizer's."""
        if name in _OF_MODULE and "optimizer" in self._open:
            self.end("optimizer")
            self._is_in_closure = True
        self._open[name] = self._clock.now()

    def end(self, name: str) -> None:
        """End a part, if it has begun."""
        start = self._open.pop(name, None)
        if start is not None:
            self._spans.setdefault(name, []).append((start, self._clock.now()))
        if name in _OF_MODULE and self._is_in_closure:
            self._is_in_closure = False
            self.begin("optimizer")

    # ---- hooks ---------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not is_in_graph_task():
            self.begin("forward")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if "forward" not in self._open or is_in_graph_task():
            return
        self.end("forward")
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(weakly(self._gradient_arrives))

    def _gradient_arrives(self, grad: Tensor) -> None:
        if "backward" not in self._open and not is_inside_node():
            self.begin("backward")
            call_at_end(self)

    @property
    def number(self) -> int:
        """The last of those that are called at the end of a backward."""
        return sys.maxsize

    def finish_backward(self) -> None:
        """Note the end of a backward. Called by the engine."""
        self.end("backward")

    def _wait(self) -> None:
        self.end("exposed") if "exposed" in self._open else self.begin("exposed")
