"""What an optimizer holds on this rank, for all that reads and writes it: checkpoints, averages, state dicts.

checkpoint, averaging     ->  optimizer.held  ->  slots, buckets, step counts; publish
optimizer.state[param]    ->  {"step": 0-dim alias, "exp_avg": alias of the own part, ...}
"""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_shard.buffers import STATE_NAMES, Bucket
from zero_shard.collectives import Communicator
from zero_shard.groups import Groups, unpack_groups
from zero_shard.stages.base import Layer
from zero_shard.stages.reduction import Reducer
from zero_shard.stages.slots import GradSlot
from zero_shard.state import clear_state, write_entry
from zero_shard.tables import SlotTables
from zero_shard.tenure import Tenure

_held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter -> HeldState, weakly


def held_of(param: nn.Parameter) -> HeldState | None:
    """Return the held state of the optimizer that is in charge of a parameter, None if there is none."""
    reference = _held.get(param)
    held: HeldState | None = None if reference is None else reference()
    return held


class HeldState:
    """The state that an optimizer holds on this rank, as ``optimizer.held``: the way in for checkpoints and averages.

    To read: `check_in_charge` and `take_back_replaced`, then the ranges of the buckets (`Bucket.shard`, ``low``, the
    moments) and `step_counts`. To write: `load_groups` if the settings change, too; write the ranges; `publish` every
    bucket written, `finish_publishing`, and `set_step_counts`, which makes ``optimizer.state`` show what is there. All
    ranks do so in the same order; only ``publish`` communicates.

    Attributes:
        ranks: Who trains together: ``rank``, ``num_ranks``, ``shards``, ``replicas``, ``control``, ``all_gather_``,
            ``errors_on_all_ranks``.
        before_change: Called before moments change: a save in the background may be copying them.
        averages: Every ExponentialMovingAverage of the optimizer, weakly.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ranks: Communicator,
        stage: Layer,
        reducer: Reducer,
        tables: SlotTables,
        tenure: Tenure,
    ) -> None:
        self.ranks = ranks
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()
        self.before_change: Callable[[], None] | None = None
        self._optimizer = weakref.ref(optimizer)  # weak: an optimizer that is deleted goes at once
        self._stage, self._reducer, self._tables, self._tenure = stage, reducer, tables, tenure
        self._is_shown = torch.zeros(0, dtype=torch.uint8)  # [P]: `optimizer.state` shows the slot's state
        self._entries: dict[int, dict[str, Tensor]] = {}  # what it shows, by slot
        self._shown: list[Any] = []  # every value that is in it when nobody has edited it

    # ---- to read -------------------------------------------------------------------------------------------

    @property
    def slots(self) -> Sequence[GradSlot]:
        """Every parameter with a place, in the order of the buckets: ``slot.bucket``, ``slot.position``."""
        return self._reducer.slots

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Every bucket, equal in number and order on all ranks."""
        return self._reducer.buckets

    def step_counts(self) -> list[float]:
        """Return how often each slot has been updated; it has no state before the first time. May wait for a GPU."""
        counts: list[float] = self._tables.steps.tolist()
        return counts

    def check_in_charge(self) -> None:
        """Raise RuntimeError if a later optimizer has taken a parameter over. Local."""
        self._tenure.check_in_charge()

    def take_back_replaced(self) -> None:
        """Move parameters whose data the user has replaced back into their buckets, and notice edits. Local."""
        self._reducer.take_back_replaced()
        self.take_edits()

    # ---- to write ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Block until nobody copies moments any more. Local."""
        if self.before_change is not None:
            self.before_change()
            self.before_change = None

    @property
    def is_lent(self) -> bool:
        """Whether the parameters hold other numbers for a while (averages), which no step may train."""
        return self._tenure.is_lent

    @is_lent.setter
    def is_lent(self, value: bool) -> None:
        self._tenure.is_lent = value

    def load_groups(self, saved: Groups) -> None:
        """Take over the settings of packed groups; ``optimizer.state`` shows nothing afterwards. Local."""
        optimizer = self._present_optimizer()
        groups = unpack_groups(saved, optimizer.param_groups)
        optimizer.__setstate__({"state": defaultdict(dict), "param_groups": groups})
        self.show_anew()

    def before_publishing(self) -> None:
        """Free what is gathered at stage 3, as before a step: needed if a forward may have run since. Local."""
        self._stage.before_step()

    def publish(self, bucket: Bucket) -> None:
        """Start to make the own shard visible in the parameters. All ranks call, in the order of the buckets."""
        self._stage.publish(bucket)

    def finish_publishing(self) -> None:
        """Block until every publish is done; parameters may be read again."""
        self._stage.finish_publishing()

    def set_step_counts(self, counts: Sequence[float]) -> None:
        """Say how often each slot has been updated; ``optimizer.state`` shows those with a count above 0. Local."""
        self._tables.steps.copy_(torch.tensor(counts, dtype=torch.float32))
        self.show_counted()

    # ---- what `optimizer.state` shows ----------------------------------------------------------------------

    def make_room(self) -> None:
        """Show the state of all slots, of which there are more than before. Local."""
        for slot in self.slots:
            _held[slot.param] = weakref.ref(self)
        self._is_shown = torch.zeros(len(self.slots), dtype=torch.uint8)
        self.show_counted()
        self._shown = [None]  # the user may have given state to the new ones already

    def show(self, has_state: Tensor) -> None:
        """Let ``optimizer.state`` show the step count and the own part of the moments (aliases) of these slots [P]."""
        missing = (has_state > self._is_shown).nonzero().flatten().tolist()
        for index in missing:
            slot = self._reducer.slots[index]
            entry: dict[str, Any] = {}
            self._present_optimizer().state[slot.param] = entry
            self._show(slot, entry)
        if missing:
            self._note_shown()

    def show_counted(self) -> None:
        """Show the state of every slot that has been updated."""
        self.show(self._tables.steps.cpu() > 0)

    def show_anew(self) -> None:
        """Have the next `show` make new entries: there are other tensors to be shown."""
        self._is_shown.zero_()

    @torch.no_grad()
    def take_edits(self) -> None:
        """Do what the user has done to ``optimizer.state``: entries removed, emptied, replaced or given. Local.

        Values put in the place of what was shown have the shape of the parameter, or of this rank's part.

        Raises:
            ValueError: A value of another shape, or an entry without one of its values.
        """
        state = self._present_optimizer().state
        present = [value for entry in state.values() if isinstance(entry, dict) for value in entry.values()]
        if len(present) == len(self._shown) and all(map(operator.is_, present, self._shown)):
            return
        self.settle()
        for slot in self.slots[: len(self._is_shown)]:  # without those that are about to be made room for
            entry = state.get(slot.param)
            if entry and not entry.keys().isdisjoint(STATE_NAMES):
                self._take_entry(slot, entry)
            elif self._is_shown[slot.index]:
                clear_state(slot)
                self._tables.steps[slot.index] = 0
                self._is_shown[slot.index] = 0
        self._note_shown()

    def _take_entry(self, slot: GradSlot, entry: dict[str, Any]) -> None:
        shown = self._entries.get(slot.index, {}) if self._is_shown[slot.index] else {}
        changed = {name: value for name, value in entry.items() if value is not shown.get(name)}
        if changed:
            step = write_entry(slot, changed, is_new=not shown)
            if step is not None:
                self._tables.steps[slot.index] = step
            self._show(slot, entry)

    def _show(self, slot: GradSlot, entry: dict[str, Any]) -> None:
        """Have an entry of ``optimizer.state`` show the step count and the own part of the moments (aliases)."""
        shown = {"step": self._tables.steps[slot.index], **slot.bucket.state_entry(slot.position)}
        entry.update(shown)
        self._entries[slot.index], self._is_shown[slot.index] = shown, 1

    def _note_shown(self) -> None:
        state = self._present_optimizer().state
        self._shown = [value for entry in state.values() if isinstance(entry, dict) for value in entry.values()]

    def _present_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer that held this state has been deleted; keep it as long as its state")
        return optimizer
