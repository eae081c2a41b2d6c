"""The monitor: collects what a step was like on every rank, and writes it on rank 0.

# Note [Nothing waits for the monitor]
A logged step costs one small gather between the hosts of the ranks, which runs while the next step does and is looked
at when that one is logged. On a GPU times are marks in its stream and losses are copied behind it, so they are read one
step later still. The norm comes from squares that are summed while gradients are reduced.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from zero_shard.adamw import AdamW
from zero_shard.collectives import Pending
from zero_shard.gradient_watch import Squares
from zero_shard.module_names import plain_named_parameters
from zero_shard.monitor.drift import Band
from zero_shard.monitor.facts import facts_of_run
from zero_shard.monitor.numbers import Entry, Record, Rows, Tally, event_entry
from zero_shard.monitor.outputs import JsonLines, ProgressBar, TensorBoard, check_installed
from zero_shard.monitor.timer import Timer
from zero_shard.stages.hooks import weakly

_LOG = logging.getLogger("zero_shard")
_LABEL = "the numbers of the monitor"
_FILE_NAME = "run.jsonl"
_HELD_INTERVAL_S = 1.0  # counting what is held looks at every parameter
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Monitor:
    """Records loss, gradient norm, times, traffic, memory and events of every step; training stays the same to the bit.

    All ranks build it, after the optimizer, and call `log` once a step, after ``optimizer.step()`` (or where a
    GradScaler has left it out). What a step was like is known when the next one is logged.

    Args:
        optimizer: A zero_shard.AdamW.
        path: Directory for ``run.jsonl``, which is appended to, and TensorBoard; or the name of the ``.jsonl`` file.
            None: no file.
        module: Whose forward and backward are timed; the optimizer's, if it was given one.
        tokens_per_step: Of all ranks together.
        every: Log each so many steps; times and loss are means over them.
        total_steps: For the progress bar.
        console: Show a progress bar on rank 0 (needs tqdm).
        tensorboard: Write for TensorBoard (needs tensorboard).
    Raises:
        TypeError, ValueError: A bad argument.
        ModuleNotFoundError: A library is missing.
        OSError, RuntimeError: Rank 0 can't write to ``path``; on all ranks.

    Example:
        >>> with zero_shard.Monitor(optimizer, path="runs/gpt", tokens_per_step=8192) as monitor:
        ...     for batch in loader:
        ...         loss = model(batch)
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         monitor.log(loss=loss)
    """

    def __init__(
        self,
        optimizer: AdamW,
        path: str | Path | None = None,
        *,
        module: nn.Module | None = None,
        tokens_per_step: int | None = None,
        every: int = 1,
        total_steps: int | None = None,
        console: bool = True,
        tensorboard: bool = False,
    ) -> None:
        _check(optimizer, path, tokens_per_step, every, console, tensorboard)
        self._optimizer, self._ranks, self._watch = optimizer, optimizer.held.ranks, optimizer.gradient_watch
        self._module = optimizer.module if module is None else module
        self._tokens_per_step, self._every = tokens_per_step, every
        buckets = optimizer.held.buckets
        self._device = buckets[0].device if buckets else torch.device("cpu")
        self._outputs: list[Any] = []
        self._is_appending = self._is_closed = False
        self._bar: ProgressBar | None = None
        with self._ranks.errors_on_all_ranks("opening the files of the monitor"):
            if self._ranks.rank == 0:
                self._open(path, total_steps, console, tensorboard)
        self._names: list[str] = []  # of all parameters, in the order of the model
        self._bands = {"loss": Band("loss", 0.1, True), "grad_norm": Band("gradient norm", 2.0, False)}
        self._unsent: deque[Record] = deque()
        self._sent: tuple[Record, Tensor, Pending] | None = None
        self._step: int | None = None
        self._begin_s, self._held_s, self._held_nbytes = perf_counter(), -math.inf, 0
        self._tally, self._has_stepped = Tally(), False
        self._handles = [
            optimizer.register_step_pre_hook(weakly(self._before_step)),
            optimizer.register_step_post_hook(weakly(self._after_step)),
        ]
        self._watch.begin(self)
        self._timer = Timer(self._module, self._device)

    def _open(self, path: str | Path | None, total_steps: int | None, console: bool, tensorboard: bool) -> None:
        if path is not None:
            path = Path(path)
            file = path if path.suffix == ".jsonl" else path / _FILE_NAME
            lines = JsonLines(file)
            self._outputs.append(lines)
            self._is_appending = lines.has_lines
            more = {"every": self._every, "tokens_per_step": self._tokens_per_step}
            lines.write({**facts_of_run(self._optimizer, self._device), **more})
            if tensorboard:
                self._outputs.append(TensorBoard(file.parent))
        if console:
            self._bar = ProgressBar(total_steps)
            self._outputs.append(self._bar)

    # ---- what the loop calls -------------------------------------------------------------------------------

    @torch.no_grad()
    def log(self, loss: Tensor | float | None = None, *, step: int | None = None, tokens: int = 0) -> list[Entry]:
        """Note the end of a step. All ranks call, once a step; communicates, without blocking, every so many steps.

        Args:
            loss: This rank's, one element; the mean over ranks is logged.
            step: Number of the step; one more than the last, at first what the optimizer has counted.
            tokens: Of this rank in this step, where they vary; in place of ``tokens_per_step``.
        Returns:
            Events that have become known, oldest first, the same on all ranks.
        """
        if self._is_closed:
            raise RuntimeError("Monitor.log was called after close(); build another Monitor to go on")
        step = None if step is None else int(step)
        if step is not None and step < 0:
            raise ValueError(f"step must be a whole number from 0 on, got {step}")
        if self._step is None:
            self._begin_counting(step)
        self._step = self._step + 1 if step is None else step  # type: ignore[operator]
        tally = self._tally
        if tally.squares is None:
            self.before_zero_grad()
        tally.num_steps += 1
        tally.num_skipped += not self._has_stepped
        tally.tokens += int(tokens)
        if loss is not None:
            is_late = self._timer.is_on_gpu and isinstance(loss, Tensor) and loss.device == self._device
            tally.loss_sum = tally.loss_sum + (loss.double() if is_late else float(loss))  # type: ignore[union-attr]
            tally.num_losses += 1
        self._has_stepped = False
        if self._bar is not None:
            self._try(self._bar, self._bar.advance)
        events: list[Entry] = []
        if tally.num_steps >= self._every:
            self._unsent.append(self._end_record())
            while len(self._unsent) > self._timer.is_on_gpu:
                events += self._send(self._unsent.popleft())
        self._watch.forget()
        return events

    def event(self, name: str, message: str, *, parameter: str | None = None, rank: int | None = None) -> None:
        """Note something that has happened, such as a rollback; rank 0 writes it. Local."""
        self._write(event_entry(self._step or 0, name, message, parameter, rank))

    def close(self) -> list[Entry]:
        """Write what is left, and look no more. All ranks call; blocks. Returns the events left, as `log` does."""
        events: list[Entry] = []
        try:
            while self._unsent:
                events += self._send(self._unsent.popleft())
            return events + self._finish()
        finally:  # a peer may be gone
            self._detach()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # other ranks may be anywhere
            self._detach()

    def _detach(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.close()
        self._watch.end(self)
        for handle in self._handles:
            handle.remove()
        for output in self._outputs:
            self._try(output, output.close)
        self._outputs, self._bar = [], None

    # ---- hooks ---------------------------------------------------------------------------------------------

    def _before_step(self, *_: Any) -> None:
        self._timer.begin("optimizer")

    def _after_step(self, *_: Any) -> None:
        self._timer.end("optimizer")
        self._has_stepped = True
        self._tally.sent_nbytes += self._ranks.sent_in_step[0]
        self._look()
        now = perf_counter()
        if self._is_due and now - self._held_s > _HELD_INTERVAL_S:
            self._held_s, self._held_nbytes = now, self._optimizer.usage().held_nbytes

    def before_zero_grad(self) -> None:
        """Look at gradients that see no step: a GradScaler has skipped it. Called by the reducer, before they go."""
        if not self._has_stepped and self._timer.has_backward and self._watch.has_reduced:
            self._look()

    @property
    def _is_due(self) -> bool:
        return self._tally.num_steps + 1 >= self._every

    def _look(self) -> None:
        if self._is_due:
            found = self._watch.squares(self._optimizer.param_groups)
            self._tally.squares = Squares(_on_host(found.total), _on_host(found.sums), found.buckets)

    # ---- records -------------------------------------------------------------------------------------------

    def _begin_counting(self, step: int | None) -> None:
        counted = int(max(self._optimizer.held.step_counts(), default=0))
        self._step = max(0, counted - self._has_stepped if step is None else step - 1)
        if self._bar is not None:
            self._bar.begin_at(self._step)
        if self._is_appending:
            self.event("resume", f"the log goes on after step {self._step}, on {self._ranks.num_ranks} ranks")

    def _end_record(self) -> Record:
        tally, self._tally = self._tally, Tally()
        if isinstance(tally.loss_sum, Tensor):
            tally.loss_sum = _on_host(tally.loss_sum)
        assert self._step is not None
        return Record(
            step=self._step,
            time_s=perf_counter() - self._begin_s,
            lr=[float(group["lr"]) for group in self._optimizer.param_groups],
            lap=self._timer.lap(),
            tally=tally,
            origin=self._watch.origin,
            held_nbytes=self._held_nbytes,
            peak_nbytes=_peak_nbytes(self._device),
        )

    def _send(self, record: Record) -> list[Entry]:
        """Start to gather the rows of a record, and write the one before it; a rank alone has nothing to wait for."""
        row = record.row(self._names_in_order)
        events = self._finish()
        self._sent = (record, *self._ranks.start_gather(row, _LABEL))
        return events if self._ranks.num_ranks > 1 else self._finish()

    def _finish(self) -> list[Entry]:
        """Write the record whose rows are under way, if there is one; return its events."""
        if self._sent is None:
            return []
        (record, gathered, pending), self._sent = self._sent, None
        pending.wait()
        rows = Rows(record, gathered)
        grad_norm = rows.grad_norm()
        entry = rows.entry(grad_norm, self._timer.has_parts, self._tokens_per_step)
        events = rows.events(grad_norm, self._names_in_order, self._optimizer.config.skip_nonfinite)
        for key, band in self._bands.items():
            alarm = None if entry[key] is None else band.add(entry[key])
            if alarm is not None:
                events.append(rows.event("drift", alarm))
        for each in (entry, *events):
            self._write(each)
        return events

    def _names_in_order(self) -> list[str]:
        slots = self._optimizer.held.slots
        if len(self._names) != len(slots):
            named = () if self._module is None else plain_named_parameters(self._module)
            places = {name: place for place, (name, _) in enumerate(named)}
            self._names = sorted((slot.name for slot in slots), key=lambda name: places.get(name, 0))
        return self._names

    # ---- writing -------------------------------------------------------------------------------------------

    def _write(self, entry: Entry) -> None:
        for output in [*self._outputs]:
            self._try(output, getattr(output, entry["kind"]), entry)

    def _try(self, output: Any, call: Callable[..., None], *args: Any) -> None:
        """Go on without an output that fails: a full disk, or a terminal that is gone, is no reason to end a run."""
        try:
            call(*args)
        except OSError as error:
            name = type(output).__name__
            _LOG.warning("zero_shard: the monitor can't write any more and goes on without its %s: %s", name, error)
            self._outputs = [each for each in self._outputs if each is not output]
            self._bar = None if output is self._bar else self._bar
            with suppress(OSError):
                output.close()


def _check(
    optimizer: Any, path: Any, tokens_per_step: int | None, every: int, console: bool, tensorboard: bool
) -> None:
    if not isinstance(optimizer, AdamW):
        raise TypeError(f"Monitor needs a zero_shard.AdamW, got {type(optimizer).__name__}")
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a whole number of steps, at least 1, got {every!r}")
    if tokens_per_step is not None and not tokens_per_step > 0:
        raise ValueError(f"tokens_per_step must be positive, got {tokens_per_step!r}; pass None if there are no tokens")
    if tensorboard and path is None:
        raise ValueError("tensorboard=True needs a path, got None; pass the directory to write to")
    if console:
        check_installed("tqdm", "console")
    if tensorboard:
        check_installed("tensorboard", "tensorboard")


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host of a tensor on a GPU, complete when the GPU gets there; others as they are."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _peak_nbytes(device: torch.device) -> int:
    """Return the largest memory so far: allocated on a GPU, resident of the process otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
