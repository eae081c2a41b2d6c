"""Moves units between released and whole, in the order that a schedule gives."""

from __future__ import annotations

from zero_shard.collectives import Communicator
from zero_shard.masters import take_shard
from zero_shard.phases import Phase
from zero_shard.stages.released import release, restore
from zero_shard.stages.unit import Unit, UnitState


class Gatherer:
    """Gathers and releases units. See Note [One storage for life] in ``parameters``."""

    def __init__(self, communicator: Communicator) -> None:
        self.units: list[Unit] = []
        self._communicator = communicator

    def start_gather(self, index: int) -> None:
        """Start to gather a unit in place; all ranks do so in the same order."""
        unit = self.units[index]
        with Phase("gather", unit.name):
            self._start(unit)

    def _start(self, unit: Unit) -> None:
        unit.num_promised += 1
        if unit.state is UnitState.GATHERING:
            self.finish(unit)
        for bucket in unit.buckets:
            if unit.state is UnitState.RELEASED:
                bucket.refill_full()
            label = f"the parameters of {unit.name}"
            unit.gathers.append(
                self._communicator.all_gather_(self._communicator.shards, bucket.full, 3 * bucket.index + 1, label)
            )
        if unit.state is UnitState.WHOLE:
            self.wait(unit)
        else:
            unit.state = UnitState.GATHERING

    def discard(self, index: int) -> None:
        """End the gather of a unit that this rank passes by."""
        unit = self.units[index]
        unit.num_promised -= 1
        self.finish(unit)
        self.release(unit)

    def wait(self, unit: Unit) -> None:
        """Block until the gathers of a unit are done."""
        gathers, unit.gathers = unit.gathers, []
        if gathers:
            with Phase("gather", unit.name):
                for gather in gathers:
                    gather.wait()

    def finish(self, unit: Unit) -> None:
        """Block until a unit is whole, and let its parameters be read."""
        self.wait(unit)
        if unit.state is UnitState.WHOLE:
            return
        for bucket in unit.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                restore(param, view)
        unit.unlock()
        unit.state = UnitState.WHOLE
        unit.version = unit.count_changes()

    def release(self, unit: Unit) -> None:
        """Give the memory of a whole unit back unless something needs it. Local."""
        if unit.state is not UnitState.WHOLE or unit.is_in_use:
            return
        has_changed = unit.count_changes() != unit.version
        for bucket in unit.buckets:
            if has_changed:  # a forward edited its weights in place, as nn.Embedding(max_norm=...) does
                take_shard(bucket)
        unit.lock()
        for bucket, placeholders in zip(unit.buckets, unit.placeholders, strict=True):
            for param, placeholder in zip(bucket.params, placeholders, strict=True):
                release(param, placeholder)
            bucket.release_full()
        unit.state = UnitState.RELEASED
